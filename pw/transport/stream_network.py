"""Messages between processes, over connections that speak ZeroMQ's wire protocol.

To ZeroMQ, a node that can be dialled is a ROUTER, and whoever dials it is a DEALER. A link works in
both directions: who learns of a peer by its hello answers on the connection on which the hello
came, which is how the controller and hosts reach clients, which bind nothing. When two nodes dial
each other at the same time, each keeps speaking on the connection it has made. A link and its
connections end together.

Life of a link, as one end sees it:

    absent -first send-> dialled -hello comes-> open
    absent -hello comes-> open, with a hello in answer
    open -frame number missing, silence, connection gone, goodbye-> absent, PeerLost
    dialled -no hello within connect_s-> absent, PeerLost
    any -versions differ, or the name is taken-> absent, PeerRefused
    open -hello of the same or a newer incarnation-> absent, PeerLost, and open again

Frames are numbered in each direction, from the hello, which is number 0 and a frame of its own.
Refusals and goodbyes carry the number UNNUMBERED, since they may answer somebody with whom there is
no link: a frame of a stranger that is not a hello is answered with one goodbye, so that a peer that
kept its link while we lost ours hears of it at once, and not by our silence.

Silence is judged only by a process that has listened: after all input has been read, and never by
one that finds that it was itself stopped, or is behind with its own mailbox. How long a peer may be
silent is the peer's to say, in its hello: hosts want to be given up soon, so that others can take
their place, while clients want to keep what they own through a long pause.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from pw.core.errors import AccessRefused, ConnectionFailed, ErrorReport, ProtocolError
from pw.core.ids import CONTROLLER, Address
from pw.core.messages import Goodbye, Heartbeat, Hello, PeerLost, PeerRefused, Refused
from pw.transport import codec, nearby
from pw.transport.connection import LOST, Connection
from pw.transport.endpoints import (
    SocketAddress,
    is_off_loopback,
    is_on_loopback,
    listen,
    parse,
    reachable_endpoint,
    unlisten,
)
from pw.transport.link import Link, Versions, version_mismatch
from pw.transport.log import log
from pw.transport.network import Mailroom
from pw.transport.peers import is_trusted
from pw.transport.proof import ProofMechanism
from pw.transport.zmtp import Mechanism

UNNUMBERED = -1
CLOSE_LINGER_S = 0.2
LONGEST_SILENCE_S = 600.0
"""A peer that wants to be waited for longer than this is waited for as long as we like."""
BACKLOG_MESSAGES = 20_000
_STRANGERS_REMEMBERED = 1000
_NO_DESCRIPTORS_S = 1.0

_LINK_KINDS = frozenset((Hello, Refused, Heartbeat, Goodbye))
_HEARTBEAT = [codec.encode_names("", ""), codec.encode_message(Heartbeat())]


class StreamNetwork:
    """Reaches other processes over tcp:// and ipc:// (see `pw.transport.network.Network`).

    Args:
        loop: the event loop to live on.
        name: this node's name, as peers will address it.
        incarnation: grows with every start of a node of this name.
        bind: where to listen, such as "tcp://127.0.0.1:0"; None for a node that only dials.
        advertise: host name or address to tell others when `bind` is a wildcard.
        versions: what to say in the hello; by default what is installed.
        heartbeat_s: an open link carries a frame at least this often.
        silence_s: a peer that says nothing for so long is lost, unless its hello named another bound.
        own_silence_s: what to ask of peers in our hello; 0 for what they like.
        connect_s: a peer that does not answer the first call for so long is lost.
        send_buffer_bytes: what the kernel holds for one peer before senders wait; 0 for its choice.
        secret: of the cluster; both ends of every link prove that they know it. None for no secret.

    Raises:
        ConnectionFailed: `bind` cannot be listened on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        incarnation: int,
        *,
        bind: str | None = None,
        advertise: str | None = None,
        versions: Versions | None = None,
        heartbeat_s: float = 1.0,
        silence_s: float = 10.0,
        own_silence_s: float = 0.0,
        connect_s: float = 10.0,
        send_buffer_bytes: int = 0,
        secret: bytes | None = None,
    ) -> None:
        self.name = name
        self.endpoint = ""
        """Where others reach this node; empty if it does not listen."""
        self._loop = loop
        self._versions = versions or Versions.installed()
        self._hello = Hello(*self._versions, name, incarnation, own_silence_s)
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._connect_s = connect_s
        self._send_buffer_bytes = send_buffer_bytes
        self._mechanism = _mechanism(secret)
        self._node: Mailroom
        self._links: dict[str, Link] = {}
        self._served: dict[Connection, Link | None] = {}
        """Which link each connection serves; None for those of strangers."""
        self._endpoints: dict[str, str] = {}
        self._to_ship: list[Link] = []
        self._encoded: dict[int, tuple[object, bytes]] = {}
        self._strangers: set[object] = set()
        self._ticked_s = loop.time()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._closed = False
        self._listeners: list[socket.socket] = []
        if bind is not None:
            listener = listen(bind)
            try:
                self.endpoint = reachable_endpoint(listener, advertise)
            except ConnectionFailed:
                unlisten(listener)
                raise
            near = nearby.listen(self.endpoint)
            self._listeners = [listener] if near is None else [listener, near]

    # --- the Network protocol ------------------------------------------------------------------

    def attach(self, node: Mailroom) -> None:
        """Deliver to this node from now on."""
        self._node = node
        for listener in self._listeners:
            self._listen(listener)
        self._ticked_s = self._loop.time()
        self._tick_handle = self._loop.call_later(self._heartbeat_s, self._tick)

    def send(self, to: Address, sender: Address, message: object) -> None:
        """Take a message for another node; it leaves with the next `flush`, if not before.

        Raises:
            ProtocolError: the message cannot cross to another process.
        """
        cached = self._encoded.get(id(message))
        if cached is None:
            cached = self._encoded[id(message)] = (message, codec.encode_message(message))
        names, body = codec.encode_names(to.actor, sender.actor), cached[1]
        link = self._links.get(to.node) or self._dial(to.node)
        if link is None:
            self._node.counters["messages_unroutable"] += 1
            self._warn_once(("unroutable", to.node), "message to an unknown node", to.node)
            return
        size = len(names) + len(body)
        if link.pieces and link.pieces_bytes + size > codec.BATCH_BYTES:
            self._ship(link)
        if not link.pieces:
            self._to_ship.append(link)
        link.pieces.append(names)
        link.pieces.append(body)
        link.pieces_bytes += size

    def flush(self) -> None:
        """Let everything go that was sent in this loop turn, in one frame for each peer."""
        if self._to_ship:
            links, self._to_ship = self._to_ship, []
            for link in links:
                if link.pieces and self._links.get(link.node) is link:
                    self._ship(link)
        self._encoded.clear()

    def introduce(self, node: str, endpoint: str) -> None:
        """Make `node` reachable at `endpoint`; a link is made when first needed."""
        self._endpoints[node] = endpoint
        if node != CONTROLLER and is_off_loopback(self.endpoint) and is_on_loopback(endpoint):
            # It is on this machine, while we can be reached from others: from there it cannot.
            words = "no other machine can dial this host, unless it gets another --bind"
            self._warn_once(("loopback", node), words, node, endpoint=endpoint)
        link = self._links.get(node)
        if link is not None and link.endpoint not in ("", endpoint):
            self._lose(link, f"moved to {endpoint}", Goodbye())

    def forget(self, node: str) -> None:
        """Drop the link to `node`, its endpoint, and all that waits to be sent to it."""
        self._endpoints.pop(node, None)
        link = self._links.get(node)
        if link is not None:
            self._drop(link, Goodbye())

    def heard_s(self, node: str) -> float | None:
        """How many seconds ago something came from `node`; None without a link."""
        link = self._links.get(node)
        return None if link is None else self._loop.time() - _heard_s(link)

    def close(self) -> None:
        """Say goodbye to all peers; takes at most about 0.2 s."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            unlisten(listener)
        until_s = self._loop.time() + CLOSE_LINGER_S
        for link in list(self._links.values()):
            self._drop(link, Goodbye(), until_s)
        for connection in self._served:
            connection.close()
        self._served.clear()

    # --- connections ---------------------------------------------------------------------------

    def _dial(self, node: str) -> Link | None:
        endpoint = self._endpoints.get(node)
        if endpoint is None or self._closed:
            return None
        try:
            where = parse(endpoint)
        except ConnectionFailed as error:
            del self._endpoints[node]  # or every message would try again
            self._node.post_to_all(PeerLost(node, str(error)))
            return None
        connection = self._connection(where)
        link = Link(node, connection, endpoint, self._loop.time())
        self._links[node] = self._served[connection] = link
        self._say_hello(link)
        return link

    def _listen(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors left: whoever dials will try again
            self._node.counters["accepts_deferred"] += 1
            self._warn_once("accept", "cannot accept connections", self.name, reason=error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_NO_DESCRIPTORS_S, self._listen, listener)
            return
        if is_trusted(accepted):
            self._served[self._connection(accepted)] = None
            return
        accepted.close()
        self._node.counters["connections_refused"] += 1
        self._warn_once("user", "another user's process has dialled", self.name)

    def _connection(self, end: SocketAddress | socket.socket) -> Connection:
        return Connection(self._loop, self, end, self._send_buffer_bytes, self._mechanism)

    def is_behind(self) -> bool:
        """Whether the mailbox is so full that nothing should be received."""
        return self._node.backlog > BACKLOG_MESSAGES

    def ended(self, connection: Connection, reason: str) -> None:
        """A connection has closed, and not by us."""
        link = self._served.pop(connection, None)
        if link is not None:
            self._lose(link, reason)
        elif reason != LOST:
            self._node.counters["connections_malformed"] += 1
            self._warn_once(reason, "a stranger's connection", self.name, reason=reason)

    def refused(self, connection: Connection, reason: str) -> None:
        """A connection has closed, because one end does not trust the other."""
        link = self._served.pop(connection, None)
        if link is None:
            self._node.counters["connections_refused"] += 1
            self._warn_once(reason, "a stranger's connection", self.name, reason=reason)
            return
        words = (
            f"no link to {link.node} at {link.endpoint}: {reason}. All processes of a cluster have one secret. "
            "A unix socket has it in a file beside it; others are given it in a file that PW_SECRET_FILE "
            "names, or in PW_SECRET"
        )
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
        link.spoke_s = self._loop.time()
        counters = self._node.counters
        counters["frames_sent"] += 1
        counters["control_bytes_sent"] += len(frame)
        if not link.out.send(frame):
            counters["sends_deferred"] += 1

    def _answer(self, connection: Connection, message: Goodbye | Refused) -> None:
        """Say the last word to somebody, whether or not there is a link."""
        connection.send(codec.encode_frame(UNNUMBERED, [("", "", message)]))

    # --- incoming ------------------------------------------------------------------------------

    def received(self, connection: Connection, parts: list[bytes]) -> None:
        """A message has come on a connection."""
        link = self._served[connection]
        frame = self._decoded(parts, link.node if link else connection)
        if frame is None:
            return
        if link is not None and link.source is connection:
            self._from_peer(link, frame)
            return
        first = frame.envelopes[0][2] if frame.envelopes else None
        hello = first if frame.sequence == 0 and isinstance(first, Hello) else None
        if link is None:
            if hello is not None:
                self._greeted(connection, hello)
            elif frame.sequence != UNNUMBERED and self._untimely(connection, "a stranger"):
                self._answer(connection, Goodbye())
        elif frame.sequence == UNNUMBERED:
            self._from_peer(link, frame)
        elif link.source is None and hello is not None:
            self._answered(link, hello)
        else:
            self._untimely(connection, link.node)

    def _untimely(self, connection: Connection, peer: str) -> bool:
        self._node.counters["frames_malformed"] += 1
        return self._warn_once(connection, "frame without a hello", peer)

    def _decoded(self, parts: list[bytes], peer: object) -> codec.Frame | None:
        counters = self._node.counters
        counters["frames_received"] += 1
        try:
            if len(parts) != 1:
                raise codec.MalformedFrame(f"a message of {len(parts)} parts")
            counters["control_bytes_received"] += len(parts[0])
            return codec.decode(parts[0])
        except codec.MalformedFrame as error:
            counters["frames_malformed"] += 1
            self._warn_once(("malformed", peer), "malformed frame", peer, reason=error)
            return None

    def _from_peer(self, link: Link, frame: codec.Frame) -> None:
        numbered = frame.sequence != UNNUMBERED
        if numbered:
            if frame.sequence != link.received:
                reason = f"frames lost (expected {link.received}, got {frame.sequence})"
                self._lose(link, reason, Goodbye())
                return
            link.received += 1
            link.heard_s = self._loop.time()
        node = self._node
        node.counters["messages_received"] += len(frame.envelopes)
        for to_actor, from_actor, message in frame.envelopes:
            if type(message) in _LINK_KINDS:
                if isinstance(message, Goodbye):
                    self._lose(link, "closed")
                    return
                if isinstance(message, Refused):
                    self._refuse(link.node, message.error, link)
                    return
                if isinstance(message, Hello):
                    node.counters["frames_malformed"] += 1
            elif numbered:
                node.post(to_actor, message, link.address(from_actor))

    # --- hellos --------------------------------------------------------------------------------

    def _greeted(self, connection: Connection, hello: Hello) -> None:
        """A hello came from somebody who has dialled us."""
        link = self._links.get(hello.node)
        error = self._objection(hello)
        if error is not None:
            self._answer(connection, Refused(error))
            # Whoever misuses the name of a node that is here, or ours, is no news to actors.
            if hello.node == self.name or (link is not None and link.incarnation is not None):
                self._node.counters["hellos_refused"] += 1
            else:
                self._refuse(hello.node, error, link)
            return
        if link is not None and link.incarnation is not None:
            taken = f"a newer process has taken the name {hello.node}"
            refusal = Refused(ErrorReport.of(ConnectionFailed(taken), where=self.name))
            if hello.incarnation < link.incarnation:
                self._node.counters["hellos_refused"] += 1
                self._answer(connection, refusal)
                return
            if hello.incarnation > link.incarnation:
                self._lose(link, "replaced by a newer incarnation", refusal)
            else:
                self._lose(link, "connected anew")
            link = None
        if link is None:
            link = Link(hello.node, connection, "", self._loop.time())
            self._links[hello.node] = link
            self._open(link, connection, hello)
            self._say_hello(link)
            return
        unsent = link.out.withdraw()
        if unsent:  # our own call may go to where the peer was before it was started again
            self._served.pop(link.out)
            link.out, link.endpoint = connection, ""
            for frame in unsent:
                connection.send(frame)
        self._open(link, connection, hello)

    def _answered(self, link: Link, hello: Hello) -> None:
        """A hello came on a connection that we have made."""
        error = self._objection(hello)
        if error is None and hello.node != link.node:
            words = f"at {link.endpoint} answers {hello.node}, where {link.node} was expected"
            error = ErrorReport.of(ConnectionFailed(words), where=self.name)
        if error is None:
            self._open(link, link.out, hello)
        else:
            self._answer(link.out, Refused(error))
            self._refuse(link.node, error, link)

    def _objection(self, hello: Hello) -> ErrorReport | None:
        theirs = Versions.of(hello)
        if theirs != self._versions:
            return version_mismatch(self.name, self._versions, hello.node, theirs)
        if hello.node == self.name:
            words = f"two processes are called {self.name}; give each its own name"
            return ErrorReport.of(ProtocolError(words), where=self.name)
        return None

    def _open(self, link: Link, source: Connection, hello: Hello) -> None:
        link.source = source
        link.incarnation = hello.incarnation
        link.received = 1
        link.heard_s = self._loop.time()
        named = 0.0 < hello.silence_s <= LONGEST_SILENCE_S
        link.silence_s = hello.silence_s if named else self._silence_s
        self._served[source] = link
        log(
            "debug",
            "link open",
            self.name,
            "",
            {"peer": link.node, "incarnation": link.incarnation},
        )

    # --- ends of links -------------------------------------------------------------------------

    def _drop(
        self, link: Link, last_word: Goodbye | Refused | None = None, until_s: float = 0.0
    ) -> None:
        """Forget a link and close its connections without a report."""
        if self._links.get(link.node) is link:
            del self._links[link.node]
        link.pieces.clear()
        if last_word is not None and link.incarnation is not None:
            self._answer(link.out, last_word)
        for connection in filter(None, (link.out, link.source)):
            self._served.pop(connection, None)
            connection.close(until_s - self._loop.time())

    def _lose(self, link: Link, reason: str, last_word: Goodbye | Refused | None = None) -> None:
        if self._links.get(link.node) is not link:
            return
        self._drop(link, last_word)
        self._node.counters["peers_lost"] += 1
        log("info", "peer lost", self.name, "", {"peer": link.node, "reason": reason})
        self._node.post_to_all(PeerLost(link.node, reason))

    def _refuse(self, node: str, error: ErrorReport, link: Link | None) -> None:
        if link is not None:
            self._drop(link)
        self._node.counters["peers_refused"] += 1
        log("warning", "peer refused", self.name, "", {"peer": node, "error": error.message})
        self._node.post_to_all(PeerRefused(node, error))

    def _warn_once(self, key: object, event: str, peer: object, **fields: object) -> bool:
        if key in self._strangers:
            return False
        if len(self._strangers) >= _STRANGERS_REMEMBERED:
            self._strangers.clear()
        self._strangers.add(key)
        log("warning", event, self.name, "", {"peer": peer, **fields})
        return True

    # --- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_s = self._loop.time()
        was_away = now_s - self._ticked_s > 2 * self._heartbeat_s + 0.5 or self.is_behind()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        self._tick_handle = self._loop.call_later(self._heartbeat_s, self._tick)
        for link in list(self._links.values()):
            if was_away:  # we did not listen, so their silence means nothing
                link.heard_s += away_s
                link.made_s += away_s
                if link.source is not None:
                    link.source.heard_s += away_s
            if link.incarnation is None:
                if now_s - link.made_s > self._connect_s:
                    self._lose(link, f"could not be reached at {link.endpoint}")
                continue
            if now_s - _heard_s(link) > link.silence_s and not self._listen_to(link, now_s):
                self._lose(link, f"silent for {link.silence_s:g} s", Goodbye())
                continue
            idle = now_s - link.spoke_s >= 0.9 * self._heartbeat_s
            if idle and not link.out.is_waiting:
                self._ship_pieces(link, _HEARTBEAT)

    def _listen_to(self, link: Link, now_s: float) -> bool:
        """Read what has come; whether the peer was heard after all, or may yet be."""
        unread = link.source is not None and link.source.receive()
        return unread or now_s - _heard_s(link) <= link.silence_s


def _heard_s(link: Link) -> float:
    """When a frame came last, or a part of one: a large one may take longer than any silence."""
    return link.heard_s if link.source is None else max(link.heard_s, link.source.heard_s)


def _mechanism(secret: bytes | None) -> Callable[[bytes], Mechanism] | None:
    if secret is not None:
        return lambda kind: ProofMechanism(secret, kind == b"ROUTER", kind)
    return None
