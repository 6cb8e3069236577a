"""Random views: arrays taken apart, put together, and mixed; and what they contain.

Shards of one array that are replicas of each other stay so in a view: the shards of an array with equal boxes
come from equal boxes of one source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from pw.core.programs.program import Computation, Output, ValueRef
from pw.core.programs.views import Shards, view_program
from pw.core.sharding import ArraySpec, Placement, Sharding, box_slices, dtype_of
from pw.testing.sim.digests import RAISES
from pw.testing.sim.programs import Drafting, ProgramDraft


def random_view(
    random: Random, kinds: Sequence[ArraySpec], held: Sequence[ArraySpec]
) -> ProgramDraft | None:
    """Return a program that makes views; None if the chosen arrays have no place for one.

    Args:
        random: the source of chance.
        kinds: what the client's programs take and return.
        held: what its arrays are, other views included.
    """
    model = random.choice([*kinds, *held])
    form = random.choice((_apart, _mixed, _together, _together))
    inputs, outputs, shards = form(random, model, [*kinds, *held])
    return ProgramDraft(view_program(inputs, outputs, shards), (), {}) if outputs else None


_Plan = tuple[list[ArraySpec], list[ArraySpec], Shards]


def _apart(random: Random, model: ArraySpec, specs: Sequence[ArraySpec]) -> _Plan:
    """Some shards of an array, each as an array of its own."""
    places = range(len(model.placement.devices))
    chosen = sorted(random.sample(places, random.randint(1, len(places))))
    shape = model.sharding.shard_shape(model.shape)
    outputs = [_stacked(model, shape, [model.placement.devices[at]]) for at in chosen]
    return [model], outputs, [[(0, at)] for at in chosen]


def _mixed(random: Random, model: ArraySpec, specs: Sequence[ArraySpec]) -> _Plan:
    """One or two arrays, each with some shards of one source, and some of the other."""
    shards = []
    for _ in range(random.choice((1, 1, 2))):
        row = [(0, 0)] * len(model.placement.devices)
        for _, positions in model.distinct_boxes():
            source = random.randrange(2)
            for at in positions:
                row[at] = (source, at)
        shards.append(row)
    return [model, model], [model] * len(shards), shards


def _together(random: Random, model: ArraySpec, specs: Sequence[ArraySpec]) -> _Plan:
    """One array of equal shards of several others."""
    shape = model.sharding.shard_shape(model.shape)
    alike = [
        spec
        for spec in specs
        if (spec.dtype, spec.sharding.shard_shape(spec.shape)) == (model.dtype, shape)
        and (spec.placement.slice, spec.memory) == (model.placement.slice, model.memory)
    ]
    inputs = [model, *random.sample(alike, min(len(alike), 4))]
    shards: dict[int, list[tuple[int, int]]] = {}
    for number, spec in enumerate(inputs):
        for at, device in enumerate(spec.placement.devices):
            shards.setdefault(device, []).append((number, at))
    fitting = [
        spec
        for spec in alike
        if shards.keys() >= set(spec.placement.devices)
        and all(len(positions) == 1 for _, positions in spec.distinct_boxes())
    ]
    if fitting and random.random() < 0.5:
        output = random.choice(fitting)
    else:
        output = _stacked(
            model, shape, random.sample(sorted(shards), random.randint(1, len(shards)))
        )
    row = [random.choice(shards[device]) for device in output.placement.devices]
    return inputs, [output], [row]


def _stacked(model: ArraySpec, shape: tuple[int, ...], devices: Sequence[int]) -> ArraySpec:
    """Shards of this shape, side by side in dimension 0, in the memory of another array."""
    count, place = len(devices), Placement(model.placement.slice, tuple(devices))
    sharding = Sharding(("_",), (count,), (("_",),))
    shape_of_all = (count * shape[0], *shape[1:])
    return ArraySpec(shape_of_all, model.dtype, sharding, place, model.memory)


def random_spoiling(random: Random, model: ArraySpec, name: str) -> Iterator[ProgramDraft]:
    """Yield programs that take an array apart, fail on one part, put the parts together, and compute on them.

    One host of the last computation has an error in its argument, the others have none.
    """
    places = range(len(model.placement.devices))
    shape = model.sharding.shard_shape(model.shape)
    parts = [_stacked(model, shape, [model.placement.devices[at]]) for at in places]
    joined = _stacked(model, shape, model.placement.devices)
    yield ProgramDraft(view_program([model], parts, [[(0, at)] for at in places]), (), {})
    yield overwriting(random.choice(parts), f"{name}/part", fails=True)
    yield ProgramDraft(view_program(parts, [joined], [[(at, 0) for at in places]]), (), {})
    yield overwriting(joined, f"{name}/whole")


def overwriting(spec: ArraySpec, name: str, *, fails: bool = False) -> ProgramDraft:
    """Return a program that overwrites an array, or fails and takes it all the same."""
    prefix = RAISES if fails else b"overwrites"
    program, blob = Drafting(name), prefix + f" {name}".encode()
    (result,) = program.compute(name, [spec], [spec], [ValueRef(-1, 0)], blob=blob, donated=(0,))
    return program.draft([spec], [Output(result, spec)], (0,))


def contents(view: Computation, inputs: Sequence[bytes | None]) -> Iterator[bytes | None]:
    """Yield the bytes of each result of a view; None for one with a shard of an input without bytes."""
    for spec, row in zip(view.outputs, view.shards, strict=True):
        array = np.empty(spec.shape, dtype_of(spec.dtype))
        is_whole = True
        for position, (source, at) in enumerate(row):
            source_spec, data = view.inputs[source], inputs[source]
            if data is None:
                is_whole = False
                continue
            there = np.frombuffer(data, dtype_of(source_spec.dtype)).reshape(source_spec.shape)
            array[box_slices(spec.box(position))] = there[box_slices(source_spec.box(at))]
        yield array.tobytes() if is_whole else None
