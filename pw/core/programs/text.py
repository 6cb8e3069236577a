"""A program as text: a line for each of its computations, in the order in which they are enqueued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pw.core.programs.program import Program, ValueRef
from pw.core.sharding import ArraySpec


def text_of(program: Program) -> str:
    """Return a program as text.

    `%3` is the result of computation 3, `%3.1` its second one, and `in0` an input. An argument that has to move
    is followed by what it becomes. `if %1` and `unless %1` say when a computation in a branch runs.
    """
    return "\n".join(_lines(program))


def _lines(program: Program) -> Iterator[str]:
    names = {spec.placement.slice: "" for spec in program.inputs}
    for computation in program.computations:
        names |= dict.fromkeys(sorted(computation.slices()), "")
    slices = {number: f"slice{at}" for at, number in enumerate(names)}

    def lies(spec: ArraySpec) -> str:
        axes = ["".join(each) or "-" for each in map(",".join, spec.sharding.spec)]
        split = f"({' '.join(axes)})" if any(axis != "-" for axis in axes) else ""
        place = spec.placement
        only = "" if place.devices == tuple(range(len(place.devices))) else f"{list(place.devices)}"
        return f"{spec.short}{split} on {slices[place.slice]}{only}"

    def name(value: ValueRef) -> str:
        if value.node < 0:
            return f"in{value.index}"
        outputs = program.computations[program.nodes[value.node].computation].outputs
        return f"%{value.node}" + (f".{value.index}" if len(outputs) > 1 else "")

    def moved(value: ValueRef, wanted: ArraySpec, counts: ValueRef | None = None) -> str:
        own = program.spec_of(value)
        if own == wanted:
            return name(value)
        rows = "" if counts is None else f", of which {name(counts)} rows count"
        return f"{name(value)} as {lies(wanted)}{rows}"

    def results(specs: Sequence[ArraySpec]) -> str:
        return ", ".join(map(lies, specs)) or "nothing"

    yield f"program {program.name}"
    for at, spec in enumerate(program.inputs):
        yield f"  in{at}: {lies(spec)}" + (" (donated)" if at in program.donated else "")
    for at, node in enumerate(program.nodes):
        computation = program.computations[node.computation]
        counts = dict(node.counted)
        pairs = enumerate(zip(node.args, computation.inputs, strict=True))
        arguments = ", ".join(
            moved(value, spec, counts.get(place)) for place, (value, spec) in pairs
        )
        guard = ""
        if node.guard is not None:
            guard = f" {'unless' if node.unless else 'if'} {name(node.guard)}"
        yield f"  %{at} = {computation.name}({arguments}) -> {results(computation.outputs)}{guard}"
    for output in program.outputs:
        yield f"  return {moved(output.value, output.spec, output.counts)}"
