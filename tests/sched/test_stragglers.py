"""Which hosts of gangs are slow, and why: reports of three hosts, second by second."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import RESOURCES, Address, executor_of
from pw.core.messages import SlowCause
from pw.sched.island.stragglers import AGAIN_S, REPLACED_AFTER_S, SECONDS, Stragglers

HOSTS = ("a", "b", "c")
CLOCKS_US = {"a": 0, "b": 7_000_000_000, "c": -3_000_000}
"""Microseconds by which the clock of each host is ahead of the scheduler's."""
WAY_US = 100
TOOK_US = 10_000
LAUNCHES = 5
"""Launches in each second."""


@dataclass
class Slow:
    """What is different on a host; all times are microseconds."""

    longer: int = 0
    """Its computations take longer, and it ends later."""
    tail: int = 0
    """It ends later each time, and so begins the next launch later."""
    idle: int = 0
    inputs: int = 0
    peer: str = ""
    has_stream: bool = False
    paused: float = 0.0
    way: int = WAY_US
    seconds: range = field(default_factory=lambda: range(100))
    """Seconds in which all this is so."""


class Island:
    """The stragglers of an island, and the reports of its hosts."""

    def __init__(self, compiling: tuple[str, ...] = (), replace_factor: float = math.inf) -> None:
        self.second = 0
        self.lines: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: dict[str, msg.PaceHeard] = {}
        self.replaced: list[tuple[int, str]] = []
        """Seconds in which hosts were to be replaced, and which."""
        program = SimpleNamespace(compiling=set(compiling))
        self.at_us = 0
        self.stragglers = Stragglers(
            self,  # type: ignore[arg-type]
            "east",
            SimpleNamespace(is_current=lambda epoch, sender: epoch == 1, hosts=HOSTS),  # type: ignore[arg-type]
            SimpleNamespace(compiling=lambda: iter([(1, program)] if compiling else [])),  # type: ignore[arg-type]
            replace_factor,
        )

    def hear(self, sender: Address, message: object) -> None:
        self.stragglers.handlers()[type(message)](sender, message)

    def now_s(self) -> float:
        return self.at_us * 1e-6

    def send(self, to: Address, message: msg.PaceHeard | msg.ReplaceHost) -> None:
        if isinstance(message, msg.ReplaceHost):
            assert to == RESOURCES
            self.replaced.append((self.second, message.node))
            return
        assert to == executor_of(to.node)
        self.answers[to.node] = message

    def log(self, level: str, event: str, **fields: Any) -> None:
        self.lines.append((level, event, fields))

    def count(self, counter: str, amount: int = 1) -> None:
        assert counter == "slow_hosts"

    def pass_seconds(self, count: int, **slow: Slow) -> list[msg.SlowHost]:
        for _ in range(count):
            self.second += 1
            for host in HOSTS:
                here = slow.get(host, Slow())
                self._report(host, here if self.second in here.seconds else Slow())
        return self.stragglers.slow()

    def _report(self, host: str, slow: Slow) -> None:
        clock_us = CLOCKS_US[host]
        sent_us = self.second * 1_000_000 + 900_000
        heard = self.answers.get(host)
        held_us = 0 if heard is None else sent_us - heard.sent_us - slow.way
        self.at_us = sent_us + slow.way
        report = msg.PaceReport(
            1,
            sent_us + clock_us,
            0 if heard is None else heard.sent_us,
            held_us,
            0,
            slow.paused,
            tuple(self._times(slow, clock_us)),
        )
        self.hear(executor_of(host), report)

    def _times(self, slow: Slow, clock_us: int) -> Iterator[msg.LaunchTimes]:
        for index in range(LAUNCHES):
            came_us = self.second * 1_000_000 + 100_000 * index
            began_us = came_us + slow.idle + slow.inputs + slow.tail
            yield msg.LaunchTimes(
                10 * self.second + index,
                0,
                began_us + clock_us,
                began_us + TOOK_US + slow.longer + clock_us,
                slow.inputs,
                slow.idle,
                not slow.tail,
                slow.peer,
                slow.has_stream,
            )


CASES: dict[str, tuple[Slow, float, SlowCause]] = {
    "device": (Slow(longer=6_000), 1.6, SlowCause.DEVICE),
    "device behind the last collective": (Slow(tail=4_000), 1.61, SlowCause.DEVICE),
    "processor": (Slow(idle=8_000), 1.8, SlowCause.PROCESSOR),
    "stopped": (Slow(paused=0.4), 1.67, SlowCause.PAUSED),
    "stopped, and late with it": (Slow(idle=8_000, paused=0.15), 1.8, SlowCause.PAUSED),
    "network": (Slow(way=9_000 + WAY_US), 1.9, SlowCause.NETWORK),
    "stream": (Slow(inputs=5_000, has_stream=True), 1.5, SlowCause.STREAM),
}


@pytest.mark.parametrize("case", CASES)
def test_a_slow_host_is_named_with_its_cause(case: str) -> None:
    slow, factor, cause = CASES[case]
    island = Island()
    assert not island.pass_seconds(SECONDS, b=slow) or case.startswith("stopped")
    (one,) = island.pass_seconds(2, b=slow)
    assert (one.host, one.island, one.cause) == ("b", "east", cause)
    assert one.factor == pytest.approx(factor, rel=0.02)
    assert 5 <= one.for_s <= SECONDS + 2
    ((level, event, fields),) = island.lines
    assert (level, event) == ("warning", "slow host")
    assert "host b of island east is" in fields["why"]


