"""Decides which computations the loop runs itself, because they take less time than a change of threads.

A computation is *straight* if it has no loops, branches or native calls, and its devices tell each other
nothing: each call takes about as long as the next, on each host of a gang alone. An installed straight
computation is on trial for some calls. It proves quick if every call of the trial had ended when it
returned, and the fastest call took less than two changes of threads, both in processor time of the
caller and on the clock (other threads may work for it).

JAX accepts 32 computations on a device and then blocks the caller. The loop must not block, so it
runs nothing on a device while the newest computation there has not ended.

Nothing here reads a clock: the callers pass times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from pw.devices.host.backend import Execute
from pw.devices.host.value import Value
from pw.devices.jax.values import is_ready

CALLS = 16
"""Calls of a trial."""

PROCESSOR_S = 120e-6
CLOCK_S = 200e-6
"""The bounds for the fastest call of a trial: on busy cores, with cold caches, small calls take 60 to 90 µs."""

LONG_S = 1e-3
"""Seconds after which a quick computation is on trial again."""

SOON_S = 100e-6
"""Computations that follow one another within this time keep the execute thread awake."""


@dataclass(slots=True)
class _Trial:
    """The calls of a trial so far."""

    devices: tuple[int, ...]
    calls: int = 0
    ended: int = 0
    """Calls whose results were ready when they returned."""
    processor_s: float = math.inf
    clock_s: float = math.inf
    """The least that a call took: some calls are slowed down by other work."""


class Quick:
    """The quick computations of a host, by their keys."""

    def __init__(self) -> None:
        self.trials: dict[bytes, _Trial] = {}
        """Computations on trial, whose calls are timed (`tried`)."""
        self.proven: dict[bytes, tuple[int, ...]] = {}
        """The devices of this host that each quick computation runs on."""
        self._came_s = -math.inf
        self._newest: dict[int, ref[Value] | None] = {}
        """The last result enqueued on each device; None if it has ended.

        Kept while any computation is quick. When the first proves quick, it has ended on its devices,
        and so has everything enqueued there before."""

    def try_out(self, key: bytes, devices: tuple[int, ...]) -> None:
        """Begin the trial of a straight computation that has been installed, on these devices of the host."""
        self.proven.pop(key, None)
        self.trials[key] = _Trial(devices)

    def forget(self, key: bytes) -> None:
        """Forget a computation that is not installed any more."""
        self.proven.pop(key, None)
        self.trials.pop(key, None)

    def tried(self, key: bytes, processor_s: float, clock_s: float, *, ended: bool) -> None:
        """Record a call of a computation on trial, and whether it had ended when it returned."""
        if not self.proven:
            self._newest.clear()
        trial = self.trials[key]
        trial.calls += 1
        trial.ended += ended
        trial.processor_s = min(trial.processor_s, processor_s)
        trial.clock_s = min(trial.clock_s, clock_s)
        if trial.calls == CALLS:
            del self.trials[key]
            if trial.ended == CALLS and trial.processor_s < PROCESSOR_S and trial.clock_s < CLOCK_S:
                self.proven[key] = trial.devices

    def took(self, key: bytes, clock_s: float) -> None:
        """Record the time of a call of a quick computation."""
        if clock_s > LONG_S:
            self.try_out(key, self.proven[key])

    def enqueued(self, devices: tuple[int, ...], results: Sequence[Value], array: Any) -> None:
        """Record the results of a computation on these devices, the last of which is `array`."""
        newest = None if array.is_ready() else ref(results[-1])
        for device in devices:
            self._newest[device] = newest

    def comes_alone(self, now_s: float) -> bool:
        """Whether the computation that comes now does not follow closely on the one before it."""
        before_s, self._came_s = self._came_s, now_s
        return now_s - before_s > SOON_S

    def may_run(self, op: Execute) -> bool:
        """Whether the loop may run this computation now, without waiting for anything."""
        devices = self.proven.get(op.key)
        if devices is None:
            return False
        try:
            for value in op.args:
                if not is_ready(value):
                    return False
            for device in devices:
                newest = self._newest.get(device)
                if newest is None:
                    continue
                last = newest()
                if last is None or not is_ready(last):
                    return False
                self._newest[device] = None
            return True
        except Exception:  # noqa: BLE001 - something has failed: the execute thread will find out
            return False
