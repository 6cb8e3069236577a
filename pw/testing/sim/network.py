"""Links between simulated nodes: the state machine of `pw.transport.links.network`, without sockets.

A *wire* is one connection, made by the node that dials; frames on it arrive in order, later, or
never. Each end keeps a *link* to its peer: frames are numbered from the hello, and a missing or
repeated number, a hello of another incarnation, a goodbye, or silence ends the link with a
`PeerLost`. Frames of a wire that the receiver does not know (its link has ended, or it is a newer
process at the same endpoint) are dropped and answered with a goodbye.

Heartbeats are not sent one by one. A *probe*, planned whenever an event silences a peer, finds what
missing heartbeats would show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pw.core.actors.mailbox import HELD_MESSAGES
from pw.core.ids import Address
from pw.core.messages import PeerLost
from pw.testing.sim.world import Process

CONNECT_S = 8.0
HEARTBEAT_S = 1.0
LATENCY_S = 60e-6

_HELLO, _GOODBYE, _DATA = 0, 1, 2
_UNNUMBERED = -1

RETRY_S = 0.1
"""How often a node dials an endpoint again where no process listens."""

Envelope = tuple[str, Address, Any]
Frame = tuple[int, int, Any]
"""Kind, number and payload."""


@dataclass(slots=True, eq=False)
class _Wire:
    """One connection: its two ends, and when its last frame arrives in each direction."""

    dialler: SimNetwork
    target: str
    endpoint: str
    acceptor: SimNetwork | None = None
    last_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    waiting: list[Frame] = field(default_factory=list)
    """Frames for an endpoint where no process listens; they are sent again until one does."""


@dataclass(slots=True, eq=False)
class _Link:
    """One end's state of the link to a peer."""

    node: str
    out: _Wire
    """The wire on which this end speaks."""
    source: _Wire | None = None
    """The wire on which it listens; None before the hello."""
    incarnation: int | None = None
    sent: int = 0
    received: int = 0
    pieces: list[Envelope] = field(default_factory=list)
    silent_since_s: float | None = None


