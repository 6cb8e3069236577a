"""The lifecycle of an edge at both of its ends, as tables."""

from __future__ import annotations

import pytest

from pw.core.actors.lifecycle import ImpossibleTransition
from pw.devices.host.edge_states import (
    RECEIVER,
    SENDER,
    ReceiveEvent,
    Receiving,
    SendEvent,
    Sending,
)

W, G, R, P, T, E = Sending
CREDIT, DECLINED, VALUE, INLINE, FAILED, SENT, DROPPED = SendEvent


@pytest.mark.parametrize(
    ("begins", "events", "ends"),
    [
        (W, [CREDIT, VALUE, SENT], [G, T, E]),
        (W, [VALUE, CREDIT, SENT], [R, T, E]),
        (W, [FAILED, CREDIT], [P, E]),
        (W, [CREDIT, FAILED], [G, E]),
        (W, [VALUE, DECLINED], [R, E]),
        (W, [FAILED, DECLINED], [P, E]),
        (W, [DECLINED], [E]),
        (W, [INLINE, CREDIT], [P, E]),
        (W, [INLINE, DECLINED], [P, E]),
        (W, [CREDIT, INLINE], [G, E]),
        (G, [VALUE, SENT], [T, E]),
        (G, [INLINE], [E]),
        (G, [FAILED], [E]),
    ],
)
def test_a_route_at_its_sender(
    begins: Sending, events: list[SendEvent], ends: list[Sending]
) -> None:
    state, found = begins, []
    for event in events:
        state = SENDER.after(state, event)
        found.append(state)
    assert found == ends


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("delivered delivered complete", Receiving.ARRIVED),
        ("delivered failed", Receiving.POISONED),
        ("failed delivered failed complete", Receiving.ENDED),
    ],
)
def test_an_edge_at_its_receiver(events: str, state: Receiving) -> None:
    found = Receiving.ARRIVING
    for event in events.split():
        found = RECEIVER.after(found, ReceiveEvent(event))
    assert found is state


def test_a_route_can_be_dropped_until_it_has_ended() -> None:
    for state in Sending:
        if state is not Sending.ENDED:
            assert SENDER.after(state, SendEvent.DROPPED) is Sending.ENDED


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (Sending.READY, SendEvent.VALUE),
        (Sending.TOLD, SendEvent.VALUE),
        (Sending.TRANSFER, SendEvent.CREDIT),
        *((Sending.ENDED, event) for event in SendEvent),
    ],
)
def test_what_is_not_in_the_table_of_the_sender_is_impossible(
    state: Sending, event: SendEvent
) -> None:
    with pytest.raises(ImpossibleTransition):
        SENDER.after(state, event)


@pytest.mark.parametrize("state", [Receiving.ARRIVED, Receiving.ENDED])
@pytest.mark.parametrize("event", list(ReceiveEvent))
def test_an_edge_that_has_ended_at_its_receiver_stays_so(
    state: Receiving, event: ReceiveEvent
) -> None:
    with pytest.raises(ImpossibleTransition):
        RECEIVER.after(state, event)
