"""What this client has been told of islands; finds what has changed (`pw.sched.control.watches`).

The controller tells states, and this part compares each with the one before it. So a change that no message
told of, because the link to the controller was lost, is found when the states come again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from pw.client.session.thread_messages import FollowIslands
from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import CONTROL, Address

What = Literal["joined", "left", "returned", "given_up"]


class IslandChange(NamedTuple):
    """A change of an island, or its state if there is none before it."""

    what: What
    state: msg.IslandState
    is_present: bool = False
    """True if this is the first that the client hears of islands."""


class IslandNews(Part):
    """States of islands, while the client watches them.

    Args:
        env: that of the session.
        on_change: takes each change, on the session's thread; it must not block.
    """

    def __init__(self, env: Env, on_change: Callable[[IslandChange], None]) -> None:
        self._env = env
        self.on_change = on_change
        self._is_on = False
        self._is_first = True
        """True until the first answer has come."""
        self.states: dict[str, msg.IslandState] = {}
        """State of each island that the client has heard of, by name."""

    @handles(FollowIslands)
    def _on_watch(self, sender: Address, note: FollowIslands) -> None:
        self._is_on, self._is_first = note.is_on, True
        self.states.clear()
        self._env.send(CONTROL, msg.WatchIslands(note.is_on))

    def attached_again(self) -> None:
        """Have another controller tell the states."""
        if self._is_on:
            awaited = tuple(self.states)
            self._env.send(CONTROL, msg.WatchIslands(is_on=True, awaited=awaited))

    @handles(msg.IslandStates)
    def _on_states(self, sender: Address, message: msg.IslandStates) -> None:
        if not self._is_on or (self._is_first and not message.is_all):
            return
        for state in message.islands:
            former = self.states.get(state.island)
            if state.is_ready or former is None or former.epoch < state.epoch:
                self.states[state.island] = state
            else:  # a later controller does not know the hosts, nor for how long it was waited for
                is_given_up = state.is_given_up or former.is_given_up
                state = self.states[state.island] = msgspec.structs.replace(
                    former, is_ready=False, is_given_up=is_given_up, reason=state.reason
                )
            what = change(former, state)
            if what is not None:
                self.on_change(IslandChange(what, state, self._is_first))
        self._is_first = False


def change(former: msg.IslandState | None, state: msg.IslandState) -> What | None:
    """Return what has happened to an island between two states; None if nothing has."""
    if state.is_ready:
        if former is None:
            return "joined"
        is_same = former.is_ready and former.epoch == state.epoch and former.hosts == state.hosts
        return None if is_same else "returned"
    if state.is_given_up:
        return None if former is not None and former.is_given_up else "given_up"
    return "left" if former is None or former.is_ready else None
