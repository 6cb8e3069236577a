"""The lifecycle of a value: its methods make what the table says, and the first error stays."""

import itertools

import pytest

from pw.core.errors import ErrorReport
from pw.devices.host.value import LIFECYCLE, Value, ValueEvent, ValueState

ERRORS = (ErrorReport("ComputationFailed", "first", "h0"), ErrorReport("HostLost", "second", "h0"))
SEQUENCES = [s for n in range(4) for s in itertools.product(ValueEvent, repeat=n)]


@pytest.mark.parametrize("events", SEQUENCES, ids=lambda events: "-".join(events) or "nothing")
def test_a_value_is_in_the_state_of_the_table(events: tuple[ValueEvent, ...]) -> None:
    value, state, errors = Value(), ValueState.UNMADE, iter((*ERRORS, ERRORS[0]))
    for event in events:
        if event not in LIFECYCLE.table[state]:
            return
        state = LIFECYCLE.after(state, event)
        if event is ValueEvent.FILL:
            value.fill("the array")
        else:
            value.fail(next(errors))
        assert value.state is state
        assert (value.payload is not None) == (state is ValueState.MADE)
    assert value.error is (ERRORS[0] if ValueEvent.FAIL in events else None)


def test_a_value_that_is_read_is_not_donated() -> None:
    value, heir = Value(), Value()
    value.fill("the array")
    value.begin_read()
    assert not value.may_donate(heir)
    assert (value.is_given, value.heir) == (False, None)
    value.end_read()
    assert value.may_donate(heir)
    assert (value.is_given, value.heir) == (True, heir)


def test_a_shared_value_is_not_donated() -> None:
    value = Value()
    value.fill("the array")
    value.shared = True
    assert not value.may_donate(None)
