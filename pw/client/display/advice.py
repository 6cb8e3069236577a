"""Advice: a warning for each line of a script that does what costs much and could be done for less.

A session has one `Habits`, which it tells what happens where something is counted anyway: one call of 1024, one
wait of 64, and uploads and values of 1 MiB and more. Only there the stack is looked at, so a call costs one
comparison. `PW_ADVICE=0` and filters of `warnings` turn it off.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from pw.core.sharding import ArraySpec
from pw.core.sizes import size_in_words

CALLS = 1024
"""Number of calls between two looks at them."""
WAITS = 64
"""Number of waits between two looks at them."""
TIMES = 3
"""Number of looks in a row that see the same line with the same habit before a warning."""
SHORT_S = 0.3e-3
"""Seconds of a short call: the call is more work than its computation."""
STEP_S = 0.1
"""Seconds of a long step: to wait for its result costs little beside it."""
LARGE_BYTES = 1 << 20
REPLICATED_BYTES = 256 << 20

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep


class PerformanceWarning(UserWarning):
    """A line of the script does what costs much time or memory and could be done for less.

    Each line is warned of once for each habit: a wait for the newest result in every step of a loop, thousands
    of calls of microseconds, large arrays that each device has a copy of, and values that go to the client and
    back. `warnings.filterwarnings("ignore", category=pw.PerformanceWarning)` turns it off; so does the variable
    `PW_ADVICE=0`.
    """


class Line(NamedTuple):
    """A line of the user's script."""

    file: str
    number: int


def user_line() -> tuple[Line, dict[str, Any]] | None:
    """Return the innermost line of this thread's stack that is the user's, and its module's globals."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = file.startswith((_OURS, _LIBRARY, "<frozen")) or "site-packages" in file
        if not is_library:
            return Line(file, frame.f_lineno), frame.f_globals
        frame = frame.f_back
    return None


class Habits:
    """What a script does again and again in one session.

    Args:
        clock: the time in seconds.
        line: returns the user's line.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        line: Callable[[], tuple[Line, dict[str, Any]] | None] = user_line,
    ) -> None:
        self._clock = clock
        self._line = line
        self._is_off = os.environ.get("PW_ADVICE") == "0"
        self._called_s = self._waited_s = clock()
        self._calls_then = 0
        self._seen: dict[str, Counter[Line]] = {}
        self._warned: set[tuple[str, Line]] = set()
        self._fetched: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def called(self) -> None:
        """`CALLS` more calls were sent."""
        now_s = self._clock()
        took_s, self._called_s = (now_s - self._called_s) / CALLS, now_s
        self._look(
            "short calls",
            took_s < SHORT_S,
            lambda: (
                f"{TIMES * CALLS} calls took {took_s * 1e6:.0f} µs each: a call costs more than what it "
                "computes. Do several steps in one call: a loop of jax.lax.fori_loop or jax.lax.scan in a "
                "pw.jit function, or a pw.program that makes many calls"
            ),
        )

    def waited(self, calls: int, is_newest: bool) -> None:
        """`WAITS` more waits have begun.

        Args:
            calls: that were sent in all.
            is_newest: whether the last wait is for a result of the newest call, and that has not ended.
        """
        now_s, sent = self._clock(), calls - self._calls_then
        took_s, self._waited_s, self._calls_then = now_s - self._waited_s, now_s, calls
        in_each_step = 0.4 < sent / WAITS < 2.5 and took_s < STEP_S * WAITS
        self._look(
            "waits",
            is_newest and in_each_step,
            lambda: (
                f"a result is waited for in each of {TIMES * WAITS} steps, so the devices have nothing to do "
                "until the next call. Read the result of an earlier step, or of one step in a hundred; "
                "loss.copy_to_host_async() begins a read without a wait"
            ),
        )

    def uploading(self, value: np.ndarray[Any, Any], spec: ArraySpec) -> None:
        """A value of `LARGE_BYTES` or more is about to be sent to hosts."""
        copies, size_bytes = spec.sharding.device_count, value.nbytes
        if id(owner := _owner(value)) in self._fetched and self._fetched[id(owner)] is owner:
            self._warn(
                "round trips",
                f"{size_in_words(size_bytes)} came from the cluster and go back to it: pass the pw.Array "
                "itself. pw.put(x, sharding=...) moves it from host to host, and pw.jit computes with it there",
            )
        elif size_bytes >= REPLICATED_BYTES and copies > 1 and not any(spec.sharding.spec):
            self._warn(
                "copies",
                f"an array of {size_in_words(size_bytes)} is copied to each of {copies} devices, "
                f"{size_in_words(size_bytes * copies)} in all: divide it, with "
                "pw.NamedSharding(mesh, PartitionSpec(axis)) as sharding",
            )

    def fetched(self, value: np.ndarray[Any, Any]) -> None:
        """A value of `LARGE_BYTES` or more has come to this process."""
        owner = _owner(value)
        self._fetched[id(owner)] = owner

    def _look(self, habit: str, has_it: bool, words: Callable[[], str]) -> None:
        """Look at the calls or waits; warn when `TIMES` looks in a row see the same line with a habit."""
        seen = self._seen.setdefault(habit, Counter())
        place = self._line() if has_it and not self._is_off else None
        if place is None:
            seen.clear()
            return
        seen[place[0]] += 1
        if seen[place[0]] == TIMES:
            self._warn(habit, words())

    def _warn(self, habit: str, words: str) -> None:
        place = None if self._is_off else self._line()
        if place is None or (habit, place[0]) in self._warned:
            return
        line, module = place
        self._warned.add((habit, line))
        warnings.warn_explicit(
            words,
            PerformanceWarning,
            line.file,
            line.number,
            module=module.get("__name__"),
            registry=module.setdefault("__warningregistry__", {}),
        )


def _owner(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that a view shows."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value
