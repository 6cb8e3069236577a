"""A loop of a client: bursts of guarded iterations (`random_burst`), launched ahead of each other.

Each burst takes over the carry of the one before, and its predicate. The client may read the predicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pw.testing.sim.programs import ProgramDraft


def is_burst(draft: ProgramDraft) -> bool:
    """Whether a program is a burst of a loop; no other program takes a predicate."""
    return any(spec.dtype == "bool" for spec in draft.body.inputs)


def run_ahead(client: Any, random: Random, number: int, draft: ProgramDraft) -> None:
    """Launch some bursts."""
    predicate = b"\x01" if random.random() < 0.85 else b"\x00"
    state: Sequence[int | bytes] = (predicate, *client.arguments(draft.body.inputs[1:]))
    for _ in range(random.randint(1, 4)):
        if not client.may_run:
            return
        state = client.launch(number, draft, tuple(state))
        if random.random() < 0.3:
            client.fetch(state[0])
