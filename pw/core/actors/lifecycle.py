"""Lifecycles as tables: the states of a thing, the events that happen to it, and the state after each.

Each lifecycle stands in one file, with its theory of operation above the table. The thing's state
is changed by its lifecycle only. An event that the table does not have in a state is a bug of the
runtime: it raises `ImpossibleTransition`, which ends an actor, and a run of the simulator with it.

Method: the connection states of h11, as one table of transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from pw.core.errors import InternalError

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


class ImpossibleTransition(InternalError):
    """An event happened to a thing in a state in which it cannot happen."""


class Lifecycle(Generic[State, Event]):
    """A transition table.

    Args:
        name: what the thing is, for errors: "array", "run".
        table: for each state, the state after each event that can happen in it; {} for a final state.

    Raises:
        ValueError: a state that an event leads to is not in the table.
    """

    def __init__(self, name: str, table: Mapping[State, Mapping[Event, State]]) -> None:
        self.name = name
        self.table = table
        missing = {after for events in table.values() for after in events.values()} - set(table)
        if missing:
            raise ValueError(f"the table of {name} has no row for {', '.join(sorted(missing))}")

    def after(self, state: State, event: Event) -> State:
        """Return the state after `event`. Raises ImpossibleTransition."""
        after = self.table[state].get(event)
        if after is None:
            raise ImpossibleTransition(f"{self.name}: {event} cannot happen when {state}")
        return after

    def __str__(self) -> str:
        """Return the table as Markdown, one transition in each row."""
        rows = ["| state | event | next state |", "|---|---|---|"]
        for state, events in self.table.items():
            rows += [f"| {state} | {event} | {after} |" for event, after in events.items()]
            rows += [] if events else [f"| {state} | | (final) |"]
        return "\n".join(rows)
