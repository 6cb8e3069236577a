"""Users that only watch islands (`pw.sched.control.watches`), and what they have heard.

A watcher keeps what the changes say, as a script would, and nothing else. It looks away now and then, and
its session begins again when it ends, also after the last fault. `Watches` checks each change against that,
and in the end that each watcher has the islands and epochs of the controller.
"""

from __future__ import annotations

from typing import Any

from pw.client.session.island_news import IslandChange
from pw.client.session.thread_messages import FollowIslands
from pw.core.messages import Attached, IslandState
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.life import Life
from pw.testing.sim.world import Violation

HEARD_S = 100.0
"""Seconds after the last fault in which a watcher has heard of all; longer than a lost link is not noticed."""
FIRST = 1000
"""Number of the first watcher: users of the workload have smaller ones."""


class Watcher(Life):
    """A user that watches islands."""

    def __init__(self, cluster: SimCluster, number: int) -> None:
        self.heard: dict[str, IslandState] = {}
        """State of each island, by what the changes said."""
        self.looks_away = True
        """False while it must hear of all by the changes alone: to look away and back tells it everything."""
        super().__init__(cluster, FIRST + number, runs=1)

    def live(self) -> None:
        """Begin a session."""
        super().live()
        self.heard.clear()
        self.session.islands.on_change = self._changed

    def _on_attached(self, answer: Attached | None, error: BaseException | None) -> None:
        if answer is None:
            self._cut_off(error)
            return
        self.attached = answer
        self._watch()
        self.act(self.lives)

    def _watch(self) -> None:
        self.heard.clear()
        self._post(FollowIslands(is_on=True))

    def act(self, life: int) -> None:
        """Look away now and then; come again when the session has ended."""
        if life != self.lives or not self.node.alive or self.closing:
            return
        if self.session.closed is not None:
            self._cut_off(self.session.closed)
            return
        if self.looks_away and self.random.random() < 0.1:
            self.heard.clear()
            self._post(FollowIslands(is_on=False))
            self._watch()
        self.world.after(self.random.uniform(0.1, 2.0), self.act, life)

    def _again(self) -> None:
        """Begin another session, however many there were, until the user leaves."""
        self.open.clear()
        if self.final:
            self.finished = True
        else:
            self.world.after(self.random.uniform(0.01, 2.0), self.live)

    def _changed(self, change: IslandChange) -> None:
        what, state, is_present = change
        former = self.heard.get(state.island)
        self.heard[state.island] = state
        self.world.checked["watches"] += 1
        was_ready = former is not None and former.is_ready
        is_right = {
            "joined": former is None and state.is_ready,
            "left": (was_ready or former is None) and not state.is_ready,
            "returned": former is not None and state.is_ready and former != state,
            "given_up": (former is None or not former.is_given_up) and state.is_given_up,
        }[what]
        if not is_right or (is_present and former is not None):
            raise Violation("watches", f"{self.name} heard {change} after {former}")
        if not state.is_ready and not state.reason:
            raise Violation("watches", f"{self.name} heard no reason: {change}")

    def missed(self) -> str:
        """Return what it has not heard; empty if it has heard of all."""
        islands = self.cluster.status()
        ready = {one.name: one.formed for one in islands if one.state == "ready"}
        heard = {name: state.epoch for name, state in self.heard.items() if state.is_ready}
        away = [one.name for one in islands if one.state != "ready" and one.formed]
        session = self.session
        if self.attached is None or session.closed is not None or not session.link.is_open:
            return f"{self.name} is not attached"
        waiting = [n for n in away if n not in self.heard or not self.heard[n].is_given_up]
        if ready == heard and not waiting:
            return ""
        return f"{self.name} heard of {heard}, and no end of {waiting}; ready are {ready}"


class Watches:
    """The watchers of a run."""

    def __init__(self, cluster: SimCluster) -> None:
        count = cluster.world.profile.watchers
        self._world = cluster.world
        self.watchers = [Watcher(cluster, number) for number in range(count)]

    def check(self, budget: int) -> None:
        """Raise Violation if a watcher does not hear of all islands; then have all of them leave."""
        for one in self.watchers:
            one.looks_away = False
        heard_all: Any = lambda: not any(one.missed() for one in self.watchers)  # noqa: E731
        if not self._world.run(self._world.now_s + HEARD_S, budget, heard_all):
            raise Violation("watches", "; ".join(filter(None, (w.missed() for w in self.watchers))))
        for one in self.watchers:
            one.final = True
            one.leave()
