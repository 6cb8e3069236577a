"""The table of an array's states, and what the class that carries the state makes of it."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from pw.core.actors.lifecycle import ImpossibleTransition, Lifecycle
from pw.core.errors import ErrorReport
from pw.sched.control.array_states import (
    ARRAY,
    NOWHERE,
    ArrayEntry,
    ArrayEvent,
    ArrayState,
    ArrayTable,
)
from pw.sched.control.run_states import RunState
from pw.testing.sim import PROFILES, simulate

ERROR = ErrorReport("HostLost", "h was lost")
LATER = ErrorReport("HostLost", "i was lost")


def array(state: ArrayState, *awaited: str) -> ArrayEntry:
    return ArrayEntry(NOWHERE, "i", ("h", "i"), state, frozenset(awaited))


@pytest.mark.parametrize("state", ArrayState)
@pytest.mark.parametrize("event", ArrayEvent)
def test_an_array_does_what_the_table_says_and_nothing_else(
    state: ArrayState, event: ArrayEvent
) -> None:
    happens = {
        ArrayEvent.ARRIVE: lambda one: one.arrive(),
        ArrayEvent.LOSE: lambda one: one.lose(ERROR),
        ArrayEvent.BRING: lambda one: one.bring("i", ("h",)),
        ArrayEvent.REPLAY: lambda one: one.replay("i", ("h",)),
        ArrayEvent.FAIL: lambda one: one.fail(ERROR),
        ArrayEvent.DELETE: lambda one: one.delete(),
    }
    one = array(state)
    after = ARRAY.table[state].get(event)
    if after is None:
        with pytest.raises(
            ImpossibleTransition, match=f"array: {event} cannot happen when {state}"
        ):
            happens[event](one)
        assert one.state is state
    else:
        happens[event](one)
        assert one.state is after


def test_every_state_can_be_left_and_leads_to_the_end() -> None:
    for state in ArrayState:
        seen, front = set(), {state}
        while front:
            seen |= front
            front = {after for one in front for after in ARRAY.table[one].values()} - seen
        assert ArrayState.DELETED in seen


def test_only_a_failed_array_carries_its_cause_as_an_error() -> None:
    one = array(ArrayState.PRESENT)
    one.lose(ERROR)
    one.lose(LATER)
    assert (one.error, one.cause) == (None, ERROR), "the first cause stays"
    one.bring("j", ("j",))
    assert (one.cause, one.awaited) == (None, {"j"})
    one.fail(LATER)
    assert one.error is LATER


def test_a_failed_array_does_not_wait_for_lost_hosts() -> None:
    arrays = ArrayTable()
    arrays.add(1, array(ArrayState.ARRIVING, "h", "i"))
    arrays.fail((1,), ERROR)
    arrays.lose(1, LATER, island=True)
    one = arrays.held[1]
    assert (one.state, one.error, one.awaited) == (ArrayState.FAILED, ERROR, frozenset())
    assert not arrays.lost


def test_the_history_of_an_array_can_be_printed() -> None:
    one = array(ArrayState.PRESENT)
    one.lose(ERROR)
    one.bring("i", ("h",))
    one.report("h")
    one.arrive()
    assert one.history == "present, lost, arriving, present"


def test_a_client_holds_an_array_until_it_is_taken() -> None:
    arrays = ArrayTable()
    arrays.add(1, array(ArrayState.PRESENT))
    arrays.add(2, array(ArrayState.ARRIVING, "h"))
    assert arrays.take(1) is not None
    assert arrays.find(1) is None
    discarded = arrays.take(2)
    assert discarded is not None
    assert discarded is arrays.find(2)
    assert arrays.get(2) is None
    discarded.report("h")
    assert arrays.arrive(2, discarded)
    assert arrays.find(2) is None


def test_lost_arrays_are_known_until_they_are_brought_back_or_fail() -> None:
    arrays = ArrayTable()
    for number in (1, 2, 3):
        arrays.add(number, array(ArrayState.PRESENT))
    for number in (3, 1, 2):
        arrays.lose(number, ERROR)
    assert [*arrays.lost] == [3, 1, 2], "in the order in which they were lost"
    arrays.bring(1, "i", ("h",))
    arrays.replay(2, "i", ("h",))
    assert arrays.fail((3,), LATER) == (3,)
    assert not arrays.lost
    assert arrays.fail((3, 4, 5), LATER) == ()


def test_the_simulator_goes_through_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    after = Lifecycle.after

    def watched(self: Lifecycle[Any, Any], state: Any, event: Any) -> Any:
        seen[self.name, state] += 1
        seen[self.name, after(self, state, event)] += 1
        return after(self, state, event)

    def missing() -> list[Any]:
        return [
            (name, state)
            for name, states in (("array", ArrayState), ("run", RunState))
            for state in states
            if not seen[name, state]
        ]

    monkeypatch.setattr(Lifecycle, "after", watched)
    for seed, profile in product(range(40), ("chaos", "slices", "crashes")):
        if missing():
            assert simulate(seed, PROFILES[profile]).violation is None
    assert not missing()
