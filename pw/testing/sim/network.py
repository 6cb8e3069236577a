"""Connections between simulated nodes, for the links of `pw.transport.links.links`.

A connection has two ends. What one end sends arrives at the other in order: frames and, behind
them, its end. Frames may be late, lost or doubled; a partition holds them back. The kernel of a
process that was killed closes its connections, or the peers notice nothing.

Heartbeats are not sent one by one. A *probe*, planned whenever an event may silence a peer, does for
one link what missing heartbeats and the ticks of its node would do. The machine of a stopped process answers;
that of a dead or cut off one does not.
"""

from __future__ import annotations

from collections import deque

from pw.core.messages import Hello
from pw.core.messages.roles import Role, role_of
from pw.core.waits import CLIENT_TIMEOUT_S
from pw.testing.sim.silence import check_kept, check_loss, is_cut_off
from pw.testing.sim.world import World
from pw.transport.links import codec
from pw.transport.links.admission import Access
from pw.transport.links.interface import LOST, Connection, Mailroom
from pw.transport.links.link import Link
from pw.transport.links.links import UNNUMBERED, LastWord, Links

CONNECT_S = 8.0
HEARTBEAT_S = 1.0
HOST_SILENCE_S = 10.0
LEASE_S = 10.0
LATENCY_S = 60e-6
RETRY_S = 0.1
"""Seconds after which a node dials an endpoint again where no process listens."""
LINES = ".lines"
"""End of the names of nodes that are the clients' ends of lines."""


