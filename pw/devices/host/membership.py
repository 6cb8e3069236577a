"""A host's place in an island: it registers, joins an epoch, and leaves when the epoch is over.

One incarnation of a host is in at most one epoch, because JAX may hang when a process joins a
second group. A host that leaves an epoch ends, and comes back as a new process. It leaves to the
next incarnation the values that are ready on its devices and the replicas in its memory. The next
incarnation announces these first, whether or not there is a place for the host itself.

Without a controller a host goes on with the launches that it has, and answers clients, while it
looks for another controller. That one does not know the epoch and ends it. As the hosts are well,
they get a moment to end their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ConnectionFailed, ErrorReport
from pw.core.ids import RESOURCES, Address
from pw.core.messages.checks import beyond_bounds
from pw.core.waits import REDIAL_S
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.interpreter import Interpreter
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.replica_memory import Replica
from pw.devices.host.store import ObjectStore

ENDING_S = 2.0
"""Seconds that launches may take to end when another controller has come."""
LOOK_S = 0.02
"""Time between two looks whether all launches are enqueued."""


class HostProcess(Protocol):
    """What the process around a host's actors does for them."""

    def join(
        self,
        form: msg.FormIsland,
        joined: Callable[[msg.IslandJoined | msg.IslandJoinFailed], None],
    ) -> None:
        """Join the epoch's group; `joined` is called on the loop thread."""

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End this incarnation; with an error, for good."""

    def keep(self, replicas: Sequence[Replica], kept: Callable[[ErrorReport | None], None]) -> None:
        """Keep these for the next incarnation, in place of earlier ones; they survive a crash.

        Returns at once. `kept` is called on the loop thread, perhaps before this returns: with None
        when the next incarnation will find them, with an error when it will find the earlier ones.
        This is not called again before `kept`.
        """

    def hand_over(self, replicas: Iterable[Replica]) -> None:
        """At the end of this incarnation, keep these in place of earlier ones."""

    def finish(self, reason: str) -> None:
        """End for good, without an error."""


@dataclass(eq=False, repr=False)
class Membership(Part):
    """Registers a host, joins an epoch and leaves it."""

    env: Env
    order: LaunchOrder
    registration: msg.RegisterHost
    process: HostProcess
    store: ObjectStore
    coordinator: ShardCoordinator
    interpreter: Interpreter
    reconnect_s: float
    _place: msg.FormIsland | None = None
    _leaving: bool = False
    _is_to_end: bool = False
    """True if this host has asked to be emptied."""
    _is_known: bool = False
    """True if a controller has spoken to this host."""
    _lost_s: float | None = None
    """Time of the clock, in seconds, at which the controller was lost; None while there is one."""
    _is_calling: bool = False
    """True if this host has called a controller, and the call is not lost."""

    def register(self) -> None:
        """Announce the replicas that are kept here, and ask for a place in the island."""
        place, registration = self._place, self.registration
        if place is None:
            self.store.replicas.memory.announce()
        else:
            registration = msgspec.structs.replace(
                registration,
                island=place.island,
                island_hosts=len(place.hosts),
                epoch=place.epoch,
                members=place.hosts,
            )
        if (error := beyond_bounds(registration)) is None:
            self.env.send(RESOURCES, registration)
        else:
            self.env.send(self.env.address, msg.HostRejected(error))

    def ask_to_leave(self) -> None:
        """Have all work and data moved off this host, which ends then."""
        self._is_to_end = True
        if self._lost_s is None:
            self.env.send(RESOURCES, msg.AskToLeave())
        else:
            self._end_without_controller()

    def _end_without_controller(self) -> None:
        self._leaving = self.order.is_broken = True
        self.process.hand_over(self.store.save())
        self.process.finish("told to end, and there is no controller")

    @handles(msg.HostRejected)
    def _rejected(self, sender: Address, message: msg.HostRejected) -> None:
        self.process.stop("rejected", message.error)

    @handles(msg.PeerRefused)
    def _refused(self, sender: Address, message: msg.PeerRefused) -> None:
        if message.node == RESOURCES.node:
            self.process.stop("refused by the controller", message.error)

    @handles(msg.FormIsland)
    def _form(self, sender: Address, message: msg.FormIsland) -> None:
        if self.order.epoch:
            self._begin_again(f"asked to join {message.island} once more")
            return
        self.order.join(message)
        self._place = message
        self._heard()
        local_devices = self.registration.local_devices
        self.store.joins(
            message.island,
            message.epoch,
            message.tickets,
            len(message.hosts) * local_devices,
            local_devices,
        )

        def joined(answer: msg.IslandJoined | msg.IslandJoinFailed) -> None:
            if self._leaving:
                return
            event = "could not join" if isinstance(answer, msg.IslandJoinFailed) else "joined"
            place = f"{message.rank + 1}/{len(message.hosts)}"
            self.env.log("info", event, island=message.island, epoch=message.epoch, host=place)
            self.env.send(RESOURCES, answer)

        self.process.join(message, joined)

    @handles(msg.Directory)
    def _directory(self, sender: Address, message: msg.Directory) -> None:
        if sender.node != RESOURCES.node:
            self.env.count("messages_refused")
            return
        host = self.order.host
        for peer in message.peers:
            if peer.node != host:
                self.env.introduce(peer.node, peer.endpoint)
        self.coordinator.hosts_are(frozenset(p.node for p in message.peers if p.member))
        self.store.replicas.hosts_are(frozenset(p.node for p in message.peers))

    @handles(msg.HostRegistered)
    def _registered(self, sender: Address, message: msg.HostRegistered) -> None:
        self.store.replicas.registered(message.key)
        self.store.health.announce()
        if not self.order.epoch and (self._lost_s is None or self._is_calling):
            self._heard()  # only an answer proves that the controller has heard of the loss

    @handles(msg.LeaveIsland)
    def _leave(self, sender: Address, message: msg.LeaveIsland) -> None:
        if message.epoch != self.order.epoch:
            return
        reason = f"island {message.island} is formed anew: {message.reason}"
        if self._lost_s is None:
            self._begin_again(reason)
        else:
            self._heard()
            self._look_whether_ended(reason, self.env.now_s() + ENDING_S)

    def _look_whether_ended(self, reason: str, until_s: float) -> None:
        """Leave if all launches have ended, or it is `until_s`."""
        left_s, leave = until_s - self.env.now_s(), partial(self._begin_again, reason)
        if left_s <= 0:
            leave()
        elif self.interpreter.when_ended(leave):
            self.env.call_later(left_s, leave)
        else:
            self.env.call_later(LOOK_S, partial(self._look_whether_ended, reason, until_s))

    def _begin_again(self, reason: str) -> None:
        """End this incarnation, and leave to the next one all that can be saved."""
        if self._leaving:
            return
        self._leaving = self.order.is_broken = True
        self.process.hand_over(self.store.save())
        self.process.stop(reason, None)

    @handles(msg.Leave)
    def _leave_for_good(self, sender: Address, message: msg.Leave) -> None:
        if not self._leaving:
            self._leaving = self.order.is_broken = True
            self.process.hand_over(self.store.save() if message.keeps else ())
            self.process.finish(message.reason)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        if message.node != RESOURCES.node or self._leaving:
            return
        if self._is_to_end:
            self._end_without_controller()
            return
        if not self._is_known:
            self._give_up_controller(f"the controller {message.reason}")
            return
        if self._lost_s is None:
            self._lost_s = self.env.now_s()
            self.env.log("warning", "controller lost", reason=message.reason)
            self.env.call_later(self.reconnect_s, partial(self._give_up, self._lost_s))
        self._is_calling = False
        self.env.call_later(REDIAL_S, self._redial)

    def _heard(self) -> None:
        self._is_known, self._lost_s = True, None

    def _redial(self) -> None:
        """Look for a controller again."""
        if self._lost_s is not None and not self._leaving and not self._is_calling:
            self._is_calling = True
            self.register()

    def _give_up(self, lost_s: float) -> None:
        """Stop if the controller that was lost at `lost_s` has not been replaced."""
        if self._lost_s == lost_s and not self._leaving:
            self._give_up_controller("the controller did not come back; giving up")

    def _give_up_controller(self, words: str) -> None:
        self._leaving = self.order.is_broken = True
        error = ErrorReport.of(ConnectionFailed(words))
        self.process.stop("the controller was lost", error)
