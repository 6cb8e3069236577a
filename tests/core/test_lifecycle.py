"""Transition tables, and actors that are composed of parts."""

from __future__ import annotations

from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest

from pw.core.actors.actor import Actor, Part, handles
from pw.core.actors.lifecycle import ImpossibleTransition, Lifecycle
from pw.core.ids import Address


class State(StrEnum):
    OPEN = "open"
    SHUT = "shut"


class Event(StrEnum):
    CLOSE = "close"


DOOR = Lifecycle("door", {State.OPEN: {Event.CLOSE: State.SHUT}, State.SHUT: {}})


def test_an_event_leads_to_the_next_state() -> None:
    assert DOOR.after(State.OPEN, Event.CLOSE) is State.SHUT


def test_an_event_that_cannot_happen_names_the_thing_the_event_and_the_state() -> None:
    with pytest.raises(ImpossibleTransition, match="door: close cannot happen when shut"):
        DOOR.after(State.SHUT, Event.CLOSE)


def test_every_state_has_a_row() -> None:
    with pytest.raises(ValueError, match="the table of door has no row for shut"):
        Lifecycle("door", {State.OPEN: {Event.CLOSE: State.SHUT}})


def test_a_table_is_printed_row_by_row() -> None:
    assert str(DOOR).splitlines()[2:] == ["| open | close | shut |", "| shut | | (final) |"]


class Heard(Part):
    def __init__(self, name: str, heard: list[tuple[str, object]]) -> None:
        self._name, self._heard = name, heard

    @handles(int)
    def _number(self, sender: Address, message: int) -> None:
        self._heard.append((self._name, message))


class Words(Heard):
    @handles(str)
    def _word(self, sender: Address, message: str) -> None:
        self._heard.append((self._name, message))


def test_parts_handle_their_messages_in_the_order_in_which_they_were_added() -> None:
    heard: list[tuple[str, object]] = []

    class Whole(Actor):
        @handles(bytes)
        def _bytes(self, sender: Address, message: bytes) -> None:
            heard.append(("whole", message))

    env: Any = SimpleNamespace(address=Address("n", "a"))
    whole = Whole(env)
    whole.compose(Heard("first", heard), Words("second", heard))
    for message in (1, "a", b"b"):
        whole.receive(Address("n", "a"), message)
    assert heard == [("first", 1), ("second", 1), ("second", "a"), ("whole", b"b")]


def test_parts_handle_a_message_in_the_order_that_is_stated() -> None:
    heard: list[tuple[str, object]] = []
    env: Any = SimpleNamespace(address=Address("n", "a"))
    whole = Actor(env)
    whole.compose(
        Heard("second", heard), Words("first", heard), Heard("third", heard), order={int: (Words,)}
    )
    whole.receive(Address("n", "a"), 1)
    assert heard == [("first", 1), ("second", 1), ("third", 1)]
    with pytest.raises(ValueError, match="do not handle str"):
        Actor(env).compose(Heard("first", heard), order={str: (Words,)})
