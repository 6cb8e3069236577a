"""Programs whose values decide their sizes: of their rows, only those that count travel
(`pw.core.programs.counted`).

One computation makes rows and counts. Others on any slice take them, so rows go between hosts and islands, to
other shardings, and to none. Some counts are impossible. In an exchange, rows go to a slice that may be
skipped, and come back to a merge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from pw.core.messages import Artifact
from pw.core.programs.guards import merge, predicate_spec
from pw.core.programs.program import Computation, Node, Output, Program, Value
from pw.core.sharding import ArraySpec, Placement, Sharding, dtype_of
from pw.testing.sim.digests import counts_up_to
from pw.testing.sim.programs import Draft, Slice, random_spec

_SHAPES = (
    ((), (16,)),
    ((4,), (4,)),
    ((4, 2), (8, 2)),
    ((), (64, 256)),
    ((8,), (16, 256)),
)
"""Shapes of counts, and of rows behind them; some rows are more than travels inside a control message."""


def random_ragged(
    random: Random, slices: Sequence[Slice], kinds: Sequence[ArraySpec], name: str, *, broken: bool
) -> Draft:
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
    made = _on(random, first, (*lead, *rest), "uint8")
    computations: list[Computation] = []
    nodes: list[Node] = []
    blobs: dict[bytes, bytes] = {}

    def call(
        blob: bytes, takes: Sequence[ArraySpec], makes: Sequence[ArraySpec], node: Node
    ) -> int:
        digest = hashlib.sha256(blob).digest()
        blobs[digest] = blob
        placement = makes[0].placement
        return add(
            Computation(f"{name}/{len(nodes)}", digest, placement, tuple(takes), tuple(makes)), node
        )

    def add(computation: Computation, node: Node) -> int:
        computations.append(computation)
        nodes.append(node)
        return len(nodes) - 1

    def exchange(part: Slice, unless: bool) -> Output:
        number = len(nodes)
        there = _on(random, part, made.shape)
        own = _replicated(lead, there.placement)
        guarded = Node(number, (rows, counts), is_used, unless, ((0, counts),))
        blob = counts_up_to(rest[0], f"{name}/{number}".encode(), impossible=False)
        call(blob, [there, own], [there, own], guarded)
        back, here = Value(number, 0), (2 if unless else 1)
        pair = (rows, back) if unless else (back, rows)
        node = Node(number + 1, (is_used, *pair), counted=((here, Value(number, 1)),))
        return Output(Value(add(merge(f"{name}/merge", [made]), node), 0), made)

    source = random.choice(kinds)
    given = _on(random, first, source.shape, source.dtype, made.placement.devices)
    blob = counts_up_to(rest[0], name.encode(), impossible=broken)
    first_makes = [made, _replicated(lead, made.placement), predicate_spec(made.placement)]
    call(blob, [given], first_makes, Node(0, (Value(-1, 0),)))
    rows, counts, is_used = (Value(0, index) for index in range(3))
    outputs = []
    for _ in range(random.choice((1, 2, 3))):
        part, number = random.choice(slices), len(nodes)
        if random.random() < 0.4:
            outputs.append(exchange(part, random.random() < 0.5))
            continue
        taken = made if part is first and random.random() < 0.2 else _on(random, part, made.shape)
        kind = random_spec(random, part, (16,), "uint8", taken.placement.devices)
        takes = [taken, _replicated(lead, taken.placement)]
        node = Node(number, (rows, counts), counted=((0, counts),))
        call(f"computes {name}/{number}".encode(), takes, [kind], node)
        outputs.append(Output(Value(number, 0), kind))
    if random.random() < 0.5:
        moved = _on(random, random.choice(slices), made.shape)
        outputs.append(Output(rows, moved, counts))
    body = Program(name, tuple(computations), tuple(nodes), (source,), tuple(outputs))
    artifacts = tuple(Artifact(digest, blob) for digest, blob in sorted(blobs.items()))
    return Draft(body, artifacts, blobs)


def move_rows(user: Any) -> None:
    """Have a user run a program that moves the rows which count."""
    made = [n for n, draft in user.programs.items() if draft.body.name.endswith("/ragged")]
    if not made or user.random.random() < 0.3:
        slices = [Slice(bound.slice, len(bound.devices)) for bound in user.slices.values()]
        made = [user._id()]
        name = f"{user.name}/{made[0] & 0xFFFF}/ragged"
        broken = user.world.profile.broken_programs and user.random.random() < 0.1
        draft = random_ragged(user.random, slices, user.kinds, name, broken=broken)
        user._add_program(made[0], draft)
    user._run(user.random.choice(made))


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
    part: Slice,
    shape: tuple[int, ...],
    dtype: str = "uint8",
    devices: tuple[int, ...] = (),
) -> ArraySpec:
    return random_spec(random, part, shape, dtype, devices)


def _replicated(lead: tuple[int, ...], placement: Placement) -> ArraySpec:
    sharding = Sharding(("x",), (len(placement.devices),))
    return ArraySpec(lead, "int32", sharding, placement)
