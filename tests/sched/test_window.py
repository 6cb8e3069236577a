"""Launches in flight count on each device, in steps for each group of devices used together."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from pw.core.messages import InstallProgram
from pw.core.programs.plan import Execute, Free, HostPlan, HostSegment
from pw.core.programs.program import Computation, Kind, Program
from pw.core.sharding import Binding, DeviceAddress, Placement
from pw.core.tenants import OPERATOR
from pw.sched.island import window
from pw.sched.island.installed_program import sites_of
from pw.sched.island.policy import ProportionalShare
from pw.sched.island.window import Footprint, Window
from tests.sched.test_policy import Wants

PLACES = "abcdef"
places = st.frozensets(st.sampled_from(PLACES))
# Where something runs, how long it takes, and which of those under way ends first.
steps = st.tuples(
    places, st.sampled_from([1.0, 7_000.0, 300_000.0]), st.none() | st.integers(0, 99)
)


@given(st.lists(steps), st.booleans())
def test_every_place_counts_as_if_it_were_counted_alone(
    done: list[tuple[frozenset[str], float, int | None]], contended: bool
) -> None:
    ahead = Window()
    limit, limit_us = window.SEGMENTS, window.TIME_US
    if contended:
        limit, limit_us = window.CONTENDED_SEGMENTS, window.CONTENDED_TIME_US
    counts: defaultdict[str, int] = defaultdict(int)
    times_us: defaultdict[str, float] = defaultdict(float)
    under_way: list[tuple[frozenset[str], Footprint, float]] = []
    for where, time_us, ends in done:
        if ends is not None and under_way:
            before, footprint, took_us = under_way.pop(ends % len(under_way))
            ahead.ended(footprint, took_us, 0.0)
            for place in before:
                counts[place] -= 1
                times_us[place] -= took_us
        footprint = ahead.footprint(where)
        assert ahead.footprint(where) is footprint
        room = all(counts[p] < 2 or (counts[p] < limit and times_us[p] < limit_us) for p in where)
        assert ahead.is_open(footprint, contended) == room
        ahead.launched(footprint, time_us, 0.0)
        under_way.append((where, footprint, time_us))
        for place in where:
            counts[place] += 1
            times_us[place] += time_us


def test_devices_that_are_used_together_are_one_group() -> None:
    ahead = Window()
    whole = ahead.footprint(range(2048))
    assert len(whole.groups) == 1
    half = ahead.footprint(range(1024))
    assert len(half.groups) == 1
    assert len(whole.groups) == 2
    assert half.groups[0] in whole.groups
    assert ahead.footprint(range(1024, 2048)).groups == [whole.groups[0]]


def test_where_each_segment_of_a_program_runs() -> None:
    devices = tuple(DeviceAddress(f"h{at // 2}", at % 2) for at in range(4))
    binding = Binding.of(7, "i", devices)

    def computation(*at: int, python: bool = False) -> Computation:
        return Computation(
            "f", b"", Placement(7, at), (), (), kind=Kind.PYTHON if python else Kind.STABLEHLO
        )

    def plan(host: str, *of_segments: tuple[Execute | Free, ...]) -> HostPlan:
        parts = tuple(HostSegment(at, part) for at, part in enumerate(of_segments) if part)
        return HostPlan(host, parts, (), (), (binding,))

    wide, one, function = (Execute(number, (), (), ()) for number in range(3))
    body = Program(
        "p", (computation(0, 2), computation(3), computation(2, python=True)), (), (), ()
    )
    plans = (plan("h0", (wide,), (), (Free((1,)),)), plan("h1", (wide, one), (function,)))
    assert sites_of(InstallProgram(1, body, plans, ())) == {
        0: {devices[0], devices[2], devices[3]},
        1: {"h1"},
        2: {"h0"},
    }


def test_groups_are_joined_when_the_footprint_that_divided_them_is_gone() -> None:
    ahead = Window()
    whole = ahead.footprint(range(100))
    ahead.launched(whole, 5.0, 0.0)
    for turn in range(10 * window.FEW):
        ahead.footprint(range(turn % 99 + 1))
        assert len(whole.groups) <= window.FEW + 4
    assert ahead.is_open(whole, True)
    ahead.launched(whole, 300_000.0, 0.0)
    assert not ahead.is_open(whole, False)
    assert not ahead.is_open(ahead.footprint((7,)), False)
    ahead.ended(whole, 300_000.0, 0.0)
    assert ahead.is_open(ahead.footprint((7,)), False)
    del whole
    ahead.tidy()
    assert not ahead.sites


def test_a_client_owes_nothing_for_devices_that_it_never_used() -> None:
    ahead, policy = Window(), ProportionalShare()
    both, one = ahead.footprint((0, 1)), ahead.footprint((0,))
    for _ in range(3):
        policy.launched(Wants(1, one.accounts).stake, one.accounts, 10e6)
        policy.launched(Wants(2, both.accounts).stake, both.accounts, 1e3)
    del one
    ahead.tidy()
    assert len(both.groups) == 1
    (account,) = both.accounts
    clients = account.within(OPERATOR)
    assert clients.passes[1] == clients.now, "on the other device it was never served"
    assert clients.passes[2] < clients.now, "on this one it waits"
    ahead.footprint((0,))
    within = [account.within(OPERATOR) for account in both.accounts]
    assert [clients.passes.keys() for clients in within] == [{1, 2}] * 2
