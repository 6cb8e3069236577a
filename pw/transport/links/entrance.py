"""Accepts the processes that dial a node, and bounds how many of them have not greeted yet.

A node listens at its endpoint and, without credentials, over a unix socket beside it, for processes
of this machine (`pw.transport.links.nearby`). Tcp connections that have not greeted are strangers.
Their number is bounded (`pw.transport.links.strangers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol

from pw.core.errors import ConnectionFailed
from pw.transport.access.identity import Identity
from pw.transport.access.security import NO_CREDENTIALS, Security
from pw.transport.access.tls import plain_alert
from pw.transport.access.unix import is_trusted
from pw.transport.endpoints import NO_DESCRIPTORS_S, listen, reachable_endpoint, unlisten
from pw.transport.links import nearby
from pw.transport.links.admission import Access
from pw.transport.links.connection import StreamConnection
from pw.transport.links.strangers import Strangers
from pw.transport.log import Warnings


class Network(Protocol):
    """The network that listens."""

    name: str
    strangers: Strangers[StreamConnection]
    """Connections over tcp whose peers have not said who they are."""

    def accept(self, accepted: socket.socket) -> StreamConnection:
        """Begin a connection."""

    def turn_away(self, connection: StreamConnection) -> None:
        """Drop a connection that has not greeted, and say nothing."""

    def count(self, counter: str) -> None:
        """Count an event."""


class Entrance:
    """The listening sockets of a node.

    Args:
        loop: the event loop to live on.
        network: gets the connections.
        bind: where to listen, such as "tcp://127.0.0.1:0".
        advertise: host, and perhaps port, to tell others (`endpoints.reachable_endpoint`).
        access: writes the audit lines.
        security: how the node uses tcp.
        warnings: of the node.

    Raises:
        ConnectionFailed: `bind` cannot be listened on, or no process could connect there.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        network: Network,
        bind: str,
        advertise: str | None,
        access: Access,
        security: Security,
        warnings: Warnings,
    ) -> None:
        self._loop = loop
        self._network = network
        self._access = access
        self._security = security
        self._warnings = warnings
        self._closed = False
        listener = listen(bind)
        try:
            self.endpoint = reachable_endpoint(listener, advertise)
        except ConnectionFailed:
            unlisten(listener)
            raise
        near = None if security.credentials else nearby.listen(self.endpoint)
        if near is None and listener.family != socket.AF_UNIX and not security.takes_tcp:
            unlisten(listener)
            raise ConnectionFailed(
                f"no process could connect to {self.endpoint}: without credentials it is served over a unix "
                "socket of this machine, which cannot be made; choose another port, or give --credentials"
            )
        self._listeners = [listener] if near is None else [listener, near]

    def open(self) -> None:
        """Begin to accept connections."""
        for listener in self._listeners:
            self._listen(listener)

    def close(self) -> None:
        """Accept nothing any more."""
        self._closed = True
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            unlisten(listener)

    def refused(self, peer: str, identity: Identity | None, reason: str) -> None:
        """A stranger is refused."""
        self._network.count("connections_refused")
        fields = {} if identity is None else {"name": identity.uri}
        self._warnings.once(reason, "a connection is refused", peer, **fields, reason=reason)
        self._access.refused(peer, identity, reason)

    def ended(self, reason: str) -> None:
        """A stranger's connection has ended, and not because its process has."""
        self._network.count("connections_malformed")
        self._warnings.once(reason, "a stranger's connection", self._network.name, reason=reason)

    def _listen(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        network = self._network
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            network.count("accepts_deferred")
            words = "cannot accept connections"
            self._warnings.once("accept", words, network.name, reason=error)
            self._loop.remove_reader(listener)
            self._loop.call_later(NO_DESCRIPTORS_S, self._listen, listener)
            return
        if not is_trusted(connection):
            connection.close()
            network.count("connections_refused")
            self._warnings.once("user", "another user's process has dialled", network.name)
        elif connection.family == socket.AF_UNIX:
            network.accept(connection)
        elif self._security.takes_tcp:
            self._make_room(network.accept(connection))
        else:
            peer = "tcp"
            with contextlib.suppress(OSError):  # the dialler is gone
                peer = "{}:{}".format(*connection.getpeername())
                connection.setblocking(False)
                connection.send(plain_alert())
            connection.close()
            self.refused(peer, None, NO_CREDENTIALS)

    def _make_room(self, new: StreamConnection) -> None:
        """Count a new stranger, and drop the oldest if there are too many."""
        oldest = self._network.strangers.add(new, new.peer.rpartition(":")[0])
        if oldest is not None:
            self._network.count("connections_crowded_out")
            self._network.turn_away(oldest)
