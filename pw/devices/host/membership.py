"""A host's place in an island: it registers, joins an epoch's group, and leaves when the epoch is over.

One incarnation of a host is in at most one epoch. JAX cannot be trusted with a second group in a process
whose collectives may hang, so whoever leaves an epoch ends, and comes back as a new process. What it
can save it hands over: values that are ready on its devices now, and the replicas it keeps for others.
The next incarnation tells the controller what it was given before anything else, because it may
be needed, whether or not there is a place for the host itself.

Without the controller a host goes on with what was launched, and gives clients what it has, while it looks
for another controller. That one knows nothing of the epoch and ends it; as nothing is wrong with the
hosts, what was launched may end first, for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

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
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.held import Saved
from pw.devices.host.store import ObjectStore

RECONNECT_S = 60.0
"""How long a host looks for another controller."""
REDIAL_S = 0.5
"""How often it does."""
ENDING_S = 2.0
"""How long what was launched may take to end when another controller has come."""
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class _Redial:
    """Note to oneself: a controller may be there by now."""


@dataclass(frozen=True, slots=True)
class _GiveUp:
    """Note to oneself: the controller that was lost then should have been replaced by now."""

    lost_s: float


@dataclass(frozen=True, slots=True)
class _LookWhetherEnded:
    """Note to oneself: all that was launched may be with the devices by now."""

    reason: str
    until_s: float


class HostProcess(Protocol):
    """What only the process around the actors can do."""

    def join(
        self, form: FormIsland, joined: Callable[[IslandJoined | IslandJoinFailed], None]
    ) -> None:
        """Join the epoch's group; `joined` is called on the loop thread."""

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End this incarnation; with an error, for good."""

    def keep(self, replicas: Sequence[Saved], kept: Callable[[ErrorReport | None], None]) -> None:
        """Keep these for the next incarnation, however this one ends, in place of what was kept before.

        Returns at once. `kept` is called on the loop thread, perhaps before this returns: with None when
        the next incarnation will find them, with the reason when it will not, and what was kept before
        is kept. Until then this is not called again.
        """

    def hand_over(self, replicas: Iterable[Saved]) -> None:
        """At the end of this incarnation: keep these, taken one by one, in place of what was kept before."""

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
        reconnect_s: float = RECONNECT_S,
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
        self._reconnect_s = reconnect_s
        self._place: FormIsland | None = None
        self._is_known = False
        """A controller has spoken to this host."""
        self._lost_s: float | None = None
        """When the controller was lost; None while there is one."""
        self._is_calling = False
        """Whoever may be the controller by now has been called, and has not been lost."""

    def register(self) -> None:
        """Say what the last incarnation handed over, and ask for a place in the island."""
        place, registration = self._place, self._registration
        if place is None:
            self._store.replicas.held.announce()
        else:
            registration = msgspec.structs.replace(
                registration,
                island=place.island,
                island_hosts=len(place.hosts),
                epoch=place.epoch,
                members=place.hosts,
            )
        self.env.send(RESOURCES, registration)

    def when_ended(self, act: Callable[[], None]) -> bool:
        """Call `act` when all that was launched has ended; false while not all of it is handed over."""
        act()
        return True

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
            self._begin_again(f"asked to join {message.island} once more")
            return
        self._epoch = message.epoch
        self._place = message
        self._heard()
        self._store.joins(message.island, message.epoch, message.secret)

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
        is_asked = self._lost_s is None or self._is_calling
        if not self._epoch and is_asked and any(p.node == self._host for p in message.peers):
            self._heard()  # only an answer proves that the controller has heard of the loss
        for peer in message.peers:
            if peer.node != self._host:
                self.env.introduce(peer.node, peer.endpoint)
        self._coordinator.hosts_are(frozenset(p.node for p in message.peers if p.member))
        self._store.replicas.hosts_are(frozenset(peer.node for peer in message.peers))

    @handles(LeaveIsland)
    def _leave(self, sender: Address, message: LeaveIsland) -> None:
        if message.epoch != self._epoch:
            return
        reason = f"island {message.island} is formed anew: {message.reason}"
        if self._lost_s is None:
            self._begin_again(reason)
        else:
            self._heard()
            self._look_whether_ended(
                self.env.address, _LookWhetherEnded(reason, self.env.now_s() + ENDING_S)
            )

    @handles(_LookWhetherEnded)
    def _look_whether_ended(self, sender: Address, note: _LookWhetherEnded) -> None:
        """Leave when all that was launched has ended, or has had its time."""
        if self.env.now_s() >= note.until_s:
            self._begin_again(note.reason)
        elif self.when_ended(lambda: self._begin_again(note.reason)):
            last = _LookWhetherEnded(note.reason, 0.0)
            self.env.call_later(note.until_s - self.env.now_s(), last)
        else:
            self.env.call_later(LOOK_S, note)

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

    # --- without a controller ------------------------------------------------------------------------

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        if message.node != RESOURCES.node or self._leaving:
            return
        if not self._is_known:
            self._give_up_controller(f"the controller {message.reason}")
            return
        if self._lost_s is None:
            self._lost_s = self.env.now_s()
            self.env.log("warning", "controller lost", reason=message.reason)
            self.env.call_later(self._reconnect_s, _GiveUp(self._lost_s))
        self._is_calling = False
        self.env.call_later(REDIAL_S, _Redial())

    def _heard(self) -> None:
        self._is_known, self._lost_s = True, None

    @handles(_Redial)
    def _redial(self, sender: Address, note: _Redial) -> None:
        if self._lost_s is not None and not self._leaving and not self._is_calling:
            self._is_calling = True
            self.register()

    @handles(_GiveUp)
    def _give_up(self, sender: Address, note: _GiveUp) -> None:
        if self._lost_s == note.lost_s and not self._leaving:
            self._give_up_controller("the controller did not come back; giving up")

    def _give_up_controller(self, words: str) -> None:
        self._leaving = self._broken = True
        error = ErrorReport.of(ConnectionFailed(words))
        self._process.stop("the controller was lost", error)
