"""The order of launches on a host: which epoch it is in, and which launch is next.

A scheduler numbers what it sends to a host without gaps. A host that misses a number, or that cannot
do its part of a gang, stops: it does nothing more in this epoch, and the scheduler ends the epoch.

In a large island, orders come from the scheduler and down trees (`passing.py`). An order that overtakes
others is kept until they have come; if one has not come after `MISSING_S`, it is lost.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pw.core.actors.actor import Env
from pw.core.errors import INFRASTRUCTURE, ErrorReport
from pw.core.ids import Address, scheduler_of
from pw.core.messages import TREES, FormIsland, GangBroken, LaunchGap
from pw.devices.host.work import HostRun

MISSING_S = 20.0
"""Seconds that an order may be missing; more than a silent host on its way takes to be lost."""


class LaunchOrder:
    """The epoch of a host, and its place in the order of launches."""

    def __init__(self, env: Env, tree_over: int = TREES.over) -> None:
        self._env = env
        self._tree_over = tree_over
        self.host = env.address.node
        self.epoch = 0
        """0 until the host joins an island."""
        self.expected = 0
        """The number of the next launch."""
        self.is_broken = False
        """The host does nothing more in this epoch."""
        self.scheduler: Address | None = None
        self.hosts: tuple[str, ...] = ()
        """The hosts of the island, by rank."""
        self.rank = 0
        """Rank of this host."""
        self.early: dict[int, tuple[Address, Any]] = {}
        """Orders that have overtaken others, by their numbers, with their senders."""
        self._is_waiting = False

    def join(self, place: FormIsland) -> None:
        """Begin an epoch."""
        self.epoch, self.hosts, self.rank = place.epoch, place.hosts, place.rank
        self.scheduler = scheduler_of(place.island)

    def take(self, order: Any, sender: Address) -> bool:
        """Return whether the host may follow this order now, and expect the next one.

        An order that has overtaken others is kept, and comes again (`next_early`).
        """
        sequence = order.sequence
        if order.epoch != self.epoch or self.is_broken:
            self._env.count("messages_stale")
            return False
        is_early = sequence > self.expected and sequence not in self.early
        if is_early and len(self.hosts) > self._tree_over:
            self.early[sequence] = (sender, order)
            self._wait()
            return False
        if sequence != self.expected:
            self._env.log("error", "launch gap", expected=self.expected, got=sequence)
            self.scheduler = sender
            self.stop_at_gap(self.expected, sequence)
            return False
        self.expected += 1
        self.scheduler = sender
        return True

    def next_early(self) -> tuple[Address, Any] | None:
        """Return the next order and its sender, if it was kept and its turn has come."""
        return self.early.pop(self.expected, None)

    def _wait(self) -> None:
        """Look later whether what is missing now has come."""
        if not self._is_waiting:
            self._is_waiting = True
            self._env.call_later(MISSING_S, partial(self.look_for_gap, self.expected))

    def look_for_gap(self, expected: int) -> None:
        """Stop if an order has come early, and the one that was expected then has still not come."""
        self._is_waiting = False
        if not self.early or self.is_broken:
            return
        if self.expected == expected:
            self._env.log("error", "an order is missing", expected=expected)
            self.stop_at_gap(expected, min(self.early))
        else:
            self._wait()

    def stop_at_gap(self, expected: int, got: int) -> None:
        """Stop, because a launch is missing."""
        self.is_broken = True
        self.early.clear()
        if self.scheduler is not None:
            self._env.send(self.scheduler, LaunchGap(self.epoch, expected, got))

    def link_lost(self, node: str) -> None:
        """Stop, because orders for another host may be lost."""
        self.is_broken = True
        self.early.clear()
        reason = f"its link to host {node}, to which it passes launches on, was lost"
        self._env.log("error", "gang broken", reason=reason)
        if self.scheduler is not None:
            self._env.send(self.scheduler, GangBroken(self.epoch, reason))

    def break_gang(self, run: HostRun, error: ErrorReport) -> None:
        """Stop, because other hosts of the gang may have a value that failed here."""
        if self.is_broken:
            return
        self.is_broken = True
        name = run.program.body.name
        reason = f"an input of {name!r} was lost on host {self.host}: {error.message}"
        broken = GangBroken(self.epoch, reason, run.run)
        if error.kind not in INFRASTRUCTURE:
            reason = f"{name!r} failed on host {self.host}, and perhaps only there: {error.message}"
            broken = GangBroken(self.epoch, reason, run.run, error, run.results)
        self._env.log("error", "gang broken", reason=broken.reason)
        if self.scheduler is not None:
            self._env.send(self.scheduler, broken)
