"""Which launches of gangs a host notes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pw.core.ids import Address
from pw.core.messages import PaceReport
from pw.devices.host.pace import TICK_S, TICKS, Pace


class Host:
    """A host of a gang, whose clock goes on with its timer."""

    def __init__(self) -> None:
        self._timer: list[Callable[[], None]] = []
        self._now_s = 0.0
        order = SimpleNamespace(scheduler=Address("c", "s"), hosts=("a", "b"), epoch=1, host="a")
        self.pace = Pace(self, order)  # type: ignore[arg-type]

    def now_s(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        assert delay_s == TICK_S
        self._timer.append(call)

    def send(self, to: Address, message: object) -> None:
        assert isinstance(message, PaceReport)

    def pass_second(self, runs: range) -> int:
        """Launch these runs in one second; return how many are noted."""
        launches: list[Any] = [
            SimpleNamespace(run=SimpleNamespace(run=n), noted=None) for n in runs
        ]
        for launch in launches:
            self.pace.joins(launch)
        for _ in range(TICKS):
            self._now_s += TICK_S
            self._timer.pop()()
        return sum(launch.noted is not None for launch in launches)


@pytest.mark.parametrize("a_second", [20, 27, 39, 100, 1000])
@pytest.mark.parametrize("apart", [1, 2, 3, 4, 8, 33, 64])
def test_hardly_a_second_has_no_launch_that_is_noted(a_second: int, apart: int) -> None:
    """Whatever the numbers of a client's runs have in common, as that each third one is a run."""
    host, first, noted = Host(), (1 << 40) + 641, []
    for _ in range(60):
        last = first + a_second * apart
        noted.append(host.pass_second(range(first, last, apart)))
        first = last
    assert noted[2:].count(0) <= 1
    assert sum(noted) / len(noted) < 30
