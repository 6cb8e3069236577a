"""The table of a run's states, and what the class that carries the state makes of it."""

from __future__ import annotations

import pytest

from pw.core.actors.lifecycle import ImpossibleTransition
from pw.core.errors import ErrorReport
from pw.sched.control.lineage import Record
from pw.sched.control.programs import RegisteredProgram
from pw.sched.control.run_states import RUN, RunInFlight, RunState, RunTransition
from tests.stages.scripted import chain, split

ERROR = ErrorReport("HostLost", "h was lost")


def run(state: RunState = RunState.IN_FLIGHT, segments: int = 1) -> RunInFlight:
    record = Record(1, RegisteredProgram(7, chain([split(1, 2)]), ()), (), ())
    return RunInFlight(1, 1, record, (), (), [], ("i",), segments, 0.0, state=state)


@pytest.mark.parametrize("state", RunState)
@pytest.mark.parametrize("event", RunTransition)
def test_a_run_does_what_the_table_says_and_nothing_else(
    state: RunState, event: RunTransition
) -> None:
    one = run(state)
    after = RUN.table[state].get(event)
    if after is None:
        with pytest.raises(ImpossibleTransition, match=f"run: {event} cannot happen when {state}"):
            one.after(event)
        assert one.state is state
    else:
        one.after(event)
        assert one.state is after


def test_a_run_ends_with_its_last_segment() -> None:
    one = run(segments=2)
    assert not one.segment_ended(None)
    assert one.segment_ended(None)
    assert one.cause is None


def test_a_run_is_spoilt_by_the_first_segment_that_lost_its_value() -> None:
    one = run(segments=3)
    assert not one.segment_ended(ERROR)
    assert not one.segment_ended(ErrorReport("HostLost", "another"))
    assert one.segment_ended(None)
    assert (one.state, one.cause) == (RunState.SPOILT, ERROR)
