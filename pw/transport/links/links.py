"""The links of one node to its peers, as a state machine without sockets, timers or threads.

A network (`pw.transport.links.network` over sockets, `pw.testing.sim.network` in the simulator)
makes connections, and reports what happens on them: `received`, `ended`, `refused`, and with `tick`
or `look` that time has passed. The links answer through the methods of the connections and of the
node. So what is simulated is what runs.

A link works in both directions: a node answers a hello on the connection on which it came. So the
controller and hosts reach clients, which do not listen. When two nodes dial each other at the same
time, each sends on the connection that it has made. A link and its connections end together.

The life of a link, as one end sees it:

    absent -first send-> dialled -hello comes-> open
    absent -hello comes-> open, with a hello in answer
    open -nothing comes for some heartbeats-> open, PeerSilent
    open -frame number missing, silence, connection lost, goodbye-> absent, PeerLost
    dialled -no hello within connect_s, no peer there for absent_s-> absent, PeerLost
    any -versions differ, or the name is taken-> absent, PeerRefused
    open -hello of the same or a newer incarnation-> absent, PeerLost, and open again

Frames are numbered in each direction; the hello is number 0 and a frame of its own. Refusals and
goodbyes are UNNUMBERED, since they may answer a peer without a link: we answer a stranger's first
frame with a goodbye unless it is a hello, so a peer whose link we have lost learns it at once.

A node judges silence only after it has read all input, and not when it was stopped itself. A host's hello
says how long it may be silent, because its gang waits for it. Of all other peers silence is not death: a
process that has ended closes its connections, and a machine that is gone acknowledges nothing. So such a
peer is lost when its machine has answered nothing for a lease; as long as the machine answers, the process
is slow, and has `patience_s`. A peer of which much waits is held: it is not read, and its silence does not
count, until some is handled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pw.core import messages as msg
from pw.core.errors import AccessRefused, ConnectionFailed, ErrorReport
from pw.core.ids import CONTROLLER, Address
from pw.transport.access.identity import Identity
from pw.transport.links import codec
from pw.transport.links.admission import Access
from pw.transport.links.interface import Connection, Mailroom
from pw.transport.links.link import Link, Versions, objection
from pw.transport.log import Warnings, log

UNNUMBERED = -1

LOOKS = 128
"""Links that are looked at in one turn of the loop, in about a millisecond."""

QUIET_HEARTBEATS = 2
"""Heartbeats without a frame after which a peer is silent."""
DEAD_HEARTBEATS = 3
"""Heartbeats without an acknowledgement after which a host's machine is lost: its gang waits for it."""

LastWord = msg.Goodbye | msg.Refused | None
_LINK_KINDS = frozenset((msg.Hello, msg.Refused, msg.Heartbeat, msg.Goodbye))
_HEARTBEAT = [codec.encode_names("", ""), codec.encode_message(msg.Heartbeat())]


