"""Tells clients the states of islands, if they watch islands (`pw.island_events`).

Theory of operation. A client that watches is told the state of every island, and then each state that changes,
in the order of the changes. These are states and not events: whatever a client has missed while it had no link
to the controller, the states that it is told at its next `WatchIslands` are those of now, and it tells itself
what has changed (`pw.client.session.island_news`). Nothing is sent to other clients.

A controller that is started again knows no islands. So the client names those that it has heard of. Each is
away until it is formed, and is given up like an island that was lost at this moment. A client has one timer,
for the island that it is to be told next as given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import Timer, handles
from pw.core.ids import Address
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_client

NOT_YET = "the controller was started again, and the island has not been formed since"


@dataclass(slots=True, eq=False)
class _Watch:
    """A client that watches islands."""

    client: Client
    unformed_s: dict[str, float] = field(default_factory=dict)
    """Islands that only the client has heard of, with the time at which it named them first, in seconds."""
    given_up_s: dict[str, float] = field(default_factory=dict)
    """Islands that are away, with the time at which the client hears that they are given up, in seconds."""
    timer: Timer | None = None
    due_s: float = math.inf
    """Time at which the timer ends, in seconds."""

    def stop(self) -> None:
        """Cancel the timer."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.due_s = None, math.inf


@dataclass(eq=False)
class IslandWatches(ControlPart):
    """The states of islands, and the clients that watch them."""

    recovery_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._states: dict[str, msg.IslandState] = {}
        self._ends: dict[str, tuple[float, msg.EpochEnded]] = {}
        """End of the last epoch of each island that is away, with its time in seconds."""
        self.watches: dict[int, _Watch] = {}
        """Watches by client."""

    @handles_client(msg.WatchIslands)
    def _watch(self, client: Client, message: msg.WatchIslands) -> None:
        if not message.is_on:
            self.client_left(client)
            return
        watch = self.watches.setdefault(client.number, _Watch(client))
        named_s, watch.unformed_s = watch.unformed_s, {}
        watch.given_up_s.clear()
        for name in message.awaited:
            if name not in self._states:
                watch.unformed_s[name] = named_s.get(name, self._env.now_s())
        states = tuple([self._state_for(watch, state) for state in self._all(watch)])
        self._set_timer(watch)
        self._env.send(client.address, msg.IslandStates(states, is_all=True))

    @handles(msg.IslandFormed)
    def _formed(self, sender: Address, message: msg.IslandFormed) -> None:
        self._ends.pop(message.island, None)
        for watch in self.watches.values():
            watch.unformed_s.pop(message.island, None)
            watch.given_up_s.pop(message.island, None)
        self._change(
            msg.IslandState(
                message.island,
                message.epoch,
                is_ready=True,
                hosts=message.hosts,
                devices=message.devices,
            )
        )

    @handles(msg.EpochEnded)
    def _lost(self, sender: Address, message: msg.EpochEnded) -> None:
        former = self._states.get(message.island)
        if former is None or former.epoch != message.epoch:
            former = msg.IslandState(message.island, message.epoch, is_ready=False)
        self._ends[message.island] = self._env.now_s(), message
        self._change(msgspec.structs.replace(former, is_ready=False))

    def client_left(self, client: Client) -> None:
        """A client that has left watches no more."""
        watch = self.watches.pop(client.number, None)
        if watch is not None:
            watch.stop()

    def _change(self, state: msg.IslandState) -> None:
        self._states[state.island] = state
        for watch in self.watches.values():
            self._tell(watch, self._state_for(watch, state))
            self._set_timer(watch)

    def _all(self, watch: _Watch) -> Iterator[msg.IslandState]:
        """Yield the states of all islands, and of those that only the client has heard of."""
        yield from self._states.values()
        for name in watch.unformed_s:
            yield msg.IslandState(name, 0, is_ready=False, reason=NOT_YET)

    def _state_for(self, watch: _Watch, state: msg.IslandState) -> msg.IslandState:
        """Return a state as a client is told it, and plan when it is told that the island is given up."""
        if state.is_ready:
            return state
        client, name = watch.client, state.island
        if name in watch.unformed_s:
            away_s = watch.unformed_s[name]
        else:
            away_s, ended = self._ends[name]
            error = self.sessions.error_for(client, ended)
            state = msgspec.structs.replace(state, reason=error.message)
        patience_s = self.recovery_s if client.recovery_s is None else client.recovery_s
        watch.given_up_s[name] = away_s + patience_s
        if watch.given_up_s[name] > self._env.now_s():
            return state
        del watch.given_up_s[name]
        return msgspec.structs.replace(state, is_given_up=True)

    def _set_timer(self, watch: _Watch) -> None:
        """Have the timer end when the next island is to be given up."""
        due_s = min(watch.given_up_s.values(), default=math.inf)
        if due_s < watch.due_s:
            watch.stop()
            watch.due_s = due_s
            tell = partial(self.tell_given_up, watch)
            watch.timer = self._env.call_later(due_s - self._env.now_s(), tell)

    def tell_given_up(self, watch: _Watch) -> None:
        """Tell a client of the islands that have not come back by now."""
        due_s = watch.due_s
        watch.timer, watch.due_s = None, math.inf
        for state in list(self._all(watch)):
            if watch.given_up_s.get(state.island, math.inf) <= due_s:
                state = self._state_for(watch, state)
                watch.given_up_s.pop(state.island, None)
                self._tell(watch, msgspec.structs.replace(state, is_given_up=True))
        self._set_timer(watch)

    def _tell(self, watch: _Watch, state: msg.IslandState) -> None:
        self._env.send(watch.client.address, msg.IslandStates((state,)))
