"""How a benchmark takes readings: every contender once in every round.

On a shared machine, readings change from minute to minute by more than the contenders differ. Two
readings of one round can be compared, so a benchmark reports ratios within a round. The order of
the contenders rotates, so that none always runs after the same neighbour. Medians summarise the
rounds, and quartiles say how far to trust them.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class GaveUp(Exception):
    """A contender is not installed, crashed or hangs; the text becomes a note of the result."""


@dataclass(frozen=True)
class Sample:
    """The readings of one contender, one a round, in the order of the rounds."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample needs at least one reading")
        for value in self.values:
            if not math.isfinite(value):
                raise ValueError(f"a reading must be finite: {self.values}")

    @property
    def median(self) -> float:
        """The median of the readings."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quartile(0)

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quartile(2)

    def over(self, baseline: Sample) -> Sample:
        """This sample divided by a baseline, round by round.

        Raises ValueError if the numbers of rounds differ, or if a reading of the baseline is zero.
        """
        if 0 in baseline.values:
            raise ValueError("the baseline has a reading of zero")
        return Sample(tuple(mine / other for mine, other in self._pairs(baseline)))

    def minus(self, baseline: Sample) -> Sample:
        """This sample less a baseline, round by round; raises like `over`."""
        return Sample(tuple(mine - other for mine, other in self._pairs(baseline)))

    def _pairs(self, other: Sample) -> list[tuple[float, float]]:
        if len(self.values) != len(other.values):
            raise ValueError("the two samples were not taken in the same rounds")
        return list(zip(self.values, other.values, strict=True))

    def _quartile(self, which: int) -> float:
        if len(self.values) == 1:
            return self.values[0]
        return statistics.quantiles(self.values, n=4, method="inclusive")[which]


def alternate(
    cases: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 1,
    notes: list[str] | None = None,
) -> dict[str, Sample]:
    """Run every case once a round, in an order that rotates, and return the readings.

    A case returns its own reading: a rate, or seconds. The readings of the first `warm_up` rounds
    are dropped. The garbage collector runs between cases, not during them. With `notes`, a case
    that raises GaveUp is left out, and the reason is added to the notes.
    """
    names = list(cases)
    readings: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            if name not in readings:
                continue
            try:
                reading = _without_collections(cases[name])
            except GaveUp as error:
                if notes is None:
                    raise
                notes.append(f"{name} was left out: {error}")
                del readings[name]
            else:
                if number >= warm_up:
                    readings[name].append(reading)
    return {name: Sample(tuple(values)) for name, values in readings.items()}


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def timed(work: Callable[[int], object]) -> Callable[[int], float]:
    """A function that returns how long `work(count)` takes, after a warm-up of a tenth of it."""

    def measured(count: int) -> float:
        work(max(1, count // 10))
        return seconds(lambda: work(count))

    return measured


def sized(
    timed: Callable[[int], float], *, reading_s: float, multiple_of: int = 1
) -> Callable[[], float]:
    """A case for `alternate` that returns a rate, and finds its count in the first round.

    Args:
        timed: does something `count` times and returns how long that took, in seconds.
        reading_s: how long a reading should take; contenders differ by orders of magnitude.
        multiple_of: the count is a multiple of it.
    """
    known: list[int] = []

    def right_count() -> int:
        count = multiple_of
        while (took_s := timed(count)) < reading_s / 4 and count < 1 << 24:
            count *= 4
        return multiple_of * max(1, round(count * reading_s / took_s / multiple_of))

    def case() -> float:
        if not known:
            known.append(right_count())
        return known[0] / timed(known[0])

    return case


def in_flight(
    count: int, most: int, begin: Callable[[], Any], end: Callable[[Any], object]
) -> None:
    """Call `begin` `count` times and `end` with each result, with at most `most` in flight."""
    begun: deque[Any] = deque()
    for _ in range(count):
        if len(begun) >= most:
            end(begun.popleft())
        begun.append(begin())
    while begun:
        end(begun.popleft())


def percentile(values: list[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _without_collections(case: Callable[[], float]) -> float:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return case()
    finally:
        if was_enabled:
            gc.enable()
