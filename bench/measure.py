"""How a reading is taken: all contenders in turn, in every round.

A shared machine drifts by more than what separates the contenders, so a single reading says little, and two
taken a minute apart cannot be compared. What can be trusted is the ratio of two readings of one round. Hence
rounds, an order that rotates (so that no contender always runs behind the same neighbour), medians, and
quartiles to say how far to trust them.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class GaveUp(Exception):
    """A contender cannot be measured (it is not installed, crashed, or hangs); its text becomes a note."""


@dataclass(frozen=True)
class Sample:
    """The readings of one contender, one per round, in the order of the rounds."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample needs at least one reading")
        for value in self.values:
            if not math.isfinite(value):
                raise ValueError(f"a reading of {value} cannot be right: {self.values}")

    @property
    def median(self) -> float:
        """What is reported."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quartile(0)

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quartile(2)

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a fraction of the median: how noisy it was."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0

    def over(self, baseline: Sample) -> Sample:
        """This sample divided by a baseline's of the same rounds, round by round.

        Raises ValueError if the rounds are not the same, or a reading of the baseline is zero.
        """
        if len(self.values) != len(baseline.values):
            raise ValueError("the two samples were not taken in the same rounds")
        if 0 in baseline.values:
            raise ValueError("the baseline has a reading of zero")
        return Sample(tuple(a / b for a, b in zip(self.values, baseline.values, strict=True)))

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
    """Run every case once a round, in an order that rotates, and return its readings.

    A case returns its own reading (a rate, or seconds), which need not be the time its call takes. The readings
    of the first `warm_up` rounds are dropped. The garbage collector runs between cases, not during them.
    With `notes`, a case that gives up is left out, and why is added to them; without, it raises GaveUp.
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


def rate(count: int, work: Callable[[], object]) -> float:
    """How many of the `count` things that `work` does are done per second."""
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def timed(work: Callable[[int], object]) -> Callable[[int], float]:
    """How long `work(count)` takes, after a tenth of it that does not count: it has been idle before."""

    def measured(count: int) -> float:
        work(max(1, count // 10))
        return seconds(lambda: work(count))

    return measured


def sized(
    timed: Callable[[int], float], *, reading_s: float, multiple_of: int = 1
) -> Callable[[], float]:
    """A case for `alternate` that gives a rate, with a count that makes a reading take about `reading_s`.

    The count is found in the first round.

    Args:
        timed: does something so many times and returns how long that took, in seconds.
        reading_s: how long a reading should take. Contenders differ by orders of magnitude.
        multiple_of: how many are done at once.
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


def _without_collections(case: Callable[[], float]) -> float:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return case()
    finally:
        if was_enabled:
            gc.enable()