class SimConnection(Connection):
    """One end of a connection.

    Args:
        network: of this end.
        node: the node at the other end.
        endpoint: where this end dials; empty for an end that was accepted.
        other: the other end; None until it accepts.
    """

    def __init__(
        self, network: SimNetwork, node: str, endpoint: str = "", other: SimConnection | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.node = node
        self.endpoint = endpoint
        self.other = other
        self.is_open = other is not None
        self.is_silent = False
        """True if heartbeats of the peer were missing at the last probe."""
        self.cut_off_s: float | None = None
        """Time at which a probe first found that the peer's machine does not answer, in seconds; None while it
        does."""
        self.last_s = 0.0
        """Time at which the last frame that was sent here arrives, in seconds."""
        self.early: list[bytes] = []
        """Frames that wait until another process has accepted the connection."""
        self.unread: deque[bytes | None] = deque()
        """Frames that have come since reading stopped; None for the end of the connection."""

    @property
    def unanswered_s(self) -> float:
        """Seconds for which the peer's machine has acknowledged nothing; 0 while it answers."""
        return 0.0 if self.cut_off_s is None else self.network.now_s - self.cut_off_s

    def accepted(self, other: SimConnection) -> None:
        """Send what waits: another process has accepted the connection."""
        self.other, self.is_open = other, True
        for frame in self.early:
            self.network.transmit(self, other, frame)

    def send(self, frame: bytes) -> bool:
        """Send a frame, or keep it until the connection is accepted."""
        if self.other is None:
            self.early.append(frame)
        else:
            self.network.transmit(self, self.other, frame)
        return True

    def hold(self) -> None:
        """Receive nothing until `resume`."""
        self.held = True

    def resume(self) -> None:
        """Receive what has come, until this end is held again."""
        self.held = False
        while self.unread and not self.held:
            self.take(self.unread.popleft())

    def take(self, frame: bytes | None) -> None:
        """Receive a frame, or the end of the connection."""
        if self.closed:
            return
        if self.held:
            self.unread.append(frame)
        elif frame is None:
            self.closed = True
            self.network.ended(self, LOST)
        else:
            self.network.received(self, [frame])

    def withdraw(self) -> list[bytes]:
        """Close a connection that is not accepted yet, and return its frames; else do nothing."""
        if self.other is not None:
            return []
        self.closed = True
        return self.early

    def close(self, linger_s: float = 0.0) -> None:
        """Close this end; the other one learns it behind all frames."""
        if not self.closed:
            self.closed = True
            if self.other is not None:
                self.network.transmit(self, self.other, None)


class SimNetwork(Links):
    """A node's links to all others, on virtual time."""

    def __init__(self, world: World, name: str, incarnation: int, endpoint: str) -> None:
        own_silence_s = HOST_SILENCE_S if role_of(name) is Role.WORKER else 0.0
        super().__init__(
            Hello(1, "sim", "sim", name, incarnation, own_silence_s),
            Access(name, None),
            lambda: world.now_s,
            heartbeat_s=HEARTBEAT_S,
            lease_s=LEASE_S,
            patience_s=CLIENT_TIMEOUT_S,
            connect_s=CONNECT_S,
        )
        self.endpoint = endpoint
        self.tenant_of, self.islands_of = world.tenant_of, world.islands_of
        self._world = world
        self._incarnation = incarnation

    @property
    def now_s(self) -> float:
        """Seconds since the world began."""
        return self._world.now_s

    def attach(self, node: Mailroom) -> None:
        """Deliver to this node from now on, and listen."""
        super().attach(node)
        self.process = self._world.nodes[self.name]
        if self.endpoint:
            self._world.listeners[self.endpoint] = self.process

    def close(self, linger_s: float = 0.0) -> None:
        """Say goodbye to all peers."""
        super().close(linger_s)
        self._unlisten()

    def vanish(self, seen: bool) -> None:
        """Say nothing any more: the process is dead; if `seen`, its kernel closes connections."""
        random = self._world.streams(f"death/{self.name}/{self._incarnation}")
        for connection in self.connections:
            assert isinstance(connection, SimConnection)
            connection.closed = True
            if connection.other is not None and seen and random.random() < 0.5:
                delay_s = random.uniform(0.0, 0.005)
                self._world.after(delay_s, self._arrive, connection.other, None)
        for peer in self.links:
            if (there := self._world.nodes.get(peer)) is not None:
                delay_s = random.uniform(0.0, HEARTBEAT_S)
                self._world.after(delay_s, there.network.probe, self.name)
        self.links.clear()
        self.connections.clear()
        self._unlisten()

    def _unlisten(self) -> None:
        if self._world.listeners.get(self.endpoint) is self.process:
            del self._world.listeners[self.endpoint]

    # --- connections ---------------------------------------------------------------------------

    def connect(self, node: str, endpoint: str) -> SimConnection:
        """Dial a node; a probe gives it up if it does not answer."""
        connection = SimConnection(self, node, endpoint)
        self._world.after(LATENCY_S, self._dial_again, connection)
        self._world.after(CONNECT_S + HEARTBEAT_S / 2, self.probe, node)
        return connection

    def _dial_again(self, connection: SimConnection) -> None:
        """Connect, if a process listens at the endpoint by now."""
        if connection.closed or not self.process.alive:
            return
        world, node = self._world, connection.node
        until_s = max(world.blocked_until(self.name, node), world.blocked_until(node, self.name))
        there = world.listeners.get(connection.endpoint)
        if until_s or there is None:
            world.held_until_s = max(world.held_until_s, until_s)
            world.at(until_s or world.now_s + RETRY_S, self._dial_again, connection)
            return
        other = SimConnection(there.network, self.name, other=connection)
        there.network.admit(other)
        connection.accepted(other)

    def transmit(self, end: SimConnection, other: SimConnection, frame: bytes | None) -> None:
        """Send a frame, or the end of a connection: late, lost or doubled as the link's stream says."""
        world = self._world
        profile = world.profile
        random = world.streams(f"link/{self.name}>{end.node}")
        slowness = self.process.link_slowness
        if profile.stragglers and (there := world.nodes.get(end.node)) is not None:
            slowness = max(slowness, there.link_slowness)  # both ways
        delay_s = LATENCY_S * slowness * (1.0 + random.expovariate(1.0))
        copies = 1
        if not world.calm and frame is not None:
            draw = random.random()
            loss = profile.frame_loss + profile.line_loss * self.name.endswith(LINES)
            if draw < loss:
                self._lost(end, frame)
                copies = 0
            elif draw < loss + profile.frame_duplicate:
                world.ledger.note("frame doubled", self.name, end.node)
                copies = 2
            if profile.latency_spike and random.random() < profile.latency_spike:
                world.ledger.injected["frame late"] += 1
                delay_s += random.uniform(0.001, 0.3)
        free_s = max(world.now_s, world.blocked_until(self.name, end.node))
        end.last_s = max(free_s + delay_s, end.last_s)
        if free_s > world.now_s:
            world.held_until_s = max(world.held_until_s, end.last_s)
        for _ in range(copies):
            world.at(end.last_s, self._arrive, other, frame)

    def _lost(self, end: SimConnection, frame: bytes) -> None:
        """Note a lost frame; the next heartbeat shows its receiver that it is missing."""
        world = self._world
        world.ledger.note("frame lost", self.name, end.node)
        number = codec.decode(frame).sequence
        if number == 0:  # of a hello: its peer gives up, and both connect again
            world.held_until_s = max(world.held_until_s, world.now_s + CONNECT_S)
        if number != UNNUMBERED:
            world.after(HEARTBEAT_S, self.probe, end.node)

    def _arrive(self, other: SimConnection, frame: bytes | None) -> None:
        there = other.network.process
        if not there.alive:
            return
        if there.paused:
            self._world.at(there.paused_until_s, self._arrive, other, frame)
        else:
            other.take(frame)

    # --- silence -------------------------------------------------------------------------------

    def _open(self, link: Link, source: Connection, hello: Hello) -> None:
        super()._open(link, source, hello)
        self._world.after(HEARTBEAT_S, self.probe, link.node)  # it may be silent already

    def probe(self, peer: str) -> None:
        """Take the heartbeats that a peer has sent, and look at its link; again while it is silent."""
        link, world = self.links.get(peer), self._world
        if link is None or not self.process.alive:
            return
        if self.process.paused:
            world.at(self.process.paused_until_s + HEARTBEAT_S, self.probe, peer)
            return
        if (source := link.source) is not None:
            assert isinstance(source, SimConnection)
            was_silent, source.is_silent = source.is_silent, not self._is_heard(source)
            if not (was_silent and source.is_silent):
                link.heard_s = world.now_s
            elif self._is_reset(source):
                self.ended(source, LOST)
                return
        is_silent = source is not None and source.is_silent
        if self._ask_machine(link) or is_silent:
            world.after(HEARTBEAT_S / 2, self.probe, peer)
        self.look(link)
        if self.links.get(peer) is link:
            check_kept(self.process, link)

    def _ask_machine(self, link: Link) -> bool:
        """Note whether the machine of a peer answers what the kernel asks it; return whether it does not."""
        out = link.out
        assert isinstance(out, SimConnection)
        if is_cut_off(self._world, self.name, out):
            out.cut_off_s = self._world.now_s if out.cut_off_s is None else out.cut_off_s
        else:
            out.cut_off_s = None
        return out.cut_off_s is not None

    def _lose(self, link: Link, reason: str, last_word: LastWord = None) -> None:
        if self.links.get(link.node) is link:
            check_loss(self.process, link, reason)
        super()._lose(link, reason, last_word)

    def _is_heard(self, source: SimConnection) -> bool:
        """Whether heartbeats of the peer come here."""
        other = source.other
        assert other is not None
        there = other.network
        link = there.connections.get(other)
        speaks = link is not None and link.out is other and link.incarnation is not None
        is_up = there.process.alive and not there.process.paused
        return speaks and is_up and not self._world.blocked_until(source.node, self.name)

    def _is_reset(self, source: SimConnection) -> bool:
        """Whether the peer's machine answers heartbeats with the end of the connection."""
        other, world = source.other, self._world
        assert other is not None
        blocked = (
            world.blocked_until(source.node, self.name),
            world.blocked_until(self.name, source.node),
        )
        is_dead = not other.network.process.alive and source.node in world.nodes
        return is_dead and not any(blocked)
