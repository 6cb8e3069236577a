"""What is known of a compiled program, from the compiler's facts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.programs.stablehlo import Facts, ShardFacts, Stablehlo, encode, spec_of_shards
from pw.core.sharding import ArraySpec, Placement
from pw.gateway.arrays.arrays import AHEAD_BYTES, DEFAULT_MEMORY, ReadHabits, Stored, memory_of
from pw.gateway.protocol import protos, shardings


@dataclass(frozen=True, slots=True)
class ResultFacts:
    """The facts that the result of every execution has in common."""

    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    memory: str
    is_replicated: bool
    specs: tuple[ArraySpec, ...]
    """Specs of the result's part on each island."""
    sharding: bytes | None


class Source(NamedTuple):
    """The code that hosts compile, and where."""

    code: Stablehlo
    placement: Placement


@dataclass(slots=True, eq=False)
class GatewayExecutable:
    """A compiled program of the client."""

    name: str
    devices: tuple[int, ...]
    facts: Facts
    sources: tuple[Source, ...]
    graph: Program
    """Program that runs, without donations."""
    artifacts: Mapping[bytes, bytes]
    inputs: tuple[ArraySpec, ...]
    """Specs of the parts of all arguments: argument by argument, island by island."""
    results: tuple[ResultFacts, ...]
    has_completion: bool
    """Whether it has no results; the runtime's computation has one, which is ready when it has ended."""
    islands: tuple[tuple[int, ...], ...] = ()
    """Positions of the devices of each island, if there are several."""
    numbers: tuple[bytes, ...] = ()
    """Values of the program's last inputs, which are the same in each run."""
    divided: bytes = b""
    """The module of each device, if there are several islands."""
    programs: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The registered programs, by the positions of the inputs that they donate."""
    places: tuple[tuple[int, int], ...] = field(init=False)
    """Island of each device, and its place there, if there are several."""
    digest: bytes = field(init=False)
    """The SHA-256 of the code."""
    specs: tuple[ArraySpec, ...] = field(init=False)
    """Specs of the parts of all results: result by result, island by island."""
    calls_back: bool = field(init=False)
    """Whether it calls functions of the script."""
    habits: ReadHabits = field(init=False)
    """Habits of the script with results, by their positions in `specs`."""
    last: tuple[Stored, ...] = ()
    """The results of the latest run, if runs call functions of the script."""

    def __post_init__(self) -> None:
        places = {
            position: (island, at)
            for island, positions in enumerate(self.islands)
            for at, position in enumerate(positions)
        }
        self.places = tuple(places[at] for at in range(len(places)))
        self.digest = (
            next(iter(self.artifacts))
            if len(self.artifacts) == 1
            else hashlib.sha256(b"".join(self.artifacts)).digest()
        )
        self.specs = tuple(spec for result in self.results for spec in result.specs)
        self.habits = ReadHabits(
            at
            for at, spec in enumerate(self.specs)
            if not self.islands and not self.has_completion and spec.size_bytes <= AHEAD_BYTES
        )
        self.calls_back = any(one.calls_back for one in self.graph.computations)


def describe(
    devices: tuple[int, ...],
    placement: Placement,
    code: Stablehlo,
    facts: Facts,
    *,
    has_completion: bool = False,
    source: Stablehlo | None = None,
) -> GatewayExecutable:
    """Return an executable on one island, whose shapes and shardings are the compiler's.

    Args:
        devices: JAX's numbers.
        placement: of these devices.
        code: what runs.
        facts: the compiler's.
        has_completion: see `GatewayExecutable`.
        source: the code that questions about it are asked of; None if that is `code`.
    """
    is_divided = _is_divided(code, len(devices))
    replicated = partial(_is_replicated, devices=len(devices), is_divided=is_divided)
    inputs = tuple(_spec(placement, one, is_replicated=replicated(one)) for one in facts.inputs)
    outputs = [_spec(placement, one, is_replicated=replicated(one)) for one in facts.outputs]
    results = results_of(facts, len(devices), [(one,) for one in outputs], is_divided=is_divided)
    artifact = encode(code)
    digest = hashlib.sha256(artifact).digest()
    computation = Computation(
        facts.name,
        digest,
        placement,
        inputs,
        tuple(outputs),
        facts.donated,
        calls_back=bool(code.callbacks),
    )
    graph = Program(
        facts.name,
        (computation,),
        (Node(0, tuple(ValueRef(-1, at) for at in range(len(inputs)))),),
        inputs,
        tuple(Output(ValueRef(0, at), spec) for at, spec in enumerate(outputs)),
    )
    return GatewayExecutable(
        facts.name,
        devices,
        facts,
        (Source(source or code, placement),),
        graph,
        {digest: artifact},
        inputs,
        results,
        has_completion,
    )


def results_of(
    facts: Facts, devices: int, specs: Sequence[tuple[ArraySpec, ...]], *, is_divided: bool
) -> tuple[ResultFacts, ...]:
    """Return what the results of all executions have in common.

    Args:
        facts: the compiler's.
        devices: how many devices run the program.
        specs: of the parts of each result.
        is_divided: whether XLA divides the program over them.
    """
    results = []
    for one, own in zip(facts.outputs, specs, strict=True):
        sharding = _op_sharding(one)
        parts = (1,) * len(one.shape)
        if sharding is not None and devices > 1:
            parts = shardings.partitions(sharding, len(one.shape))
        shape = tuple(size * count for size, count in zip(one.shape, parts, strict=True))
        results.append(
            ResultFacts(
                dtype_in(one),
                shape,
                one.shape,
                one.memory_kind or DEFAULT_MEMORY,
                _is_replicated(one, devices, is_divided=is_divided),
                own,
                one.sharding if one.sharding or is_divided else None,
            )
        )
    return tuple(results)


def write_metadata(executable: GatewayExecutable, reply: Any) -> None:
    """Fill a `LoadedExecutableMetadataResponse`."""
    facts = executable.facts
    outputs = () if executable.has_completion else facts.outputs
    for listed, layouts, every in (
        (reply.parameter_shardings, reply.parameter_layouts_list, facts.inputs),
        (reply.output_shardings, reply.output_layouts_list, outputs),
    ):
        listed.SetInParent()
        layouts.SetInParent()
        for one in every:
            listed.shardings.add().ParseFromString(one.sharding)
            layout = layouts.layouts.add(
                minor_to_major=one.minor_to_major, tail_padding_alignment_in_elements=1
            )
            if one.element_bits:
                layout.element_size_in_bits = one.element_bits
    kinds = reply.output_memory_kinds.memory_kind_lists.add()
    kinds.memory_kinds.extend(one.memory_kind or DEFAULT_MEMORY for one in outputs)
    reply.donated_input_indices.SetInParent()
    reply.donated_input_indices.donated_input_indices.extend(facts.donated)
    stats = reply.compiled_memory_stats
    stats.generated_code_size_in_bytes = facts.code_bytes
    stats.argument_size_in_bytes = facts.argument_bytes
    stats.output_size_in_bytes = facts.output_bytes
    stats.alias_size_in_bytes = facts.alias_bytes
    stats.temp_size_in_bytes = facts.temporary_bytes
    reply.size_of_generated_code_in_bytes = facts.code_bytes


def dtype_in(one: ShardFacts) -> str:
    """Return the dtype of an argument or result; a token lies in an array of no booleans."""
    return "bool" if one.dtype == "token" else one.dtype


def _is_divided(code: Stablehlo, devices: int) -> bool:
    """Whether XLA divides arrays among all devices; else an empty sharding does not say "replicated"."""
    options = protos.message("xla.CompileOptionsProto").FromString(code.options)
    built = options.executable_build_options
    return bool(built.use_spmd_partitioning and built.num_partitions == devices)


def _op_sharding(one: ShardFacts) -> Any:
    return protos.message("xla.OpSharding").FromString(one.sharding) if one.sharding else None


def _is_replicated(one: ShardFacts, devices: int, *, is_divided: bool) -> bool:
    """Whether all shards are known to be equal; `is_divided` says whether XLA divides the program."""
    sharding = _op_sharding(one)
    if devices == 1:
        return True
    if sharding is None:  # what "replicated" looks like without its fields
        return is_divided
    if sharding.HasField("named_sharding"):
        named = sharding.named_sharding
        if named.unreduced_axes or named.manual_axes:
            return False
        return all(count == 1 for count in shardings.partitions(sharding, len(one.shape)))
    kinds = protos.message("xla.OpSharding").DESCRIPTOR.enum_types_by_name["Type"].values_by_name
    return bool(sharding.type == kinds["REPLICATED"].number)


def _spec(placement: Placement, one: ShardFacts, *, is_replicated: bool) -> ArraySpec:
    memory = memory_of(one.memory_kind)
    return spec_of_shards(
        one.shape, dtype_in(one), placement, is_stacked=not is_replicated, memory=memory
    )
