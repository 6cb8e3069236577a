"""Programs whose values decide their sizes: of their rows, only those that count travel
(`pw.core.programs.counted`).

One computation makes rows and counts. Others on any slice take them, so rows go between hosts and islands, to
other shardings, and to none. Some counts are impossible. In an exchange, rows go to a slice that may be
skipped, and come back to a merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from pw.core.programs.guards import merge, predicate_spec
from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding, dtype_of
from pw.testing.sim.digests import counts_up_to
from pw.testing.sim.programs import Drafting, ProgramDraft, SimSlice, random_spec

_SHAPES = (((), (16,)), ((4,), (4,)), ((4, 2), (8, 2)), ((), (64, 256)), ((8,), (16, 256)))
"""Shapes of counts, and of rows behind them; some rows are more than travels inside a control message."""


def random_ragged(
    random: Random,
    slices: Sequence[SimSlice],
    kinds: Sequence[ArraySpec],
    name: str,
    *,
    broken: bool,
) -> ProgramDraft:
    """Return a program that takes one array, makes rows of it, and moves those that count.

    Args:
        random: the source of chance.
        slices: where its computations run.
        kinds: what its input may be.
        name: names its client, and makes its results differ from those of other programs.
        broken: some counts are impossible.
    """
    lead, rest = random.choice(_SHAPES)
    first = random.choice(slices)
    rows_spec = _on(random, first, (*lead, *rest), "uint8")
    program = Drafting(name)

    def exchange(part: SimSlice, unless: bool) -> Output:
        one = f"{name}/{len(program.nodes)}"
        there = _on(random, part, rows_spec.shape)
        own = _replicated(lead, there.placement)
        back, left = program.compute(
            one,
            [there, own],
            [there, own],
            [rows, counts],
            blob=counts_up_to(rest[0], one.encode(), impossible=False),
            guard=is_used,
            unless=unless,
            counted=((0, counts),),
        )
        pair = (rows, back) if unless else (back, rows)
        merged = merge(f"{name}/merge", [rows_spec])
        counted = ((2 if unless else 1, left),)
        return Output(program.add(merged, [is_used, *pair], counted=counted)[0], rows_spec)

    source = random.choice(kinds)
    argument = _on(random, first, source.shape, source.dtype, rows_spec.placement.devices)
    blob = counts_up_to(rest[0], name.encode(), impossible=broken)
    first_makes = [
        rows_spec,
        _replicated(lead, rows_spec.placement),
        predicate_spec(rows_spec.placement),
    ]
    arg = ValueRef(-1, 0)
    rows, counts, is_used = program.compute(f"{name}/0", [argument], first_makes, [arg], blob=blob)
    outputs = []
    for _ in range(random.choice((1, 2, 3))):
        part, one = random.choice(slices), f"{name}/{len(program.nodes)}"
        if random.random() < 0.4:
            outputs.append(exchange(part, random.random() < 0.5))
            continue
        takes_rows = (
            rows_spec
            if part is first and random.random() < 0.2
            else _on(random, part, rows_spec.shape)
        )
        kind = random_spec(random, part, (16,), "uint8", takes_rows.placement.devices)
        takes = [takes_rows, _replicated(lead, takes_rows.placement)]
        made_of = program.compute(one, takes, [kind], [rows, counts], counted=((0, counts),))
        outputs.append(Output(made_of[0], kind))
    if random.random() < 0.5:
        moved = _on(random, random.choice(slices), rows_spec.shape)
        outputs.append(Output(rows, moved, counts))
    return program.draft([source], outputs)


def move_rows(user: Any) -> None:
    """Have a user run a program that moves the rows which count."""
    numbers = [n for n, draft in user.programs.items() if draft.body.name.endswith("/ragged")]
    if not numbers or user.random.random() < 0.3:
        numbers = [user._id()]
        name = f"{user.name}/{numbers[0] & 0xFFFF}/ragged"
        broken = user.world.profile.broken_programs and user.random.random() < 0.1
        draft = random_ragged(user.random, user.parts, user.kinds, name, broken=broken)
        user._add_program(numbers[0], draft)
    user._run(user.random.choice(numbers))


def travelled(data: bytes, spec: ArraySpec, counts: np.ndarray[Any, Any]) -> bytes | None:
    """Return rows with zeros as padding; None if the counts are impossible."""
    rows = np.frombuffer(data, dtype_of(spec.dtype)).reshape(spec.shape)
    capacity = spec.shape[counts.ndim]
    if counts.min() < 0 or counts.max() > capacity:
        return None
    counting = np.arange(capacity) < counts[..., None]
    rest = (1,) * (rows.ndim - counting.ndim)
    return np.where(counting.reshape(counting.shape + rest), rows, 0).astype(rows.dtype).tobytes()


def _on(
    random: Random,
    part: SimSlice,
    shape: tuple[int, ...],
    dtype: str = "uint8",
    devices: tuple[int, ...] = (),
) -> ArraySpec:
    return random_spec(random, part, shape, dtype, devices)


def _replicated(lead: tuple[int, ...], placement: Placement) -> ArraySpec:
    sharding = Sharding(("x",), (len(placement.devices),))
    return ArraySpec(lead, "int32", sharding, placement)