def test_a_cause_stays_until_another_one_has_more_seconds() -> None:
    """A stop of half a second delays what is measured in some seconds."""
    island, far = Island(), Slow(way=9_000 + WAY_US)
    island.pass_seconds(SECONDS + 2, b=far)
    late = replace(far, idle=20_000)
    for slow in (*[late] * (SECONDS // 2), *[far] * SECONDS):
        assert island.pass_seconds(1, b=slow)[0].cause is SlowCause.NETWORK
    island.pass_seconds(SECONDS, b=late)
    assert island.pass_seconds(1, b=late)[0].cause is SlowCause.PROCESSOR


def test_a_host_is_named_once_one_cause_has_more_seconds_than_the_others() -> None:
    """When links become slow, a stop of half a second may delay timers, and then a computation."""
    island, far = Island(), Slow(way=9_000 + WAY_US)
    island.pass_seconds(2)
    for slow in (replace(far, idle=20_000), replace(far, longer=30_000), *[far] * 3):
        assert not island.pass_seconds(1, b=slow)
    assert island.pass_seconds(1, b=far)[0].cause is SlowCause.NETWORK


def test_a_host_that_compiles_is_slow_for_that() -> None:
    island = Island(compiling=("b",))
    (one,) = island.pass_seconds(SECONDS + 2, b=Slow(idle=8_000))
    assert one.cause is SlowCause.COMPILATION
    island = Island(compiling=HOSTS)
    (one,) = island.pass_seconds(SECONDS + 2, b=Slow(idle=8_000))
    assert one.cause is SlowCause.PROCESSOR


FAST = {
    "waits for a late value of another host": Slow(inputs=9_000, peer="x"),
    "is slow for a moment": Slow(idle=500_000, seconds=range(4, 5)),
    "has little to do, and takes a little longer": Slow(idle=600),
    "takes a tenth longer": Slow(longer=1_000),
}


@pytest.mark.parametrize("case", FAST)
def test_such_a_host_is_not_slow(case: str) -> None:
    assert not Island().pass_seconds(12, b=FAST[case])


def test_values_of_a_peer_that_others_have_in_time_are_late_because_of_the_network() -> None:
    (one,) = Island().pass_seconds(12, b=Slow(inputs=9_000, peer="x"), c=Slow(peer="x"))
    assert (one.host, one.cause, one.peer) == ("b", SlowCause.PEER, "x")
    assert one.words.endswith("values of host x reach it late over the network")


def test_hosts_that_wait_for_a_slow_one_are_not_slow() -> None:
    """The others' computations take longer, because they wait in the collective."""
    waits = Slow(longer=8_000)
    (one,) = Island().pass_seconds(12, a=waits, b=Slow(idle=8_000), c=waits)
    assert (one.host, one.cause) == ("b", SlowCause.PROCESSOR)


def test_a_host_that_is_fast_again_is_not_named() -> None:
    island = Island()
    assert island.pass_seconds(10, b=Slow(longer=6_000))
    assert not island.pass_seconds(SECONDS, b=Slow())
    assert [level for level, _, _ in island.lines] == ["warning", "info"]


def test_a_host_that_reports_no_more_is_not_named_for_ever() -> None:
    island = Island()
    assert island.pass_seconds(10, b=Slow(longer=6_000))
    island.at_us += 120_000_000
    assert not island.stragglers.slow()


def test_a_new_epoch_begins_without_slow_hosts() -> None:
    island = Island()
    assert island.pass_seconds(10, b=Slow(longer=6_000))
    ended = msg.EpochEnded("east", 1, ErrorReport("HostLost", ""))
    island.hear(Address("controller", "resources"), ended)
    assert not island.stragglers.slow()


def test_differences_within_the_error_of_the_clocks_do_not_count() -> None:
    island = Island()
    assert not island.pass_seconds(12, b=Slow(longer=900, way=1_900))


def test_a_host_that_stays_too_slow_is_replaced_and_asked_for_again_after_a_minute() -> None:
    island = Island(replace_factor=1.5)
    island.pass_seconds(90, a=Slow(longer=6_000))
    (first_s, host), (second_s, again) = island.replaced
    assert host == again == "a"
    assert REPLACED_AFTER_S < first_s < REPLACED_AFTER_S + 10
    assert second_s - first_s == pytest.approx(AGAIN_S, abs=1)


@pytest.mark.parametrize(
    "slow",
    [
        Slow(longer=3_000),
        Slow(inputs=8_000, has_stream=True),
        Slow(longer=9_000, seconds=range(10, 20)),
    ],
    ids=["by less", "with its input", "not for long"],
)
def test_other_slow_hosts_are_not_replaced(slow: Slow) -> None:
    island = Island(replace_factor=1.5)
    island.pass_seconds(60, a=slow)
    assert any("slow host" in event for _, event, _ in island.lines)
    assert not island.replaced