class SimNetwork:
    """A node's links to all others (see `pw.transport.links.interface.Network`)."""

    def __init__(self, node: Process, endpoint: str, silence_s: Callable[[str], float]) -> None:
        self.node = node
        self.name = node.name
        self.endpoint = endpoint
        self._world = node.world
        self._silence_of = silence_s
        self._links: dict[str, _Link] = {}
        self._sources: dict[_Wire, _Link] = {}
        self._held: dict[_Wire, deque[tuple[int, str, int, int, Any]]] = {}
        """Frames of peers of which many messages wait, as they stand in the kernel's buffers."""
        self._endpoints: dict[str, str] = {}
        self._to_ship: list[_Link] = []
        if endpoint:
            node.world.listeners[endpoint] = node

    # --- what actors ask for -------------------------------------------------------------------------

    def send(self, to: Address, sender: Address, message: object) -> None:
        """Queue a message for another node; the next `flush` sends it."""
        link = self._links.get(to.node) or self._dial(to.node)
        if link is None:
            self.node.counters["messages_unroutable"] += 1
            return
        if not link.pieces:
            self._to_ship.append(link)
        link.pieces.append((to.actor, sender, message))

    def flush(self) -> None:
        """Send all messages of this turn, in one frame for each peer."""
        if self._to_ship:
            links, self._to_ship = self._to_ship, []
            for link in links:
                if link.pieces and self._links.get(link.node) is link:
                    pieces, link.pieces = link.pieces, []
                    self._ship(link, _DATA, pieces)

    def introduce(self, node: str, endpoint: str) -> None:
        """Make `node` reachable at `endpoint`."""
        self._endpoints[node] = endpoint
        link = self._links.get(node)
        if link is not None and link.out.dialler is self and link.out.endpoint != endpoint:
            self._lose(link, f"moved to {endpoint}", goodbye=True)

    def forget(self, node: str) -> None:
        """Drop the link to `node` and its endpoint."""
        self._endpoints.pop(node, None)
        link = self._links.get(node)
        if link is not None:
            self._drop(link, goodbye=True)

    # --- the end of this process ---------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye to all peers."""
        for link in list(self._links.values()):
            self._drop(link, goodbye=True)
        self._unlisten()

    def vanish(self, seen: bool) -> None:
        """End all links without a goodbye; if `seen`, the kernel of the dead process closes the connections."""
        random = self._world.streams(f"death/{self.name}/{self.node.incarnation}")
        for link in self._links.values():
            peer = self._peer(link)
            if peer is None:
                continue
            accepted = link.out.dialler is self and link.out.acceptor is peer
            if seen and accepted and random.random() < 0.5:
                delay_s = random.uniform(0.0, 0.005)
                self._world.after(delay_s, peer.connection_lost, self.name, link.out)
            else:
                self._world.after(random.uniform(0.0, HEARTBEAT_S), peer.probe, self.name)
        self._links.clear()
        self._sources.clear()
        self._unlisten()

    def _unlisten(self) -> None:
        if self._world.listeners.get(self.endpoint) is self.node:
            del self._world.listeners[self.endpoint]

    def connection_lost(self, peer: str, wire: _Wire) -> None:
        """End the link of a closed connection."""
        link = self._links.get(peer)
        if self.node.alive and link is not None and link.out is wire:
            self._lose(link, "connection lost", goodbye=False)
        else:
            self.probe(peer)  # it sends on another wire, and will miss the heartbeats

    # --- outgoing ------------------------------------------------------------------------------------

    def _dial(self, node: str) -> _Link | None:
        endpoint = self._endpoints.get(node)
        if endpoint is None:
            return None
        link = _Link(node, _Wire(self, node, endpoint))
        self._links[node] = link
        self._say_hello(link)
        self._world.after(CONNECT_S, self._give_up, link)
        return link

    def _give_up(self, link: _Link) -> None:
        if self.node.alive and link.incarnation is None:
            self._lose(link, f"could not be reached at {link.out.endpoint}", goodbye=False)

    def _say_hello(self, link: _Link) -> None:
        self._ship(link, _HELLO, (self.name, self.node.incarnation))

    def _ship(self, link: _Link, kind: int, payload: Any) -> None:
        sequence, link.sent = link.sent, link.sent + 1
        self._transmit(link.out, link.node, kind, sequence, payload)

    def _transmit(self, wire: _Wire, target: str, kind: int, sequence: int, payload: Any) -> None:
        """Put a frame on a wire: late, lost or doubled as the link's stream says."""
        world = self._world
        profile = world.profile
        random = world.streams(f"link/{self.name}>{target}")
        slowness = self.node.slowness
        delay_s = LATENCY_S * slowness * (1.0 + random.expovariate(1.0))
        copies = 1
        if not world.calm:
            draw = random.random()
            if draw < profile.frame_loss:
                world.ledger.note("frame lost", self.name, target)
                copies = 0
            elif draw < profile.frame_loss + profile.frame_duplicate:
                world.ledger.note("frame doubled", self.name, target)
                copies = 2
            if profile.latency_spike and random.random() < profile.latency_spike:
                world.ledger.injected["frame late"] += 1
                delay_s += random.uniform(0.001, 0.3)
        side = 0 if wire.dialler is self else 1
        free_s = max(world.now_s, world.blocked_until(self.name, target))
        arrives_s = max(free_s + delay_s, wire.last_s[side])
        if free_s > world.now_s:
            world.held_until_s = max(world.held_until_s, arrives_s)
        wire.last_s[side] = arrives_s
        for _ in range(copies):
            world.at(arrives_s, self._arrive, wire, side, target, kind, sequence, payload)
        if not copies and kind == _HELLO:  # its peer gives up, and both connect again
            world.held_until_s = max(world.held_until_s, world.now_s + CONNECT_S)
        if not copies and sequence != _UNNUMBERED:
            world.after(random.uniform(0.1, HEARTBEAT_S), self._beat, target, wire)

    def _beat(self, peer: str, wire: _Wire) -> None:
        """Send a heartbeat, whose number shows the peer that an earlier frame is missing."""
        link = self._links.get(peer)
        if self.node.alive and link is not None and link.out is wire:
            self._ship(link, _DATA, [])

    # --- incoming ------------------------------------------------------------------------------------

    def _arrive(
        self, wire: _Wire, side: int, target: str, kind: int, sequence: int, payload: Any
    ) -> None:
        """Deliver a frame of this node at the other end of the wire."""
        world = self._world
        there = world.listeners.get(wire.endpoint) if side == 0 else wire.dialler.node
        if side == 0 and wire.acceptor is None and (there is None or wire.waiting):
            if not wire.waiting:
                world.after(RETRY_S, self._connect, wire, target)
            wire.waiting.append((kind, sequence, payload))
            return
        if there is None or not there.alive:
            return  # no process listens there any more
        if there.paused_until_s > world.now_s:
            again = (wire, side, target, kind, sequence, payload)
            world.at(there.paused_until_s, self._arrive, *again)
            return
        there.network.frame(wire, side, self.name, kind, sequence, payload)

    def _connect(self, wire: _Wire, target: str) -> None:
        """Send the waiting frames if a process listens at the endpoint by now."""
        link = self._links.get(target)
        if not self.node.alive or link is None or link.out is not wire:
            return
        if wire.endpoint not in self._world.listeners:
            self._world.after(RETRY_S, self._connect, wire, target)
            return
        frames, wire.waiting = wire.waiting, []
        for frame in frames:
            self._arrive(wire, 0, target, *frame)

    def frame(
        self, wire: _Wire, side: int, sender: str, kind: int, sequence: int, payload: Any
    ) -> None:
        """Handle a frame."""
        link = self._sources.get(wire)
        if link is None and side == 1:
            link = self._links.get(wire.target)
            link = link if link is not None and link.out is wire else None
            if link is not None and link.source is not None:
                link = None
        if link is None:
            self._from_stranger(wire, side, sender, kind, sequence, payload)
        elif wire in self._held or self.node.holds(link.node, HELD_MESSAGES):
            self._held.setdefault(wire, deque()).append((side, sender, kind, sequence, payload))
        elif kind == _GOODBYE:
            self._lose(link, "closed", goodbye=False)
        elif link.source is None:
            if kind == _HELLO and sequence == 0:
                self._accept(link, wire, payload[1])
        elif sequence != link.received:
            reason = f"frames lost (expected {link.received}, got {sequence})"
            self._lose(link, reason, goodbye=True)
        else:
            link.received += 1
            link.silent_since_s = None
            for actor, address, message in payload:
                self.node.deliver(actor, message, address)

    def resume(self, node: str) -> None:
        """Take the frames of a peer that was held, until it is held again."""
        link = self._links.get(node)
        wire = None if link is None else link.source
        if wire is not None and wire in self._held:
            frames = self._held.pop(wire)
            while frames and wire not in self._held:
                self.frame(wire, *frames.popleft())
            if frames and wire in self._sources:
                self._held[wire].extend(frames)

    def _from_stranger(
        self, wire: _Wire, side: int, sender: str, kind: int, sequence: int, payload: Any
    ) -> None:
        if kind == _HELLO and side == 0 and sequence == 0:
            self._greeted(wire, payload)
        elif kind != _GOODBYE:
            self.node.counters["frames_from_strangers"] += 1
            self._transmit(wire, sender, _GOODBYE, _UNNUMBERED, None)

    def _greeted(self, wire: _Wire, hello: tuple[str, int]) -> None:
        """Answer a hello on a new wire."""
        name, incarnation = hello
        link = self._links.get(name)
        if link is not None and link.incarnation is not None:
            if incarnation < link.incarnation:
                self._transmit(wire, name, _GOODBYE, _UNNUMBERED, None)
                return
            newer = incarnation > link.incarnation
            reason = "replaced by a newer incarnation" if newer else "connected anew"
            self._lose(link, reason, goodbye=newer)
            link = None
        wire.acceptor = self
        if link is None:
            link = _Link(name, wire)
            self._links[name] = link
            self._accept(link, wire, incarnation)
            self._say_hello(link)
        else:
            self._accept(link, wire, incarnation)

    def _accept(self, link: _Link, source: _Wire, incarnation: int) -> None:
        link.source = source
        link.incarnation = incarnation
        link.received = 1
        self._sources[source] = link
        there = self._peer(link)
        is_gone = there is None or there.node.incarnation != incarnation
        if is_gone or self._world.blocked_until(link.node, self.name):
            self._world.after(HEARTBEAT_S, self.probe, link.node)

    # --- ends of links -------------------------------------------------------------------------------

    def _lose(self, link: _Link, reason: str, *, goodbye: bool) -> None:
        if self._links.get(link.node) is link:
            self._drop(link, goodbye)
            self.node.counters["peers_lost"] += 1
            self.node.tell_all(link.node, PeerLost(link.node, reason))

    def _drop(self, link: _Link, goodbye: bool) -> None:
        del self._links[link.node]
        if link.source is not None:
            self._sources.pop(link.source, None)
            self._held.pop(link.source, None)
        link.pieces = []
        if goodbye and link.incarnation is not None:
            self._transmit(link.out, link.node, _GOODBYE, _UNNUMBERED, None)
        peer = self._peer(link)
        if peer is not None:
            random = self._world.streams(f"link/{self.name}>{link.node}")
            self._world.after(random.uniform(0.0, HEARTBEAT_S), peer.probe, self.name)

    def _peer(self, link: _Link) -> SimNetwork | None:
        node = self._world.nodes.get(link.node)
        return None if node is None else node.network

    def peers(self) -> list[str]:
        """Nodes to which there is a link."""
        return list(self._links)

    # --- silence -------------------------------------------------------------------------------------

    def probe(self, peer: str) -> None:
        """Check whether heartbeats of a peer arrive; end the link if it was silent for too long."""
        link, world = self._links.get(peer), self._world
        if not self.node.alive or link is None or link.incarnation is None:
            return
        if self.node.paused:
            world.at(self.node.paused_until_s + HEARTBEAT_S, self.probe, peer)
            return
        there = self._peer(link)
        blocked_in = world.blocked_until(peer, self.name)
        blocked_out = world.blocked_until(self.name, peer)
        speaks = there is not None and there.hears(link.source, link.incarnation)
        is_up = there is not None and not there.node.paused
        if speaks and is_up and not blocked_in:
            link.silent_since_s = None
            return
        known = there is not None and self._reaches(link, there)
        if known and not speaks and is_up and not blocked_in and not blocked_out:
            self._lose(link, "closed", goodbye=False)  # our heartbeat is a stranger's to it
            return
        silence_s = self._silence_of(peer)
        if link.silent_since_s is None:
            link.silent_since_s = world.now_s
        if world.now_s - link.silent_since_s >= silence_s:
            self._lose(link, f"silent for {silence_s:g} s", goodbye=True)
            return
        world.after(HEARTBEAT_S / 2, self.probe, peer)

    def hears(self, wire: _Wire | None, incarnation: int) -> bool:
        """Whether this process has this incarnation, and sends on this wire."""
        if self.node.incarnation != incarnation:
            return False
        return any(link.out is wire for link in self._links.values())

    def _reaches(self, link: _Link, there: SimNetwork) -> bool:
        """Whether frames reach the peer's present process."""
        wire = link.out
        if wire.dialler is self:
            return self._world.listeners.get(wire.endpoint) is there.node
        return wire.dialler is there
