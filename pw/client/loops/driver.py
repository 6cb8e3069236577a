"""Drives a loop in bursts: the hosts decide when it ends, and the client stays ahead of them.

Each burst takes the carry and the predicate of the one before, so it can be launched before that has ended.
The client reads the predicate of each burst, and launches no more after a false one. The bursts that are
ahead then pass the carry on unchanged.

After a loss the carry is computed again from the last of its replicas, or from the first carry. The controller
keeps a bounded number of runs to do so, so a long loop makes replicas of its carry now and then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from pw.client.arrays.array import Array
from pw.client.checkpoints.checkpoint import checkpoint
from pw.client.connection.waiting import time_left
from pw.client.loops.bursts import Bursts, State
from pw.core.errors import ComputationTimeout

AHEAD = 3
"""Bursts in flight: one that runs, one that waits, and one on its way."""

BURST_S = 0.050
"""Seconds that a burst should take. Other clients, `timeout=` and `pw.cancel` get their turn after it. A burst
costs a tenth of this time where client and hosts share two cores."""

GROWTH = 4
"""Largest ratio of the lengths of a burst and the last one that ended."""

MOST = 1 << 20
"""Largest number of iterations in a burst."""

REPLICATED_BURSTS = 1024
"""Number of bursts between two replicas of the carry; the controller keeps sixteen times as many runs."""

REPLICATED_VALUES = 1 << 18
"""Number of arrays that bursts read and make between two replicas of the carry."""

TIMED_BURSTS = 8
"""Number of bursts whose times are averaged: one alone may seem long, and the next one short, because the
client or a host had to wait for a processor."""


def drive(
    bursts: Bursts,
    state: State,
    *,
    max_iterations: int | None,
    timeout_s: float,
    name: str,
    clock: Callable[[], float] = time.monotonic,
) -> State:
    """Return the last state of a loop, as soon as its arrays exist.

    Args:
        bursts: bursts of the loop.
        state: the first predicate and carry.
        max_iterations: the bound on iterations; None for none.
        timeout_s: seconds from now on; 0 for no limit.
        name: name of the loop, for the user.
        clock: the time in seconds.

    Raises:
        ComputationTimeout: the loop did not end in time.
        Error: of an iteration.
    """
    rest_s = time_left(timeout_s or None, clock)
    ahead: deque[tuple[Array, int, float]] = deque()
    timed: deque[tuple[int, float]] = deque(maxlen=TIMED_BURSTS)
    left, done, ended_s = max_iterations, 0, None
    first, launched = state, 0
    period = max(1, min(REPLICATED_BURSTS, REPLICATED_VALUES // (2 * len(state) + 1)))

    try:
        while True:
            while len(ahead) < AHEAD and left != 0:
                count = bursts.iterations if left is None else min(bursts.iterations, left)
                if bursts.sizes and count not in bursts.sizes:
                    count = max(size for size in bursts.sizes if size <= count)
                state = bursts.burst(count, state)
                state[0].start_fetch()
                ahead.append((state[0], count, clock()))
                left = None if left is None else left - count
                launched += 1
                if launched % period == 0:
                    # Leaves that stay as they are have come from the caller.
                    checkpoint([leaf for leaf in state if all(leaf is not one for one in first)])
            if not ahead:
                break
            more, count, launched_s = ahead[0]
            goes_on = bool(more.start_fetch().result(rest_s()))
            ahead.popleft()
            now_s = clock()
            if not goes_on:
                break
            done += count
            if ended_s is not None:
                timed.append((count, now_s - max(ended_s, launched_s)))
                _adapt(bursts, timed)
            ended_s = now_s
        for leaf in state:
            leaf.start_wait()
        for leaf in state:
            leaf.start_wait().result(rest_s())
    except BaseException as error:
        _cancel([state[0], *[more for more, _, _ in ahead]])
        if isinstance(error, TimeoutError) and rest_s() == 0.0:
            raise ComputationTimeout(
                f"{name} did not end within its timeout of {timeout_s:g} s; at least {done} iterations "
                "have ended. Give it more time, or max_iterations"
            ) from None
        raise
    return state


def _adapt(bursts: Bursts, timed: Sequence[tuple[int, float]]) -> None:
    """Choose the length of the next bursts by the lengths and the times, in seconds, of the last ones."""
    took_s = sum(seconds for _, seconds in timed)
    wanted = BURST_S * sum(count for count, _ in timed) / max(took_s, 1e-6)
    bursts.iterations = int(max(1, min(wanted, timed[-1][0] * GROWTH, MOST)))


def _cancel(predicates: list[Array]) -> None:
    """End the bursts that are in flight."""
    session = predicates[0]._runtime
    if session.alive:
        session.cancel([member._id for more in predicates for member in more.members])
