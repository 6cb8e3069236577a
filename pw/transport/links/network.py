"""Messages between processes, over connections that speak ZeroMQ's wire protocol.

To ZeroMQ, a node that can be dialled is a ROUTER, and a node that dials is a DEALER. What is said on
the connections, and when a peer is lost, is in `pw.transport.links.links`.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable

from pw.core.ids import CONTROLLER
from pw.core.messages import Hello
from pw.core.waits import CLIENT_TIMEOUT_S
from pw.transport.access.credentials import Credentials
from pw.transport.access.security import Security
from pw.transport.endpoints import SocketAddress, is_off_loopback, is_on_loopback, parse
from pw.transport.links.admission import Access
from pw.transport.links.connection import StreamConnection, TakeChunks
from pw.transport.links.entrance import Entrance
from pw.transport.links.interface import LOST, Connection, Mailroom
from pw.transport.links.link import Versions
from pw.transport.links.links import Links
from pw.transport.links.strangers import Strangers

CLOSE_LINGER_S = 0.2
LOOK_S = 0.01
"""Time between looks at some links and at the next ones."""


class StreamNetwork(Links):
    """Reaches other processes over tcp:// and ipc:// (see `pw.transport.links.interface.Network`).

    Args:
        loop: the event loop to live on.
        name: this node's name, as peers will address it.
        incarnation: grows with every start of a node of this name.
        bind: where to listen, such as "tcp://127.0.0.1:0"; None for a node that only dials.
        advertise: host, and perhaps port, to tell others (`endpoints.reachable_endpoint`).
        versions: what to say in the hello; by default what is installed.
        heartbeat_s: an open link carries a frame at least this often.
        lease_s: a silent peer is lost when its machine has answered nothing for so long.
        patience_s: a peer that is silent for so long is lost, though its machine answers.
        own_silence_s: after so long a silence peers lose this node though its machine answers; 0 for no bound.
        connect_s: a peer that does not answer our hello for so long is lost.
        absent_s: so is the controller if no process has listened at its address for so long.
        send_buffer_bytes: the size of the kernel's buffer for each peer; 0 for its choice.
        credentials: for TLS on tcp. Without any, tcp endpoints serve only this user's processes on
            this machine (`pw.transport.links.nearby`), and with `insecure` every process, without TLS.

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
        lease_s: float = 10.0,
        patience_s: float = CLIENT_TIMEOUT_S,
        own_silence_s: float = 0.0,
        connect_s: float = 10.0,
        absent_s: float = math.inf,
        send_buffer_bytes: int = 0,
        credentials: Credentials | None = None,
        insecure: bool = False,
    ) -> None:
        access = Access(name, credentials)
        installed = versions or Versions.installed()
        super().__init__(
            Hello(*installed, name, incarnation, own_silence_s),
            access,
            loop.time,
            heartbeat_s=heartbeat_s,
            lease_s=lease_s,
            patience_s=patience_s,
            connect_s=connect_s,
            absent_s=absent_s,
        )
        self._loop = loop
        self._security = Security(credentials, insecure)
        self._send_buffer_bytes = send_buffer_bytes
        self.strangers: Strangers[StreamConnection] = Strangers(
            lambda one: not (one.is_open or one.closed)
        )
        """Connections over tcp whose peers have not said who they are."""
        self._entrance = None
        if bind:
            self._entrance = Entrance(
                loop, self, bind, advertise, access, self._security, self._warnings
            )
        self.endpoint = self._entrance.endpoint if self._entrance else ""
        """Endpoint at which other nodes reach this one; empty if it does not listen."""
        self.take_chunks: TakeChunks = lambda stream, head: stream.close()
        """Takes connections that are for chunks: `BulkPlane.adopt`."""
        self._tick_handle: asyncio.TimerHandle | None = None
        self._look_handle: asyncio.TimerHandle | None = None

    def attach(self, node: Mailroom) -> None:
        """Deliver to this node from now on, and begin to listen."""
        super().attach(node)
        if self._entrance is not None:
            self._entrance.open()
        self._tick_handle = self._loop.call_later(self._heartbeat_s, self.tick)

    def introduce(self, node: str, endpoint: str) -> None:
        """Make `node` reachable; warn if a host of a cluster on several machines is so only on its own."""
        if is_off_loopback(self.endpoint) and is_on_loopback(endpoint) and node != CONTROLLER:
            words = "no other machine can dial this peer, unless it gets another --bind"
            self._warnings.once(("loopback", node), words, node, endpoint=endpoint)
        super().introduce(node, endpoint)

    def connect(self, node: str, endpoint: str) -> StreamConnection:
        """Dial a node (see `Links.connect`)."""
        return self._connection(parse(endpoint), node)

    @property
    def take(self) -> Callable[[Callable[[], object]], None]:
        """Reads what has come, and handles it now or soon."""
        return self._node.take

    def accept(self, accepted: socket.socket) -> StreamConnection:
        """Begin a connection with a process that has dialled this node."""
        self._end_revoked()
        connection = self._connection(accepted)
        self.admit(connection)
        return connection

    def _connection(self, end: SocketAddress | socket.socket, node: str = "") -> StreamConnection:
        buffer_bytes, security = self._send_buffer_bytes, self._security
        return StreamConnection(
            self._loop,
            self,
            end,
            buffer_bytes,
            security=security,
            node=node,
            handshake_s=self.strangers.handshake_s,
        )

    def ended(self, connection: Connection, reason: str) -> None:
        """The peer, or the kernel, has closed a connection."""
        if self._entrance and reason != LOST and self.connections.get(connection) is None:
            self._entrance.ended(reason)
        super().ended(connection, reason)

    def refused(self, connection: Connection, reason: str) -> None:
        """A connection has closed, because one end refuses the other."""
        if self._entrance and self.connections.get(connection) is None:
            self._entrance.refused(connection.peer, connection.identity, reason)
        super().refused(connection, reason)

    def tick(self) -> None:
        """Look at all links, now and every `heartbeat_s`."""
        self._tick_handle = self._loop.call_later(self._heartbeat_s, self.tick)
        super().tick()
        self._look_on()

    def _look_on(self) -> None:
        """Look at the links of this tick, with time for messages between some and the next."""
        if self._look_handle is not None:
            self._look_handle.cancel()
        more = self.look_at_some()
        self._look_handle = self._loop.call_later(LOOK_S, self._look_on) if more else None

    def close(self, linger_s: float = CLOSE_LINGER_S) -> None:
        """Say goodbye to all peers, and stop listening."""
        super().close(linger_s)
        for handle in filter(None, (self._tick_handle, self._look_handle)):
            handle.cancel()
        if self._entrance is not None:
            self._entrance.close()
