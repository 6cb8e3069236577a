"""A host's place in an island: it registers, joins an epoch's group, and leaves when the epoch is over.

One incarnation of a host is in at most one epoch. JAX cannot be trusted with a second group in a process
whose collectives may hang, so whoever leaves an epoch ends, and comes back as a new process. What it
can save it hands over: values that are ready on its devices now, and the replicas it keeps for others.
The next incarnation tells the controller what it was given before anything else, because it may
be needed, whether or not there is a place for the host itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pw.core.actor import Actor, Env, handles
from pw.core.errors import ConnectionFailed, ErrorReport
from pw.core.ids import RESOURCES, Address
from pw.core.messages import (
    Directory,
    FormIsland,
    HostRejected,
    IslandJoined,
    IslandJoinFailed,
    Leave,
    LeaveIsland,
    PeerLost,
    PeerRefused,
    RegisterHost,
)
from pw.devices.coordinator import ShardCoordinator
from pw.devices.replicas import Saved
from pw.devices.store import ObjectStore


class HostProcess(Protocol):
    """What only the process around the actors can do."""

    def join(
        self, form: FormIsland, joined: Callable[[IslandJoined | IslandJoinFailed], None]
    ) -> None:
        """Join the epoch's group; `joined` is called on the loop thread."""

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End this incarnation; with an error, for good."""

    def hand_over(self, replicas: list[Saved]) -> None:
        """Keep these for the next incarnation; `stop` follows."""

    def finish(self, reason: str) -> None:
        """End for good, because all is well: no incarnation follows."""


class HostMember(Actor):
    """What every host does, whatever runs on it."""

    def __init__(
        self,
        env: Env,
        registration: RegisterHost,
        process: HostProcess,
        store: ObjectStore,
        coordinator: ShardCoordinator,
    ) -> None:
        super().__init__(env)
        self._registration = registration
        self._process = process
        self._store = store
        self._coordinator = coordinator
        self._host = env.address.node
        self._epoch = 0
        self._broken = False
        """Nothing more of this epoch can be done here."""
        self._leaving = False

    def register(self) -> None:
        """Say what the last incarnation handed over, and ask for a place in the island."""
        self._store.replicas.announce()
        self.env.send(RESOURCES, self._registration)

    @handles(HostRejected)
    def _rejected(self, sender: Address, message: HostRejected) -> None:
        self._process.stop("rejected by the controller", message.error)

    @handles(PeerRefused)
    def _refused(self, sender: Address, message: PeerRefused) -> None:
        if message.node == RESOURCES.node:
            self._process.stop("refused by the controller", message.error)

    @handles(FormIsland)
    def _form(self, sender: Address, message: FormIsland) -> None:
        if self._epoch:
            self._begin_again(f"asked to join epoch {message.epoch} of {message.island}")
            return
        self._epoch = message.epoch
        self._store.admit_tickets_of(message.secret)

        def joined(answer: IslandJoined | IslandJoinFailed) -> None:
            if self._leaving:
                return
            told = "could not join" if isinstance(answer, IslandJoinFailed) else "joined"
            place = f"{message.rank + 1}/{len(message.hosts)}"
            self.env.log("info", told, island=message.island, epoch=message.epoch, host=place)
            self.env.send(RESOURCES, answer)

        self._process.join(message, joined)

    @handles(Directory)
    def _directory(self, sender: Address, message: Directory) -> None:
        if sender.node != RESOURCES.node:
            self.env.count("messages_refused")
            return
        for peer in message.peers:
            if peer.node != self._host:
                self.env.introduce(peer.node, peer.endpoint)
        self._coordinator.hosts_are(frozenset(p.node for p in message.peers if p.member))
        self._store.replicas.hosts_are(frozenset(peer.node for peer in message.peers))

    @handles(LeaveIsland)
    def _leave(self, sender: Address, message: LeaveIsland) -> None:
        if message.epoch == self._epoch:
            self._begin_again(f"island {message.island} is formed anew: {message.reason}")

    def _begin_again(self, reason: str) -> None:
        """End this incarnation, and leave the next one all that can be had."""
        if self._leaving:
            return
        self._leaving = self._broken = True
        self._process.hand_over(self._store.save())
        self._process.stop(reason, None)

    @handles(Leave)
    def _leave_for_good(self, sender: Address, message: Leave) -> None:
        if not self._leaving:
            self._leaving = self._broken = True
            self._process.finish(message.reason)

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        if message.node != RESOURCES.node:
            return
        error = None
        if not self._epoch:
            error = ErrorReport.of(ConnectionFailed(f"the controller {message.reason}"))
        self._process.stop(f"the controller was lost: {message.reason}", error)