class Links:
    """All links of a node; the base of its network (see `pw.transport.links.interface.Network`).

    Args:
        hello: this node's name, incarnation, versions, and how long it may be silent.
        access: decides which peers get a link.
        clock: returns seconds on a clock that never goes back.
        heartbeat_s: an open link carries a frame at least this often.
        lease_s: a silent peer is lost when its machine has answered nothing for so long.
        patience_s: a peer that is silent for so long is lost, though its machine answers.
        connect_s: a peer that does not answer our hello for so long is lost.
        absent_s: so is the controller if no process has listened at its address for so long.
    """

    def __init__(
        self,
        hello: msg.Hello,
        access: Access,
        clock: Callable[[], float],
        *,
        heartbeat_s: float,
        lease_s: float,
        patience_s: float,
        connect_s: float,
        absent_s: float = math.inf,
    ) -> None:
        self.name = hello.node
        self.tenant_of = access.tenant_of
        self.islands_of = access.islands_of
        self.links: dict[str, Link] = {}
        self.connections: dict[Connection, Link | None] = {}
        """The link of each connection; None before a hello."""
        self._hello = hello
        self._versions = Versions.of(hello)
        self._access = access
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self.lease_s = lease_s
        self.patience_s = max(patience_s, lease_s)
        self._connect_s = connect_s
        self._absent_s = absent_s
        self.looks = LOOKS
        """How many links are looked at in one turn of the loop."""
        self._warnings = Warnings(self.name)
        self._node: Mailroom
        self._endpoints: dict[str, str] = {}
        self._to_ship: list[Link] = []
        self._encoded: dict[int, tuple[object, bytes]] = {}
        self._ticked_s = clock()
        self._away_s = 0.0
        """The time between the last two ticks."""
        self._unlooked: list[Link] = []
        """Links that are still to be looked at in this tick."""
        self._closed = False

    def connect(self, node: str, endpoint: str) -> Connection:
        """Begin a connection to the process that listens at an endpoint.

        Raises:
            ConnectionFailed: it is no endpoint.
        """
        raise NotImplementedError

    # --- the Network protocol ------------------------------------------------------------------

    def attach(self, node: Mailroom) -> None:
        """Deliver to this node from now on."""
        self._node = node
        self._ticked_s = self._clock()

    def send(self, to: Address, sender: Address, message: object) -> None:
        """Take a message for another node; it leaves with the next `flush`, if not before.

        Raises:
            ProtocolError: the message cannot cross to another process.
        """
        if (cached := self._encoded.get(id(message))) is None:
            cached = self._encoded[id(message)] = (message, codec.encode_message(message))
        names, body = codec.encode_names(to.actor, sender.actor), cached[1]
        link = self.links.get(to.node) or self._dial(to.node)
        if link is None:
            self._node.counters["messages_unroutable"] += 1
            self._warnings.once(("unroutable", to.node), "message to an unknown node", to.node)
            return
        size = len(names) + len(body)
        if link.pieces and link.pieces_bytes + size > codec.BATCH_BYTES:
            self._ship(link)
        if not link.pieces:
            self._to_ship.append(link)
        link.pieces += (names, body)
        link.pieces_bytes += size

    def send_now(self, sender: Address, to: Sequence[Address], message: object) -> None:
        """Send a message to some actors, one on each node, in a frame of its own.

        Raises:
            ProtocolError: the message cannot cross to another process.
        """
        body = codec.encode_message(message)
        for one in to:
            link = self.links.get(one.node) or self._dial(one.node)
            if link is None:
                self._node.counters["messages_unroutable"] += 1
                continue
            if link.pieces:
                self._ship(link)
            self._ship_pieces(link, [codec.encode_names(one.actor, sender.actor), body])
        self._node.counters["messages_sent"] += len(to)

    def flush(self) -> None:
        """Send all messages of this loop turn, in one frame for each peer."""
        if self._to_ship:
            links, self._to_ship = self._to_ship, []
            for link in links:
                if (pieces := link.pieces) and self.links.get(link.node) is link:
                    link.pieces, link.pieces_bytes = [], 0
                    self._ship_pieces(link, pieces)
        self._encoded.clear()

    def introduce(self, node: str, endpoint: str) -> None:
        """Make `node` reachable at `endpoint`; a link is made when first needed."""
        self._endpoints[node] = endpoint
        if (link := self.links.get(node)) is not None and link.endpoint not in ("", endpoint):
            self._lose(link, f"moved to {endpoint}", msg.Goodbye())

    def forget(self, node: str) -> None:
        """Drop the link to `node`, its endpoint, and its unsent messages."""
        self._endpoints.pop(node, None)
        if (link := self.links.get(node)) is not None:
            self._drop(link, msg.Goodbye())

    def heard_s(self, node: str) -> float | None:
        """Return the seconds since something came from `node`; None without a link."""
        link = self.links.get(node)
        return None if link is None else self._clock() - link.last_heard_s

    def identity_of(self, node: str) -> Identity | None:
        """The identity of a peer with a link; None for a link without TLS, or without a link."""
        link = self.links.get(node)
        return None if link is None else link.identity

    def trouble_of(self, node: str) -> str:
        """Return the obstacle to a link to `node`; empty if there is a link, or the obstacle is unknown."""
        link = self.links.get(node)
        return "" if link is None or link.incarnation is not None else link.out.trouble

    def close(self, linger_s: float = 0.0) -> None:
        """Say goodbye to all peers; all connections together may take so long to send it."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        until_s = self._clock() + linger_s
        for link in list(self.links.values()):
            self._drop(link, msg.Goodbye(), until_s)
        while self.connections:
            self.connections.popitem()[0].close()

    # --- connections ---------------------------------------------------------------------------

    def _dial(self, node: str) -> Link | None:
        endpoint = self._endpoints.get(node)
        if endpoint is None or self._closed:
            return None
        try:
            connection = self.connect(node, endpoint)
        except ConnectionFailed as error:
            del self._endpoints[node]  # or every message would try again
            self._node.tell_all(node, msg.PeerLost(node, str(error)))
            return None
        link = Link(node, connection, endpoint, self._clock())
        self.links[node] = self.connections[connection] = link
        self._say_hello(link)
        return link

    def admit(self, connection: Connection) -> None:
        """Take a connection that a process has made to this node."""
        self.connections[connection] = None

    def turn_away(self, connection: Connection) -> None:
        """Drop a connection that has not greeted, and say nothing."""
        self.connections.pop(connection, None)
        connection.close()

    def count(self, counter: str) -> None:
        """Add one to a counter of the node."""
        self._node.counters[counter] += 1

    def _end_revoked(self) -> None:
        """End the links of certificates that are revoked, if credentials have changed."""
        for link, error in self._access.revoked(self.links.values()):
            self._lose(link, error.message, msg.Refused(error))

    def resume(self, node: str) -> None:
        """Read again from a peer that was held."""
        if (link := self.links.get(node)) is not None and link.source is not None:
            link.source.resume()

    def ended(self, connection: Connection, reason: str) -> None:
        """The peer, or the kernel, has closed a connection."""
        link = self.connections.pop(connection, None)
        if link is not None:
            self._lose(link, reason)

    def refused(self, connection: Connection, reason: str) -> None:
        """A connection has closed, because one end refuses the other."""
        link = self.connections.pop(connection, None)
        if link is not None:
            words = f"no link to {link.node} at {link.endpoint}: {reason}"
            self._refuse(link.node, ErrorReport.of(AccessRefused(words), where=self.name), link)

    # --- outgoing ------------------------------------------------------------------------------

    def _say_hello(self, link: Link) -> None:
        self._ship_pieces(link, [codec.encode_names("", ""), codec.encode_message(self._hello)])

    def _ship(self, link: Link) -> None:
        pieces, link.pieces, link.pieces_bytes = link.pieces, [], 0
        self._ship_pieces(link, pieces)

    def _ship_pieces(self, link: Link, pieces: list[bytes]) -> None:
        frame = codec.join_frame(link.sent, pieces)
        link.sent += 1
        link.spoke_s = self._clock()
        counters = self._node.counters
        counters["frames_sent"] += 1
        counters["control_bytes_sent"] += len(frame)
        if not link.out.send(frame):
            counters["sends_deferred"] += 1

    def _answer(self, connection: Connection, message: msg.Goodbye | msg.Refused) -> None:
        """Send the last message of a connection, with or without a link."""
        connection.send(codec.encode_frame(UNNUMBERED, [("", "", message)]))

    # --- incoming ------------------------------------------------------------------------------

    def received(self, connection: Connection, parts: list[bytes]) -> None:
        """Handle a message of a connection."""
        link, counters = self.connections[connection], self._node.counters
        counters["frames_received"] += 1
        try:
            frame = codec.decode(parts[0]) if len(parts) == 1 else codec.decode_parts(parts)
        except codec.MalformedFrame as error:
            peer = link.node if link else connection
            counters["frames_malformed"] += 1
            self._warnings.once(("malformed", peer), "malformed frame", peer, reason=error)
            return
        counters["control_bytes_received"] += len(parts[0])
        if link is not None and link.source is connection:
            self._from_peer(link, frame)
            link.took(len(parts[0]), self._node)
            return
        first = frame.envelopes[0][2] if frame.envelopes else None
        hello = first if frame.sequence == 0 and isinstance(first, msg.Hello) else None
        if link is None:
            if hello is not None:
                self._greeted(connection, hello)
            elif frame.sequence != UNNUMBERED and self._untimely(connection, "a stranger"):
                self._answer(connection, msg.Goodbye())
        elif frame.sequence == UNNUMBERED:
            self._from_peer(link, frame)
        elif link.source is None and hello is not None:
            self._answered(link, hello)
        else:
            self._untimely(connection, link.node)

    def _untimely(self, connection: Connection, peer: str) -> bool:
        self._node.counters["frames_malformed"] += 1
        meaning = "one of the two has restarted or closed the link, and connects again"
        return self._warnings.once(
            connection, "message after the end of a link", peer, meaning=meaning
        )

    def _from_peer(self, link: Link, frame: codec.Frame) -> None:
        numbered = frame.sequence != UNNUMBERED
        if numbered:
            if frame.sequence != link.received:
                reason = f"frames lost (expected {link.received}, got {frame.sequence})"
                self._lose(link, reason, msg.Goodbye())
                return
            link.received += 1
            link.heard_s = self._clock()
        node = self._node
        node.counters["messages_received"] += len(frame.envelopes)
        for to_actor, from_actor, message in frame.envelopes:
            if type(message) in _LINK_KINDS:
                if isinstance(message, msg.Goodbye):
                    self._lose(link, "closed")
                    return
                if isinstance(message, msg.Refused):
                    self._dismissed(link, message.error)
                    return
                if isinstance(message, msg.Hello):
                    node.counters["frames_malformed"] += 1
            elif numbered:
                sender = link.addresses.get(from_actor) or link.address(from_actor)
                node.deliver(to_actor, message, sender)

    def _dismissed(self, link: Link, error: ErrorReport) -> None:
        """A peer ends a link; for good, unless this process has another certificate by now."""
        if self._access.has_another_certificate(link):
            self._lose(
                link, f"{error.message}; this process has a new certificate, and connects again"
            )
        else:
            self._refuse(link.node, error, link)

    # --- hellos --------------------------------------------------------------------------------

    def _greeted(self, connection: Connection, hello: msg.Hello) -> None:
        """A peer that has dialled us has sent its hello."""
        link = self.links.get(hello.node)
        denied = self._access.objection(hello, connection, link)
        error = denied or objection(self.name, self._versions, hello)
        if error is not None:
            self._answer(connection, msg.Refused(error))
            is_live = link is not None and link.incarnation is not None
            if denied or is_live or hello.node == self.name:
                self.count("hellos_refused")
            else:
                self._refuse(hello.node, error, link)
            return
        if link is not None and link.incarnation is not None:
            words = f"a newer process has taken the name {hello.node}"
            refusal = msg.Refused(ErrorReport.of(ConnectionFailed(words), where=self.name))
            if hello.incarnation < link.incarnation:
                self.count("hellos_refused")
                self._answer(connection, refusal)
                return
            if hello.incarnation > link.incarnation:
                self._lose(link, "replaced by a newer incarnation", refusal)
            else:
                self._lose(link, "connected anew")
            link = None
        if link is None:
            self.links[hello.node] = link = Link(hello.node, connection, "", self._clock())
            self._open(link, connection, hello)
            self._say_hello(link)
            return
        unsent = link.out.withdraw()
        if unsent:  # we may be dialling the address of the peer's last incarnation
            self.connections.pop(link.out)
            link.out, link.endpoint = connection, ""
            for frame in unsent:
                connection.send(frame)
        self._open(link, connection, hello)

    def _answered(self, link: Link, hello: msg.Hello) -> None:
        """Handle a hello on a connection that this process has made."""
        error = objection(self.name, self._versions, hello)
        if error is None and hello.node != link.node:
            words = f"at {link.endpoint} answers {hello.node}, where {link.node} was expected"
            error = ErrorReport.of(ConnectionFailed(words), where=self.name)
        if error is None:
            self._open(link, link.out, hello)
        else:
            self._answer(link.out, msg.Refused(error))
            self._refuse(link.node, error, link)

    def _open(self, link: Link, source: Connection, hello: msg.Hello) -> None:
        link.open(source, hello, self._clock())
        self.connections[source] = link
        self._access.opened(link, source)
        log("debug", "link open", self.name, peer=link.node, incarnation=link.incarnation)

    # --- ends of links -------------------------------------------------------------------------

    def _drop(self, link: Link, last_word: LastWord = None, until_s: float = 0.0) -> None:
        """Forget a link and close its connections without a report."""
        if self.links.get(link.node) is link:
            del self.links[link.node]
        link.pieces.clear()
        if last_word is not None and link.incarnation is not None:
            self._answer(link.out, last_word)
        for connection in filter(None, (link.out, link.source)):
            self.connections.pop(connection, None)
            connection.close(until_s - self._clock())

    def _lose(self, link: Link, reason: str, last_word: LastWord = None) -> None:
        if self.links.get(link.node) is not link:
            return
        self._drop(link, last_word)
        self._node.counters["peers_lost"] += 1
        level = "debug" if reason == "closed" else "info"  # each command of `pw` ends so
        log(level, "peer lost", self.name, peer=link.node, reason=reason)
        self._node.tell_all(link.node, msg.PeerLost(link.node, reason))

    def _refuse(self, node: str, error: ErrorReport, link: Link | None) -> None:
        if link is not None:
            self._drop(link)
        self._node.counters["peers_refused"] += 1
        log("warning", "peer refused", self.name, peer=node, error=error.message)
        self._node.tell_all(node, msg.PeerRefused(node, error))

    # --- time ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Begin to look at all links (`look_at_some`); to be called every `heartbeat_s`."""
        while self.look_at_some():
            pass  # this process is late
        now_s = self._clock()
        self._away_s, self._ticked_s = now_s - self._ticked_s, now_s
        self._end_revoked()
        self._unlooked = list(self.links.values())

    def look_at_some(self) -> bool:
        """Look at the next links of this tick, and return whether some are left.

        Thousands of links at once would delay launches.
        """
        was_away = self._away_s > 2 * self._heartbeat_s + 0.5
        some, self._unlooked = self._unlooked[: self.looks], self._unlooked[self.looks :]
        for link in some:
            if self.links.get(link.node) is link:
                if link.may_be_silent() or was_away:
                    link.excuse(self._away_s)
                self.look(link)
        return bool(self._unlooked)

    def look(self, link: Link) -> None:
        """Lose a peer that is silent for too long; send it a heartbeat if nothing else was sent."""
        now_s = self._clock()
        if link.incarnation is None:
            absent_s = self._absent_s if link.node == CONTROLLER else math.inf
            reason = link.unreached(now_s, self._connect_s, absent_s)
        else:
            quick_s = DEAD_HEARTBEATS * self._heartbeat_s if link.silence_s else math.inf
            lease_s = min(self.lease_s, quick_s)
            reason = link.complaint(now_s, lease_s, self.patience_s)
        if reason:
            self._lose(link, reason, msg.Goodbye())
            return
        if link.falls_silent(now_s, QUIET_HEARTBEATS * self._heartbeat_s):
            self._node.tell_all(link.node, msg.PeerSilent(link.node))
        if link.is_idle(now_s, self._heartbeat_s):
            self._ship_pieces(link, _HEARTBEAT)
