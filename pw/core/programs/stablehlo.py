"""StableHLO artifacts, and what a compiler says of them.

The gateway compiles one on a host of its devices (`Compile`) before it registers a program with it: only
the compiler knows how the results are divided. The artifacts of `pw.jit` say so themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pw.core.errors import CodeRefused, CompileError
from pw.core.sharding import ArraySpec, Placement, Sharding

CALLS = frozenset(
    f"xla_ffi{which}_python_{device}_callback"
    for which in ("", "_partitioned")
    for device in ("cpu", "gpu")
)
"""Native functions that call a function of the client by its index in `Stablehlo.callbacks`."""
_DUMP_OPTION = re.compile(r"xla_dump_(?!to$)")
"""Names of options that say what XLA writes for people to read; workers write nothing."""
_HARMFUL_OPTION = re.compile(r"dump|dir|path|file|prefix|plugin|extra_options|librar|autotune")
"""Names of options that may write files on the host, read them, or load code."""


class Stablehlo(msgspec.Struct, frozen=True, array_like=True):
    """The artifact of a computation of kind STABLEHLO; it takes and gives shards."""

    module: bytes
    """Portable artifact of the module."""
    options: bytes = b""
    """A serialized `xla.CompileOptionsProto` without a device assignment: the devices of the computation, in
    their order, are those of replica 0, then of replica 1, and so on. Empty for what JAX chooses on the host,
    with a partition for each device."""
    callbacks: tuple[bytes, ...] = ()
    """The serialized host callbacks, as the client has sent them; they run in the client's process."""


class ShardFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of the compiler about an argument or result."""

    dtype: str
    """Dtype of the array; of a token "token": it lies in an array of booleans."""
    shape: tuple[int, ...]
    """Shape of one shard; (0,) of a token."""
    sharding: bytes
    """A serialized `xla.OpSharding` over the devices in their order; empty if the compiler does not say."""
    minor_to_major: tuple[int, ...]
    element_bits: int
    """Bits of an element of dtypes with less than a byte, else 0."""
    memory_kind: str


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of the compiler about a computation; sizes in bytes on one device."""

    name: str
    inputs: tuple[ShardFacts, ...]
    outputs: tuple[ShardFacts, ...]
    donated: tuple[int, ...]
    """Positions of the arguments whose buffers the computation takes over."""
    code_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int


_decode = msgspec.msgpack.Decoder(Stablehlo).decode


def encode(code: Stablehlo) -> bytes:
    """Return the artifact of a computation of kind STABLEHLO."""
    return msgspec.msgpack.encode(code)


def decode(artifact: bytes) -> Stablehlo:
    """Return what `encode` was given. Raises CompileError if it is something else."""
    try:
        return _decode(artifact)
    except msgspec.MsgspecError as error:
        raise CompileError(f"the code of the function cannot be read: {error}") from error


def spec_of_shards(
    shape: tuple[int, ...], dtype: str, placement: Placement, *, is_stacked: bool, memory: str = ""
) -> ArraySpec:
    """Return the spec of an array with a shard of this shape on each device of a placement.

    It is *replicated*, or *stacked*: the shards lie side by side in their first dimension, in the order of
    the devices. A spec of no dimensions, or of one device, is replicated. `memory`: see `ArraySpec.memory`.
    """
    devices = len(placement.devices)
    if is_stacked and shape and devices > 1:
        stacked = (devices * shape[0], *shape[1:])
        return ArraySpec(stacked, dtype, Sharding(("_",), (devices,), (("_",),)), placement, memory)
    return ArraySpec(shape, dtype, Sharding(("_",), (devices,)), placement, memory)


def harmless_options(options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return compiler options without those of dumps. Raises CodeRefused: one may reach files of the host."""
    kept = [one for one in options if not _DUMP_OPTION.match(one[0])]
    for name, _ in kept:
        if _HARMFUL_OPTION.search(name):
            raise CodeRefused(
                f"the compiler option {name!r} is not allowed on workers; leave it out"
            )
    return kept
