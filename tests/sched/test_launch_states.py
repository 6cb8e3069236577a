"""The states of a launch: the table, and what moves a launch through it."""

from __future__ import annotations

from collections import Counter

import pytest

from pw.core import messages as msg
from pw.core.actors.lifecycle import ImpossibleTransition, Lifecycle
from pw.core.errors import ErrorReport
from pw.core.ids import client_id
from pw.sched.island.launch_states import LAUNCH, LaunchEvent, LaunchState, SegmentTask
from pw.testing.sim.profiles import PROFILES
from pw.testing.sim.runner import simulate
from tests.stages.scheduling import Bench

FINAL = {LaunchState.ENDED, LaunchState.CANCELLED, LaunchState.LOST}
QUEUED = {LaunchState.WAITING, LaunchState.ELIGIBLE, LaunchState.READY, LaunchState.REFUSED}


def test_the_table_is_whole() -> None:
    assert set(LAUNCH.table) == set(LaunchState)
    assert {state for state in LaunchState if not LAUNCH.table[state]} == FINAL
    for state in QUEUED:
        assert LAUNCH.after(state, LaunchEvent.CANCEL) is LaunchState.CANCELLED
        assert LAUNCH.after(state, LaunchEvent.LOSE) is LaunchState.LOST


@pytest.mark.parametrize("state", sorted(LaunchState))
def test_only_a_launch_that_may_go_is_launched_and_only_one_in_flight_ends(
    state: LaunchState,
) -> None:
    may_go = {LaunchState.ELIGIBLE, LaunchState.READY}
    for event, allowed in (
        (LaunchEvent.LAUNCH, may_go),
        (LaunchEvent.END, {LaunchState.IN_FLIGHT}),
    ):
        if state not in allowed:
            with pytest.raises(ImpossibleTransition, match=event):
                LAUNCH.after(state, event)
        else:
            assert LAUNCH.after(state, event)


class Watched:
    """A scheduler, and one launch of its client that waits for two producers and an upload."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.bench.client(1)
        self.array = client_id(1, 9)
        self.submit = self.bench.submission(1, depends=(3, 5), awaits=(self.array,))
        self.bench.tell(self.submit)
        (self.task,) = self.bench.scheduler.queues.runs[self.submit.run]

    def until_launched(self) -> SegmentTask:
        run = self.submit.run
        self.bench.tell(
            msg.SegmentLaunched(run, 3), msg.SegmentLaunched(run, 5), msg.UploadEnded(self.array)
        )
        return self.task


def test_a_launch_waits_until_uploads_and_producers_let_it_go() -> None:
    watched = Watched()
    run, task, bench = watched.submit.run, watched.task, watched.bench
    bench.tell(
        msg.SegmentLaunched(run, 3), msg.SegmentLaunched(run, 5), msg.SegmentDone(run, 3, 10)
    )
    assert task.state is LaunchState.WAITING
    bench.tell(msg.UploadEnded(watched.array))
    assert task.state is LaunchState.IN_FLIGHT
    bench.end(bench.launches()[0])
    assert task.state is LaunchState.ENDED


def test_a_launch_is_ready_when_its_producers_have_ended() -> None:
    task = Watched().task
    for segment in (3, 5):
        task.producer_launched(segment)
        task.producer_ended(segment)
    assert task.state is LaunchState.WAITING
    (array,) = task.awaits
    task.upload_ended(array)
    assert task.state is LaunchState.READY


@pytest.mark.parametrize("launched", [False, True])
def test_how_a_launch_is_taken_away(launched: bool) -> None:
    lost = msg.EpochEnded("i", 1, ErrorReport("HostLost", "gone"), "h0")
    for message, queued, in_flight in (
        (msg.CancelRun(Watched().submit.run), LaunchState.CANCELLED, LaunchState.IN_FLIGHT),
        (msg.RemoveClient(1), LaunchState.CANCELLED, LaunchState.IN_FLIGHT),
        (lost, LaunchState.LOST, LaunchState.LOST),
    ):
        watched = Watched()
        task = watched.until_launched() if launched else watched.task
        watched.bench.tell(message)
        assert task.state is (in_flight if launched else queued)


def test_the_simulator_goes_through_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    after = Lifecycle.after

    def watched(
        self: Lifecycle[LaunchState, LaunchEvent], state: LaunchState, event: LaunchEvent
    ) -> LaunchState:
        if self is LAUNCH:
            seen[state, event] += 1
        return after(self, state, event)

    possible = {(state, event) for state in LaunchState for event in LAUNCH.table[state]}
    of_quarantine = {at for at in possible if LaunchState.REFUSED in (at[0], LAUNCH.after(*at))}
    # A launch is hardly ever eligible for longer than a turn: these are in the tests above only.
    brief = {
        (LaunchState.ELIGIBLE, LaunchEvent.PRODUCERS_ENDED),
        (LaunchState.ELIGIBLE, LaunchEvent.CANCEL),
        (LaunchState.ELIGIBLE, LaunchEvent.LOSE),
    }
    wanted = possible - of_quarantine - brief
    monkeypatch.setattr(Lifecycle, "after", watched)
    for seed in (1, *range(20)):  # the first one goes through all
        assert simulate(seed, PROFILES["islands-lost"]).violation is None
        if wanted <= seen.keys():
            return
    pytest.fail(f"never seen: {wanted - seen.keys()}")
