"""The launch lease of a host: which client numbers launches here, and which of them have been taken.

Two senders then decide what the host does, over two links: the client with its launches, the scheduler with
all else. The order of the scheduler holds. `Lend` begins a lease and `EndLease` ends it; what the scheduler
sends in between says which leased launches come before it, and is held until they have come. A leased
launch that comes before its `Lend` waits for it.

A lease is closed when the scheduler says so, when the link to the client is lost, and when the client sends
what may not be. From then on only the scheduler adds launches, which other hosts have taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import Address, are_of, arrays_in
from pw.devices.host.clients import Clients
from pw.devices.host.installs import Installs
from pw.devices.host.launch_order import LaunchOrder

KEPT = 256
"""The newest leased launches, for hosts that lack them: a client has no more in flight."""
EARLY = 1024
"""Messages about a lease that wait for their `Lend`."""


@dataclass(slots=True, eq=False)
class HostLease:
    """One lease on this host."""

    number: int
    client: int
    programs: frozenset[int]
    taken: int
    """The index of the next launch."""
    node: str = ""
    """Where launches have come from."""
    is_open: bool = True
    recent: deque[msg.LeasedLaunch] = field(default_factory=lambda: deque(maxlen=KEPT))


@dataclass(eq=False, repr=False)
class Leases(Part):
    """The lease of one host, and what waits for leased launches."""

    env: Env
    order: LaunchOrder
    programs: Installs
    clients: Clients
    launch: Callable[[msg.Launch], None]
    """Does a launch that has been taken."""
    wait: Callable[[Address, int, int], None]
    """Answers a request of the client when an array is ready."""
    receive: Callable[[Address, Any], None]
    """Handles a message of the scheduler that was held."""
    current: HostLease | None = None
    newest: int = 0
    """The number of the newest lease."""
    _held: deque[tuple[Address, Any]] = field(default_factory=deque)
    """What the scheduler has sent, and comes after launches that have not been taken."""
    _early: list[tuple[Address, msg.LeasedLaunch | msg.CloseLease]] = field(default_factory=list)

    # --- the scheduler's order -----------------------------------------------------------------------

    def takes(self, sender: Address, message: Any, after: int = 0) -> bool:
        """Return whether an order of the scheduler is taken now.

        It is held if leased launches before index `after` are missing.
        """
        lease = self.current
        if self._held or (lease is not None and after > lease.taken):
            self._held.append((sender, message))
            return False
        return self.order.take(message, sender)

    def _go_on(self) -> None:
        """Handle what was held, as far as nothing is missing."""
        held, self._held = self._held, deque()
        while held:
            self.receive(*held.popleft())
            if self._held:  # it is held again, and all behind it
                self._held.extend(held)
                return

    @handles(msg.Lend)
    def _lend(self, sender: Address, message: msg.Lend) -> None:
        if not self.takes(sender, message):
            return
        self.newest, programs = message.lease, frozenset(message.programs)
        self.current = HostLease(message.lease, message.client, programs, message.first)
        early, self._early = self._early, []
        for one in early:
            self.receive(*one)

    def _keep(self, sender: Address, message: msg.LeasedLaunch | msg.CloseLease) -> None:
        """Keep what comes before its `Lend`."""
        if len(self._early) < EARLY:
            self._early.append((sender, message))

    @handles(msg.EndLease)
    def _ended(self, sender: Address, message: msg.EndLease) -> None:
        if self.takes(sender, message, message.taken):
            self.current = None

    # --- launches of the client ----------------------------------------------------------------------

    @handles(msg.LeasedLaunch)
    def _launched(self, sender: Address, message: msg.LeasedLaunch) -> None:
        self._take(sender, message)
        if message.request and sender != self.order.scheduler:
            self.wait(sender, message.request, message.awaited)

    def _take(self, sender: Address, message: msg.LeasedLaunch) -> None:
        if message.epoch != self.order.epoch or self.order.is_broken:
            self.env.count("messages_stale")
            return
        lease, is_clients = self.current, sender != self.order.scheduler
        if message.lease > self.newest:
            self._keep(sender, replace(message, request=0))
            return
        if lease is None or lease.number != message.lease or (is_clients and not lease.is_open):
            self.env.count("messages_stale")
            return
        if not is_clients:
            if message.index != lease.taken:
                return  # it came from the client before the lease was closed
        elif not self._may_launch(lease, sender, message):
            self.env.count("leased_launches_refused")
            self.close(lease, lease.taken)
            return
        lease.taken += 1
        lease.recent.append(message)
        given = msg.Arguments(message.args, message.results)
        for at, step in enumerate(message.steps):
            number = msg.number_of(message.index, at)
            self.launch(
                msg.Launch(
                    message.epoch,
                    number,
                    message.run,
                    message.program,
                    step.segment,
                    None if at else given,
                    step.report,
                )
            )
        if self._held:
            self._go_on()

    def _may_launch(self, lease: HostLease, sender: Address, message: msg.LeasedLaunch) -> bool:
        """Whether a client may send a launch: the next one of its lease, of its own program and arrays."""
        client = lease.client
        if self.clients.at(sender.node) != client or message.index != lease.taken:
            return False
        lease.node = sender.node
        program = self.programs.get(message.program)
        named = (message.run, *arrays_in(message.args), *message.results)
        return (
            message.program in lease.programs
            and program is not None
            and program.install == message.install
            and len(message.args) == len(program.body.inputs)
            and len(message.results) == len(program.body.outputs)
            and are_of(client, named)
        )

    # --- closing -------------------------------------------------------------------------------------

    @handles(msg.CloseLease)
    def _close_asked(self, sender: Address, message: msg.CloseLease) -> None:
        lease = self.current
        if message.epoch != self.order.epoch or self.order.is_broken:
            self.env.count("messages_stale")
        elif message.lease > self.newest:
            self._keep(sender, message)
        elif lease is not None and lease.number == message.lease:
            self.close(lease, message.noticed)

    def close(self, lease: HostLease, noticed: int) -> None:
        """Take no more launches of the client; tell the scheduler which those from `noticed` on were."""
        lease.is_open = False
        unknown = tuple(launch for launch in lease.recent if launch.index >= noticed)
        if self.order.scheduler is not None:
            closed = msg.LeaseClosed(self.order.epoch, lease.number, lease.taken, unknown)
            self.env.send(self.order.scheduler, closed)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        """The link to the client is lost, and launches with it."""
        self._early = [one for one in self._early if one[0].node != message.node]
        lease = self.current
        if lease is not None and lease.is_open and message.node == lease.node:
            self.close(lease, lease.taken)
