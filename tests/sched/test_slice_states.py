"""The states of a slice: the table, and that the simulator goes through it."""

from __future__ import annotations

from collections import Counter

import pytest

from pw.core.actors.lifecycle import ImpossibleTransition, Lifecycle
from pw.core.messages import AllocateSlice
from pw.sched.cluster.slice_states import SLICE, Event, Slice, State
from pw.testing.sim.profiles import PROFILES
from pw.testing.sim.runner import simulate

FINAL = {State.REFUSED, State.RELEASED}


def test_the_table_is_whole() -> None:
    assert set(SLICE.table) == set(State)
    assert {state for state in State if not SLICE.table[state]} == FINAL


@pytest.mark.parametrize("state", sorted(State))
def test_what_can_happen_in_each_state(state: State) -> None:
    allowed = {
        Event.PARK: {State.REQUESTED, State.PARKED, State.BOUND},
        Event.BIND: {State.REQUESTED, State.PARKED},
        Event.REBIND: {State.BOUND},
        Event.MOVE: {State.BOUND},
        Event.REFUSE: {State.REQUESTED, State.PARKED, State.BOUND},
        Event.RELEASE: {State.PARKED, State.BOUND},
    }
    for event in Event:
        if state in allowed[event]:
            assert SLICE.after(state, event)
        else:
            with pytest.raises(ImpossibleTransition, match="slice"):
                SLICE.after(state, event)


def test_a_slice_keeps_its_positions_until_it_moves() -> None:
    piece = Slice(AllocateSlice(1, 2, None, None, None))
    piece.bound(Event.BIND, "a", ((0, 0), (0, 1)))
    piece.bound(Event.REBIND, "a", piece.positions)
    assert (piece.state, piece.island, piece.positions) == (State.BOUND, "a", ((0, 0), (0, 1)))
    piece.bound(Event.MOVE, "b", ((1, 0), (1, 1)))
    assert (piece.island, piece.positions) == ("b", ((1, 0), (1, 1)))


def test_the_simulator_goes_through_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    after = Lifecycle.after

    def watched(self: Lifecycle[State, Event], state: State, event: Event) -> State:
        if self is SLICE:
            seen[state, event] += 1
        return after(self, state, event)

    monkeypatch.setattr(Lifecycle, "after", watched)
    possible = {(state, event) for state in State for event in SLICE.table[state]}
    # Islands of the simulator do not come back smaller, nor stay away for good: see test_resources.
    elsewhere = {
        (State.BOUND, Event.MOVE),
        (State.BOUND, Event.REFUSE),
        (State.PARKED, Event.REFUSE),
    }
    for seed in range(40):  # only some lose a host that a slice has named
        for profile in ("slices", "restarts"):
            assert simulate(seed, PROFILES[profile]).violation is None
        if possible - elsewhere <= seen.keys():
            return
    pytest.fail(f"never seen: {possible - elsewhere - seen.keys()}")
