"""Tells clients the states of islands, if they watch islands (`pw.island_events`).

Theory of operation. A client that watches is told the state of every island, and then each state that changes,
in the order of the changes. These are states and not events: whatever a client has missed while it had no link
to the controller, the states that it is told at its next `WatchIslands` are those of now, and it tells itself
what has changed (`pw.client.session.island_news`). Nothing is sent to other clients.

A controller that is started again knows no islands. So the client names those that it has heard of. Each is
away until it is formed, and is given up like an island that was lost at this moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.ids import Address
from pw.core.tenants import OPERATOR
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_client

NOT_YET = "the controller was started again, and the island has not been formed since"
UNNAMED = "a call did not end on it, or its hosts could not go on together"
"""Reason for clients of other tenants than that whose call this was."""


@dataclass(eq=False)
class IslandWatches(ControlPart):
    """The states of islands, and the clients that watch them."""

    recovery_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._states: dict[str, msg.IslandState] = {}
        self._lost_s: dict[str, float] = {}
        """Time at which each island that is away left its last epoch, in seconds."""
        self._private: set[str] = set()
        """Islands that are away for a reason that may name what a client computes."""
        self._watchers: dict[int, dict[str, msg.IslandState]] = {}
        """By client: states of islands that only the client has heard of."""
        self._timers: set[tuple[int, msg.IslandState]] = set()
        """Clients, and the states of which each is told when an island has not come back in time."""

    @handles_client(msg.WatchIslands)
    def _watch(self, client: Client, message: msg.WatchIslands) -> None:
        if not message.is_on:
            self._watchers.pop(client.number, None)
            return
        own = self._watchers[client.number] = {
            name: msg.IslandState(name, 0, False, reason=NOT_YET)
            for name in message.awaited
            if name not in self._states
        }
        states = [
            self._masked(client, self._state_for(client, state))
            for state in (*self._states.values(), *own.values())
        ]
        self._env.send(client.address, msg.IslandStates(tuple(states), is_all=True))

    @handles(msg.IslandFormed)
    def _formed(self, sender: Address, message: msg.IslandFormed) -> None:
        self._lost_s.pop(message.island, None)
        self._private.discard(message.island)
        for own in self._watchers.values():
            own.pop(message.island, None)
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
        self._lost_s[message.island] = self._env.now_s()
        if message.is_private:
            self._private.add(message.island)
        self._change(msgspec.structs.replace(former, is_ready=False, reason=message.error.message))

    def client_left(self, client: Client) -> None:
        """A client that has left watches no more."""
        self._watchers.pop(client.number, None)

    def _change(self, state: msg.IslandState) -> None:
        self._states[state.island] = state
        for number in self._watchers:
            client = self.sessions.get(number)
            assert client is not None, "the watches of a client end with it"
            self._tell(client, self._state_for(client, state))

    def _state_for(self, client: Client, state: msg.IslandState) -> msg.IslandState:
        """Return a state as a client is told it; tell the client later if the island does not come back."""
        if state.is_ready:
            return state
        now_s = self._env.now_s()
        left_s = self._lost_s.get(state.island, now_s) + self._patience_s(client) - now_s
        if left_s <= 0.0:
            return msgspec.structs.replace(state, is_given_up=True)
        timer = client.number, state
        if timer not in self._timers and left_s < math.inf:
            self._timers.add(timer)
            self._env.call_later(left_s, partial(self.give_up, *timer))
        return state

    def _patience_s(self, client: Client) -> float:
        """Return for how long what a client has on a lost island waits for the island, in seconds."""
        return self.recovery_s if client.recovery_s is None else client.recovery_s

    def give_up(self, number: int, state: msg.IslandState) -> None:
        """Tell a client of an island that has not come back."""
        self._timers.discard((number, state))
        own, client = self._watchers.get(number), self.sessions.get(number)
        if own is None or client is None:
            return
        if self._states.get(state.island, own.get(state.island)) == state:
            self._tell(client, msgspec.structs.replace(state, is_given_up=True))

    def _masked(self, client: Client, state: msg.IslandState) -> msg.IslandState:
        """Return a state whose reason names no other tenant's work."""
        if state.is_ready or state.island not in self._private or client.tenant == OPERATOR:
            return state
        return msgspec.structs.replace(state, reason=UNNAMED)

    def _tell(self, client: Client, state: msg.IslandState) -> None:
        self._env.send(client.address, msg.IslandStates((self._masked(client, state),)))
