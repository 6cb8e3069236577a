"""`JoinedTraced`: a function over a mesh that joins islands, as pieces and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir  # a context that knows all of JAX's dialects
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import Mesh
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.export import OutShardings, Traced, export, trace
from pw.client.trace.exported import Alike, Made
from pw.client.trace.joined.cutting import Cut, Piece
from pw.client.trace.joined.local import Localizer
from pw.client.trace.joined.module import CannotCut, Flat, prepare
from pw.client.trace.joined.moving import divided
from pw.client.trace.joined.partial_sums import Sums
from pw.client.trace.joined.writing import Parts, Writer, Written
from pw.client.trace.stablehlo import parsed
from pw.client.trace.tracer import ProgramTracer
from pw.core.errors import TracingError

LAG = 1
"""How many pieces are enqueued between a bucket's piece and its additions, which wait for other islands."""

_ADDERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}


@dataclass(frozen=True)
class _Bucket:
    index: int
    parts: Parts
    kind: str
    piece: int
    """The piece that fills it."""


@dataclass(frozen=True)
class _Step:
    """One piece on all islands; values are named by numbers."""

    on: tuple[Traced, ...]
    inputs: tuple[int, ...]
    sums: tuple[int, ...]
    """Indices of buckets."""
    outputs: tuple[int, ...]
    makes: int | None


@dataclass(frozen=True, eq=False)
class JoinedTraced:
    """A function over a mesh that joins islands."""

    name: str
    mesh: Mesh
    inputs: tuple[ArrayType, ...]
    captured: tuple[Array, ...]
    outputs: tuple[ArrayType, ...]
    tree: Any
    types: tuple[ArrayType, ...]
    """Of the explicit arguments and the captured arrays."""
    steps: tuple[_Step, ...]
    buckets: tuple[_Bucket, ...]
    adders: dict[tuple[int, int], Traced]
    """By bucket and island."""
    number: int
    """The name of the value that says which island it is."""
    unused: tuple[int, ...]
    """Donated arguments that no piece takes."""
    results: tuple[int, ...]
    counted: tuple[tuple[int, int], ...] = ()
    """The positions of the rows and of the counts of each argument that is a `Ragged`."""

    @property
    def pieces(self) -> tuple[Traced, ...]:
        """The computations of one island, but for those that add."""
        return tuple(step.on[0] for step in self.steps)

    def record(self, recorder: Any, arguments: Sequence[ProgramTracer]) -> list[ProgramTracer]:
        """Add all pieces and reductions to a program; returns the results."""
        islands = range(len(self.mesh.parts))
        values: dict[int, list[Any]] = {}
        for at, (argument, type_) in enumerate(zip(arguments, self.types, strict=True)):
            values[at] = divided(recorder, argument, type_)
        values[self.number] = [np.int32(at) for at in islands]
        filled: dict[int, list[list[Any]]] = {}
        """By bucket: for each island its parts."""
        sums: dict[int, list[list[Any]]] = {}
        """By bucket: for each island the parts of the sum."""
        for position, step in enumerate(self.steps):
            due = [b for b in filled if b not in sums]
            for index in due:
                late = self.buckets[index].piece + LAG < position
                if late or index in step.sums:
                    sums[index] = self._added(recorder, index, filled[index])
            made = [
                recorder.call(
                    step.on[at],
                    [
                        *[values[name][at] for name in step.inputs],
                        *[part for index in step.sums for part in sums[index][at]],
                    ],
                )
                for at in islands
            ]
            for place, name in enumerate(step.outputs):
                values[name] = [results[place] for results in made]
            if step.makes is not None:
                filled[step.makes] = [results[len(step.outputs) :] for results in made]
        for number in self.unused:
            for part in values[number]:
                recorder.give(part, self.name)
        return [
            recorder.joined(type_, values[name])
            for name, type_ in zip(self.results, self.outputs, strict=True)
        ]

    def _added(self, recorder: Any, index: int, filled: list[list[Any]]) -> list[list[Any]]:
        """Reduce a bucket: each part on one island, or a small bucket on each of them."""
        count = self.buckets[index].parts.number
        islands = range(len(filled))
        if count == 1:
            own = [part for (part,) in filled]
            return [recorder.call(self.adders[index, at], own) for at in islands]
        parts = []
        for at in islands:
            (total,) = recorder.call(self.adders[index, at], [made[at] for made in filled])
            parts.append(total)
        return [parts for _ in islands]


def trace_on(
    function: Callable[..., Any],
    arguments: Any,
    name: str,
    mesh: Mesh,
    inputs: Sequence[ArrayType],
    out_shardings: OutShardings,
    donated: Sequence[int],
    check_nans: bool = False,
    alike: Alike | None = None,
) -> Traced | JoinedTraced:
    """Trace `function` for a mesh on one island, or on several: see `trace` and `trace_joined`."""
    call = function, arguments, name, mesh, inputs, out_shardings, donated, check_nans
    return trace_joined(*call) if mesh.parts else trace(*call, alike)


