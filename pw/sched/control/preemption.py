"""Has clients of tenants that may be preempted leave their devices for work of a higher priority.

A slice that is refused because others have its devices waits, if one of them belongs to a client of lower
priority whose tenant is `preemptible`. When it has waited for `preempt_s`, that client is suspended, and asks
for its devices again at once: it gets some when the other gives them back, or elsewhere. One client leaves at a
time, once for each slice: first the one of the lowest priority, and of equal ones the one that came last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.ids import Address
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart
from pw.sched.control.slices import SliceRequests
from pw.sched.control.suspensions import Suspensions

AGAIN_S = 1.0
"""Seconds until the next client is suspended for the same slice."""


@dataclass(eq=False)
class Preemption(ControlPart):
    """Suspends clients for others."""

    slices: SliceRequests
    suspensions: Suspensions
    island_status: Callable[[], tuple[msg.IslandInfo, ...]]
    preempt_s: float = math.inf
    """Seconds for which a slice waits before another client leaves its devices for it."""
    _waiting: dict[int, set[int]] = field(default_factory=dict, init=False)
    """Slices that wait for others to leave, with the numbers of the clients that have left for them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slices.may_wait = self._may_wait

    def _may_wait(self, client: Client, request: msg.AllocateSlice) -> bool:
        """Whether a slice that would be refused waits until another client has left its devices."""
        if self.preempt_s == math.inf or next(self._victims(client, request), None) is None:
            return False
        if request.slice not in self._waiting:
            self._waiting[request.slice] = set()
            self._env.call_later(self.preempt_s, partial(self._preempt, request.slice))
        return True

    def _victims(self, client: Client, request: msg.AllocateSlice) -> Iterator[Client]:
        """Yield the clients that may be suspended for a slice."""
        _, priority = self.sessions.weight_of(client)
        islands = {
            island.name
            for island in self.island_status()
            if request.island in (None, island.name) and island.devices >= request.devices
        }
        for other in self.sessions.calling:
            rights = self.sessions.usage.rights.of(other.tenant)
            if (
                rights.preemptible
                and other.number not in self._waiting.get(request.slice, ())
                and other.suspension is None
                and self.sessions.weight_of(other)[1] < priority
                and not islands.isdisjoint(self.suspensions.islands_of(other))
            ):
                yield other

    def _preempt(self, number: int) -> None:
        client = self.sessions.owner(number)
        if client is None or number not in client.slices.owned or number in self._islands.bindings:
            self._waiting.pop(number, None)
            return
        self._env.call_later(AGAIN_S, partial(self._preempt, number))
        if self.suspensions.leaving or client.suspension is not None:
            return
        victims = list(self._victims(client, client.slices.requests[number]))
        if victims:
            victim = min(victims, key=lambda one: (self.sessions.weight_of(one)[1], -one.number))
            by = f"client {client.number} ({client.name}) of a higher priority"
            self._env.audit("preempt", client=victim.number, of=victim.tenant, by=client.number)
            self._waiting[number].add(victim.number)
            self.suspensions.suspend(victim, by)
            assert victim.suspension is not None, "it has devices to leave"
            victim.suspension.goes_on = True

    @handles(msg.SliceBound)
    def _bound(self, sender: Address, message: msg.SliceBound) -> None:
        self._waiting.pop(message.slice, None)
