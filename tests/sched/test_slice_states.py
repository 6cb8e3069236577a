"""The states of a slice: the table, and that the simulator goes through it."""

from __future__ import annotations

from collections import Counter

import pytest

from pw.core.actors.lifecycle import ImpossibleTransition, Lifecycle
from pw.core.messages import AllocateSlice
from pw.sched.cluster.slice_states import SLICE, BoundSlice, SliceEvent, SliceState
from pw.testing.sim.profiles import PROFILES
from pw.testing.sim.runner import simulate

FINAL = {SliceState.REFUSED, SliceState.RELEASED}


def test_the_table_is_whole() -> None:
    assert set(SLICE.table) == set(SliceState)
    assert {state for state in SliceState if not SLICE.table[state]} == FINAL


@pytest.mark.parametrize("state", sorted(SliceState))
def test_what_can_happen_in_each_state(state: SliceState) -> None:
    allowed = {
        SliceEvent.PARK: {SliceState.REQUESTED, SliceState.PARKED, SliceState.BOUND},
        SliceEvent.BIND: {SliceState.REQUESTED, SliceState.PARKED},
        SliceEvent.REBIND: {SliceState.BOUND},
        SliceEvent.MOVE: {SliceState.BOUND},
        SliceEvent.REFUSE: {SliceState.REQUESTED, SliceState.PARKED, SliceState.BOUND},
        SliceEvent.RELEASE: {SliceState.PARKED, SliceState.BOUND},
    }
    for event in SliceEvent:
        if state in allowed[event]:
            assert SLICE.after(state, event)
        else:
            with pytest.raises(ImpossibleTransition, match="slice"):
                SLICE.after(state, event)


def test_a_slice_keeps_its_positions_until_it_moves() -> None:
    piece = BoundSlice(AllocateSlice(1, 2, None, None, None))
    piece.bound(SliceEvent.BIND, "a", ((0, 0), (0, 1)))
    piece.bound(SliceEvent.REBIND, "a", piece.positions)
    assert (piece.state, piece.island, piece.positions) == (SliceState.BOUND, "a", ((0, 0), (0, 1)))
    piece.bound(SliceEvent.MOVE, "b", ((1, 0), (1, 1)))
    assert (piece.island, piece.positions) == ("b", ((1, 0), (1, 1)))


def test_the_simulator_goes_through_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    after = Lifecycle.after

    def watched(
        self: Lifecycle[SliceState, SliceEvent], state: SliceState, event: SliceEvent
    ) -> SliceState:
        if self is SLICE:
            seen[state, event] += 1
        return after(self, state, event)

    monkeypatch.setattr(Lifecycle, "after", watched)
    possible = {(state, event) for state in SliceState for event in SLICE.table[state]}
    # Islands of the simulator do not come back smaller, nor stay away for good: see test_resources.
    elsewhere = {
        (SliceState.BOUND, SliceEvent.MOVE),
        (SliceState.BOUND, SliceEvent.REFUSE),
        (SliceState.PARKED, SliceEvent.REFUSE),
    }
    remembered = [("slices", 17)]  # only some seeds lose a host that a slice has named
    others = [(profile, seed) for seed in range(40) for profile in ("slices", "restarts")]
    for profile, seed in (*remembered, *others):
        assert simulate(seed, PROFILES[profile]).violation is None
        if possible - elsewhere <= seen.keys():
            return
    pytest.fail(f"never seen: {possible - elsewhere - seen.keys()}")