def trace_joined(
    function: Callable[..., Any],
    arguments: Any,
    name: str,
    mesh: Mesh,
    inputs: Sequence[ArrayType],
    out_shardings: OutShardings,
    donated: Sequence[int],
    check_nans: bool = False,
) -> JoinedTraced:
    """Trace `function` for a mesh that joins islands, and cut it where values are reduced between islands.

    Raises:
        TracingError: the function cannot be cut this way.
        Exception: the function's own errors.
    """
    if check_nans:
        raise TracingError(
            f"{name!r} runs on several islands, where check_nans (jax_debug_nans) does not work; use it on "
            "one island"
        )
    made = export(function, arguments, name, mesh, inputs, out_shardings)
    try:
        with mlir.make_ir_context(), ir.Location.unknown():
            cut = _cut(made, name, mesh, len(inputs), tuple(donated))
            return replace(cut, counted=pairs_of(arguments))
    except ir.MLIRError as error:
        raise TracingError(
            f"{name!r} cannot be cut along the mesh axis {mesh.crossing!r}, which crosses islands: Shardy does "
            f"not divide it ({str(error).splitlines()[-1][-300:]}). Keep that part of it on one island"
        ) from error
    except CannotCut as error:
        raise TracingError(
            f"{name!r} cannot be cut along the mesh axis {mesh.crossing!r}, which crosses islands: "
            f"{error.why}{error.where}. Sums, maxima and minima can cross islands; keep everything else along "
            "axes inside an island, in computations of one island, or in this process (`pw.get(x)[0]`)"
        ) from None


def _cut(
    made: Made, name: str, mesh: Mesh, explicit: int, donated: tuple[int, ...]
) -> JoinedTraced:
    crossing = str(mesh.crossing)
    flat = prepare(parsed(made.module), crossing, len(mesh.parts))
    sums = Sums(flat)
    local = Localizer(flat, sums.masked)
    flat.main.verify()
    cut = Cut(flat, sums.reduced, [local.island])
    writer = Writer(flat, cut, sums.reduced, mesh.parts[0], name)
    # The last argument is the number of the island.
    names: dict[Any, int] = {value: at for at, value in enumerate(cut.arguments)}
    free = len(names)
    last_uses = _last_uses(cut, {cut.arguments[number] for number in donated})
    results = [0] * len(cut.results)
    written: list[tuple[Piece, Written, tuple[int, ...]]] = []
    for at, piece in enumerate(cut.pieces):
        outputs = []
        for value in piece.outputs:
            outputs.append(names.setdefault(value, free + len(names)))
        for position in piece.results:
            results[position] = names.setdefault(("result", position), free + len(names))
            outputs.append(results[position])
        donates = sorted(position for where, position in last_uses.values() if where == at)
        written.append((piece, writer.write(piece, at, tuple(donates)), tuple(outputs)))
    steps, buckets, adders = [], {}, {}
    for at, (piece, code, made_by) in enumerate(written):
        steps.append(
            _Step(
                tuple(map(code.on, mesh.parts)),
                tuple(names[value] for value in piece.inputs),
                tuple(bucket.index for bucket in piece.sums),
                made_by,
                None if piece.makes is None else piece.makes.index,
            )
        )
        if piece.makes is not None:
            bucket = piece.makes
            buckets[bucket.index] = _Bucket(bucket.index, writer.parts(bucket), bucket.kind, at)
            aval, spec = writer.part_type(bucket)
            for island, part in enumerate(mesh.parts):
                adders[bucket.index, island] = _adder(
                    f"{name} ({bucket.kind} over {crossing})",
                    part,
                    aval,
                    spec,
                    bucket.kind,
                    len(mesh.parts),
                )
    return JoinedTraced(
        name,
        mesh,
        made.inputs[:explicit],
        made.captured,
        tuple(_result_type(flat, at, type_, written) for at, type_ in enumerate(made.outputs)),
        made.tree,
        made.inputs,
        tuple(steps),
        tuple(buckets[index] for index in sorted(buckets)),
        adders,
        names[local.island],
        tuple(number for number in donated if cut.arguments[number] not in last_uses),
        tuple(results),
    )


def _result_type(
    flat: Flat, at: int, type_: ArrayType, written: Sequence[tuple[Piece, Written, Any]]
) -> ArrayType:
    """Return the type of a result: the crossing axis as the function was cut, the others inside of islands."""
    (spec,) = (
        code.outputs[len(piece.outputs) + piece.results.index(at)][1]
        for piece, code, _ in written
        if at in piece.results
    )
    split = flat.results_split[at] if at < len(flat.results_split) else []
    axes: list[tuple[str, ...]] = []
    for dimension in range(type_.aval.ndim):
        entry = spec[dimension] if dimension < len(spec) else None
        own = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        axes.append((flat.axis, *own) if dimension in split else own)
    sharding = NamedSharding(type_.sharding.mesh, PartitionSpec(*(names or None for names in axes)))
    return type_.with_sharding(sharding)


def _last_uses(cut: Cut, donated: set[Any]) -> dict[Any, tuple[int, int]]:
    """Return the last piece that uses each donated argument, and the position of the argument there."""
    return {
        value: (at, position)
        for at, piece in enumerate(cut.pieces)
        for position, value in enumerate(piece.inputs)
        if value in donated
    }


def _adder(
    name: str, mesh: Mesh, aval: Any, spec: PartitionSpec, kind: str, islands: int
) -> Traced:
    """Return the computation that reduces the islands' parts, in the order of the islands."""
    type_ = ArrayType.of(aval, NamedSharding(mesh, spec))
    combine = _ADDERS[kind]
    is_small = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4

    def add(*parts: Any) -> Any:
        wide = [part.astype(jnp.float32) for part in parts] if is_small else parts
        return (reduce(combine, wide).astype(aval.dtype),)

    types = [type_] * islands
    _, tree = jax.tree_util.tree_flatten((tuple(types), {}))
    return trace(add, tree, name, mesh, types, lambda _, avals: [type_.sharding], ())
