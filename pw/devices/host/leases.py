"""The launch lease of a host: which client numbers launches here, and which of them have been taken.

Two senders then decide what the host does, over two links: the client with its launches, the scheduler with
all else. The order of the scheduler holds. `Lend` begins a lease and `EndLease` ends it; what the scheduler
sends in between says which leased launches come before it, and is held until they have come. A leased
launch that comes before its `Lend` waits for it, within bounds for each client. If one is refused, the
lease is closed as soon as it has begun: so the scheduler hears of it. A launch that comes before its
`WidenLease` waits, too: it needs the memory of arrays that are dropped before that.

A lease is closed when the scheduler says so, when the link to its holder is lost, and when the holder sends
what may not be. From then on only the scheduler adds launches, which other hosts have taken. What another
client sends is dropped and counted, and the lease goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import Address, are_of, arrays_in, session_of
from pw.devices.host.clients import Clients
from pw.devices.host.installs import Installs
from pw.devices.host.launch_order import LaunchOrder

KEPT = 256
"""The newest leased launches, for hosts that lack them: a client has no more in flight."""
EARLY_BYTES = 4 << 20
"""The room that one client has for launches that come before their `Lend`."""
VALUE_BYTES = 64
"""Bytes that each value of a launch takes beside the bytes that came with it."""


@dataclass(slots=True, eq=False)
class HostLease:
    """One lease on this host."""

    number: int
    client: int
    node: str
    """The node of the client: launches come from there."""
    programs: dict[int, msg.LentProgram]
    """Programs of the lease by number, each with the steps of this host."""
    next_index: int
    """Index of the next launch under the lease."""
    room_bytes: int = 0
    """Bytes of memory that the launches may take; more after the next `WidenLease`."""
    used_bytes: int = 0
    is_open: bool = True
    behind: deque[tuple[Address, msg.LeasedLaunch]] = field(default_factory=deque)
    """Launches that need more."""
    recent: deque[msg.LeasedLaunch] = field(default_factory=lambda: deque(maxlen=KEPT))


@dataclass(slots=True, eq=False)
class _Early:
    """The launches of one client under the next lease, whose `Lend` has not come."""

    lease: int
    launches: list[msg.LeasedLaunch] = field(default_factory=list)
    size_bytes: int = 0
    is_cut: bool = False
    """True if a launch was refused, so that no later one is kept."""


@dataclass(eq=False, repr=False)
class HostLeases(Part):
    """The lease of one host, and what waits for leased launches."""

    env: Env
    order: LaunchOrder
    programs: Installs
    clients: Clients
    launch: Callable[[msg.Launch], bool]
    """Does a launch whose turn it is; returns whether its results are there."""
    answer: Callable[[Address, msg.Ready], None]
    """Answers a launch whose result is there."""
    look: Callable[[Address, msg.LeasedLaunch, bool], None]
    """Answers the question of a launch when its result is there, as it may be now."""
    receive: Callable[[Address, Any], None]
    """Handles a message of the scheduler that was held."""
    room_bytes: int = EARLY_BYTES
    """The most bytes of launches of one client that are kept before their `Lend`."""
    current: HostLease | None = None
    newest: int = 0
    """The number of the newest lease."""
    _held: deque[tuple[Address, Any]] = field(default_factory=deque)
    """Messages of the scheduler that come after leased launches which are missing, with their senders."""
    _early: dict[str, _Early] = field(default_factory=dict)
    """Launches that came before their `Lend`, by the node of their client."""
    _early_close: tuple[Address, msg.CloseLease] | None = None
    """The end of the next lease: a host is lent again only after it has answered the last one."""

    # --- the scheduler's order -----------------------------------------------------------------------

    def takes(self, sender: Address, message: Any, after: int = 0) -> bool:
        """Return whether an order of the scheduler is taken now.

        It is held if leased launches before index `after` are missing.
        """
        lease = self.current
        if self._held or (lease is not None and after > lease.next_index):
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
        self.newest, programs = message.lease, {one.program: one for one in message.programs}
        lease = HostLease(
            message.lease, message.client, message.node, programs, message.first, message.room_bytes
        )
        self.current = lease
        mine = self._early.pop(lease.node, None)
        self._early = {at: one for at, one in self._early.items() if one.lease > lease.number}
        if mine is not None and mine.lease == lease.number:
            for launch in mine.launches:
                self.receive(session_of(lease.node), launch)
            if mine.is_cut and lease.is_open:
                self.close(lease, lease.next_index)
        if self._early_close is not None:
            close, self._early_close = self._early_close, None
            self.receive(*close)

    def keep_early(self, node: str, message: msg.LeasedLaunch) -> None:
        """Keep a launch of a client that comes before its `Lend`, or that one was refused."""
        early = self._early.get(node)
        if early is None or early.lease < message.lease:
            early = self._early[node] = _Early(message.lease)
        elif early.lease > message.lease:
            self.env.count("messages_stale")
            return
        client = self.clients.at(node)
        early.size_bytes += _size_bytes(message)
        early.is_cut = (
            early.is_cut
            or client is None
            or not are_of(client, (message.run, *arrays_in(message.args), *message.results))
            or len(early.launches) == KEPT
            or early.size_bytes > self.room_bytes
        )
        if early.is_cut:
            self.env.count("leased_launches_refused")
        else:
            early.launches.append(message)

    def early_launches(self) -> list[msg.LeasedLaunch]:
        """Return the launches that wait for their `Lend`."""
        return [launch for early in self._early.values() for launch in early.launches]

    @handles(msg.WidenLease)
    def _widened(self, sender: Address, message: msg.WidenLease) -> None:
        if not self.takes(sender, message):
            return
        lease = self.current
        if lease is not None and lease.number == message.lease:
            lease.room_bytes = message.room_bytes
            behind, lease.behind = lease.behind, deque()
            for node, launch in behind:
                self.take(node, launch)

    @handles(msg.EndLease)
    def _ended(self, sender: Address, message: msg.EndLease) -> None:
        if self.takes(sender, message, message.taken):
            self.current = None

    # --- launches of the client ----------------------------------------------------------------------

    @handles(msg.LeasedLaunch)
    def _launched(self, sender: Address, message: msg.LeasedLaunch) -> None:
        bare = replace(message, positions=()) if message.positions else message
        is_there = self.take(sender, bare)
        if message.request and sender != self.order.scheduler:
            if is_there and not message.positions and message.awaited in message.results:
                self.answer(sender, msg.Ready(message.request))
            else:
                self.look(sender, message, is_there)

    def take(self, sender: Address, message: msg.LeasedLaunch) -> bool:
        """Take a launch of the client, or of the scheduler in its place.

        Returns whether its results are there.
        """
        if message.epoch != self.order.epoch or self.order.is_broken:
            self.env.count("messages_stale")
            return False
        lease, is_clients = self.current, sender != self.order.scheduler
        if message.lease > self.newest:
            self.keep_early(sender.node, replace(message, request=0))
            return False
        if lease is None or lease.number != message.lease or (is_clients and not lease.is_open):
            self.env.count("messages_stale")
            return False
        if is_clients and sender.node != lease.node:
            self.env.count("leased_launches_refused")
            return False
        lent = lease.programs.get(message.program)
        used_bytes = lease.used_bytes + (0 if lent is None else lent.room_bytes)
        if (lease.behind or used_bytes > lease.room_bytes) and len(lease.behind) < KEPT:
            lease.behind.append((sender, message))
            return False
        if not is_clients:
            if message.index != lease.next_index:
                return False  # it came from the client before the lease was closed
        elif lent is None or not self.may_launch(lease, lent, message):
            self.env.count("leased_launches_refused")
            self.close(lease, lease.next_index)
            return False
        lease.next_index += 1
        lease.used_bytes = used_bytes
        lease.recent.append(message)
        arguments = msg.Arguments(message.args, message.results)
        number, is_there = msg.number_of(message.index, 0), True
        for at, step in enumerate(message.steps):
            is_there &= self.launch(
                msg.Launch(
                    message.epoch,
                    number - at,
                    message.run,
                    message.program,
                    step.segment,
                    None if at else arguments,
                    step.report,
                )
            )
        if self._held:
            self._go_on()
        return is_there

    def may_launch(
        self, lease: HostLease, lent: msg.LentProgram, message: msg.LeasedLaunch
    ) -> bool:
        """Whether the holder may send a launch: the next one of its lease, of its own program and arrays."""
        program, args, results = self.programs.get(message.program), message.args, message.results
        if (
            message.index != lease.next_index
            or program is None
            or not program.install == message.install == lent.install
            or message.steps != lent.steps[0]
            or len(args) != len(program.body.inputs)
            or len(results) != len(program.body.outputs)
            or len(set(results)) != len(results)
            or self.clients.nodes.get(lease.node) != lease.client
        ):
            return False
        named = [message.run, *results]
        for arg, spec in zip(args, program.body.inputs, strict=True):
            if isinstance(arg, int):
                named.append(arg)
            elif len(arg) != spec.size_bytes:
                return False
        return are_of(lease.client, named)

    # --- closing -------------------------------------------------------------------------------------

    @handles(msg.CloseLease)
    def _close_asked(self, sender: Address, message: msg.CloseLease) -> None:
        lease = self.current
        if message.epoch != self.order.epoch or self.order.is_broken:
            self.env.count("messages_stale")
        elif message.lease > self.newest:
            self._early_close = sender, message
        elif lease is not None and lease.number == message.lease:
            self.close(lease, message.noticed)

    def close(self, lease: HostLease, noticed: int) -> None:
        """Take no more launches of the client; tell the scheduler which those from `noticed` on were."""
        if lease.is_open:
            self.env.send(session_of(lease.node), msg.LeaseOver(lease.number))
        lease.is_open = False
        lease.behind.clear()
        unknown = tuple(launch for launch in lease.recent if launch.index >= noticed)
        if self.order.scheduler is not None:
            closed = msg.LeaseClosed(self.order.epoch, lease.number, lease.next_index, unknown)
            self.env.send(self.order.scheduler, closed)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        """The link to the client is lost, and launches with it."""
        self._early.pop(message.node, None)
        lease = self.current
        if lease is not None and lease.is_open and message.node == lease.node:
            self.close(lease, lease.next_index)


def _size_bytes(launch: msg.LeasedLaunch) -> int:
    """Return about how much memory a launch takes."""
    values = 1 + len(launch.args) + len(launch.results) + len(launch.steps)
    sent = (len(arg) for arg in launch.args if isinstance(arg, bytes))
    return VALUE_BYTES * values + sum(sent)
