"""The states of a launch: the table, and what moves a launch through it."""

from __future__ import annotations

from collections import Counter

import pytest

from pw.core import messages as msg
from pw.core.actors.lifecycle import ImpossibleTransition, Lifecycle
from pw.core.errors import ErrorReport
from pw.core.ids import client_id
from pw.sched.island.launch_states import LAUNCH, Event, SegmentTask, State
from pw.testing.sim.profiles import PROFILES
from pw.testing.sim.runner import simulate
from tests.sched.test_scheduler import Bench

FINAL = {State.ENDED, State.CANCELLED, State.LOST}
QUEUED = {State.WAITING, State.ELIGIBLE, State.READY, State.REFUSED}


def test_the_table_is_whole() -> None:
    assert set(LAUNCH.table) == set(State)
    assert {state for state in State if not LAUNCH.table[state]} == FINAL
    for state in QUEUED:
        assert LAUNCH.after(state, Event.CANCEL) is State.CANCELLED
        assert LAUNCH.after(state, Event.LOSE) is State.LOST


@pytest.mark.parametrize("state", sorted(State))
def test_only_a_launch_that_may_go_is_launched_and_only_one_in_flight_ends(state: State) -> None:
    may_go = {State.ELIGIBLE, State.READY}
    for event, allowed in ((Event.LAUNCH, may_go), (Event.END, {State.IN_FLIGHT})):
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
    assert task.state is State.WAITING
    bench.tell(msg.UploadEnded(watched.array))
    assert task.state is State.IN_FLIGHT
    bench.end(bench.launches()[0])
    assert task.state is State.ENDED


def test_a_launch_is_ready_when_its_producers_have_ended() -> None:
    task = Watched().task
    for segment in (3, 5):
        task.producer_launched(segment)
        task.producer_ended(segment)
    assert task.state is State.WAITING
    (array,) = task.awaits
    task.upload_ended(array)
    assert task.state is State.READY


@pytest.mark.parametrize("launched", [False, True])
def test_how_a_launch_is_taken_away(launched: bool) -> None:
    lost = msg.IslandLost("i", 1, ErrorReport("HostLost", "gone"), "h0")
    for message, queued, in_flight in (
        (msg.CancelRun(Watched().submit.run), State.CANCELLED, State.IN_FLIGHT),
        (msg.RemoveClient(1), State.CANCELLED, State.IN_FLIGHT),
        (lost, State.LOST, State.LOST),
    ):
        watched = Watched()
        task = watched.until_launched() if launched else watched.task
        watched.bench.tell(message)
        assert task.state is (in_flight if launched else queued)


def test_the_simulator_goes_through_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    after = Lifecycle.after

    def watched(self: Lifecycle[State, Event], state: State, event: Event) -> State:
        if self is LAUNCH:
            seen[state, event] += 1
        return after(self, state, event)

    monkeypatch.setattr(Lifecycle, "after", watched)
    for seed in range(3):
        assert simulate(seed, PROFILES["chaos"]).violation is None
    possible = {(state, event) for state in State for event in LAUNCH.table[state]}
    of_quarantine = {at for at in possible if State.REFUSED in (at[0], LAUNCH.after(*at))}
    assert possible - of_quarantine <= seen.keys()
