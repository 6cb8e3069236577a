"""Loops of simulated users: calls that wait for each result, as a training loop does, and bursts ahead.

Users who wait for each result get leases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from pw.client.session.thread_messages import Await
from pw.sched.island.leases import Lending
from pw.testing.sim.programs import ProgramDraft

LENDING = Lending(after=2, alone_s=0.02, ahead=4)
"""Rules of launch leases for simulated users, who do little, and little of it alone; and memory runs out."""


def loop(client: Any, random: Random) -> None:
    """Begin a loop over one or two programs; each call gets results of the one before."""
    able = [n for n, draft in client.programs.items() if draft.body.outputs and not is_burst(draft)]
    if not able:
        return
    if client.world.profile.quotas and client.world.profile.fed:  # it is to go beyond its bound
        able = [n for n in able if returns_arguments(client.programs[n])] or able
    chosen = [random.choice(able) for _ in range(random.choice((1, 1, 1, 2)))]
    client.loops_left -= 1
    # Where memory is short, leases end, and go on when some is free.
    is_long = client.world.profile.device_memory_bytes > 0
    client.looping = random.randint(20, 60) if is_long else random.randint(4, 12)
    client.runs_left += client.looping
    client.world.checked["loops"] += 1
    fed = client.world.profile.fed
    is_fed = fed > 0 and random.random() < fed
    _step(client, random, chosen, client.lives, random.random() < 0.7, is_fed)


def _step(
    client: Any, random: Random, chosen: list[int], life: int, tidy: bool, is_fed: bool
) -> None:
    """Call once, then wait for a result, read it, or neither; a loop that is fed puts an argument first."""
    if life != client.lives or not client.node.alive or client.closing or client.looking:
        client.looping = 0
        return
    number = random.choice(chosen)
    draft = client.programs.get(number)
    if draft is None or not client.may_run or client.session.closed is not None:
        client.looping = 0
    if not client.looping:
        return
    client.looping -= 1
    before = dict.fromkeys(client.arrays)
    again = partial(_step, client, random, chosen, life, tidy, is_fed)

    goes_on = random.random() < 0.15

    def waited(result: Any, error: BaseException | None) -> None:
        if wants_value:
            client.judge_value(array, result, error)
        else:
            client.judge_wait([array], error)
        if not goes_on:
            client.world.after(random.choice((0.0, 0.0, 1e-4, 1e-3)), again)

    asks_with_run, wants_value = client.looping % 2, client.looping % 4 == 1
    args = client.arguments(draft.body.inputs)
    if is_fed and args:
        at = random.randrange(len(args))
        args[at] = client._put(draft.body.inputs[at])
    results = client.launch(
        number, draft, tuple(args), waited if asks_with_run else None, wants_value
    )
    array = results[-1]
    is_bound = client.world.profile.quotas and is_fed and bool(args)
    if is_bound and args[at] in client.arrays and random.random() < 0.3:
        client._delete(args[at])  # it may wait for room, and a result may be the same bytes
    if tidy:
        mine = [array for array in before if array in client.arrays][-8:]
        if mine and random.random() < 0.4:
            client._delete(random.choice(mine))
    if not asks_with_run and array in client.arrays and not goes_on:
        promise = client._promise(f"loop {array:x}", waited)
        client._post(Await(((array, client.arrays[array]),), promise))
    elif goes_on or not asks_with_run:
        client.world.after(1e-4, again)


def returns_arguments(draft: ProgramDraft) -> bool:
    """Whether a result of a program is the same bytes as an argument."""
    body = draft.body
    return any(
        output.value.node < 0 and output.spec == body.inputs[output.value.index]
        for output in body.outputs
    )


def is_burst(draft: ProgramDraft) -> bool:
    """Whether a program is a burst of a loop; no other program takes a predicate."""
    return any(spec.dtype == "bool" for spec in draft.body.inputs)


def run_ahead(client: Any, random: Random, number: int, draft: ProgramDraft) -> None:
    """Launch some bursts of guarded iterations (`random_burst`) ahead of each other.

    Each takes over the carry of the one before, and its predicate. The client may read the predicates.
    """
    predicate = b"\x01" if random.random() < 0.85 else b"\x00"
    state: Sequence[int | bytes] = (predicate, *client.arguments(draft.body.inputs[1:]))
    for _ in range(random.randint(1, 4)):
        if not client.may_run:
            return
        state = client.launch(number, draft, tuple(state))
        if random.random() < 0.3:
            client.fetch(state[0])
