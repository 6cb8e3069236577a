"""Accepts connections to a node: over its endpoint and, without credentials, from the same machine
over a unix socket beside it."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from pw.core.errors import ConnectionFailed
from pw.transport.access.security import Security
from pw.transport.access.unix import is_trusted
from pw.transport.endpoints import listen, reachable_endpoint, unlisten
from pw.transport.links import nearby

_NO_DESCRIPTORS_S = 1.0
"""How long no connection is accepted after the process had no descriptor for one."""


class Owner(Protocol):
    """The network that listens."""

    def accepted(self, connection: socket.socket) -> None:
        """A process of this user, or on another machine, has dialled."""

    def refused_user(self) -> None:
        """A process of another user has dialled; its connection is closed."""

    def deferred(self, error: OSError) -> None:
        """A connection cannot be accepted now; the dialler has to wait."""


class Listening:
    """The listening sockets of a node.

    Args:
        loop: the event loop to live on.
        owner: the network.
        bind: where to listen, such as "tcp://127.0.0.1:0".
        advertise: host, and perhaps port, to tell others (`endpoints.reachable_endpoint`).
        security: how the node uses tcp.

    Raises:
        ConnectionFailed: `bind` cannot be listened on, or no process could connect there.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        owner: Owner,
        bind: str,
        advertise: str | None,
        security: Security,
    ) -> None:
        self._loop = loop
        self._owner = owner
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

    def start(self) -> None:
        """Begin to accept connections."""
        for listener in self._listeners:
            self._listen(listener)

    def close(self) -> None:
        """Accept nothing any more."""
        self._closed = True
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            unlisten(listener)

    def _listen(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._owner.deferred(error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_NO_DESCRIPTORS_S, self._listen, listener)
            return
        if is_trusted(connection):
            self._owner.accepted(connection)
        else:
            connection.close()
            self._owner.refused_user()
