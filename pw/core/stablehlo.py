"""StableHLO artifacts, as JAX's remote protocol sends them, and what a compiler says of them.

A client compiles such a computation on a host of its devices (`Compile`) before it registers a program with
it: only the compiler knows how the results are divided.
"""

from __future__ import annotations

import msgspec


class Stablehlo(msgspec.Struct, frozen=True, array_like=True):
    """The artifact of a computation of kind STABLEHLO; it takes and gives shards.

    An argument or result is *replicated*, or *stacked*: its spec says that the shards lie side by
    side in their first dimension, in the order of the computation's devices. A spec of no
    dimensions, or of one device, is replicated.
    """

    module: bytes
    """A portable artifact."""
    options: bytes
    """A serialized `xla.CompileOptionsProto` without a device assignment: the devices of the computation, in
    their order, are those of replica 0, then of replica 1, and so on."""
    callbacks: tuple[bytes, ...] = ()
    """The serialized host callbacks, as the client has sent them; they run in the client's process."""


class ShardFacts(msgspec.Struct, frozen=True, array_like=True):
    """What the compiler says of an argument or result."""

    dtype: str
    shape: tuple[int, ...]
    """Of one shard."""
    sharding: bytes
    """A serialized `xla.OpSharding` over the devices in their order; empty if the compiler does not say."""
    minor_to_major: tuple[int, ...]
    element_bits: int
    """Of dtypes with less than a byte, else 0."""
    memory_kind: str


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What the compiler says of a computation; sizes in bytes on one device."""

    name: str
    inputs: tuple[ShardFacts, ...]
    outputs: tuple[ShardFacts, ...]
    donated: tuple[int, ...]
    """Positions of the arguments whose buffers it takes over."""
    code_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
