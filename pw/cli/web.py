"""Serves applications to browsers and scrapers, with bounds for connections of strangers.

Theory of operation. Uvicorn speaks HTTP over connections that this module accepts. A connection is a stranger's
until a request shows the token. Strangers are bounded in number like those of a node
(`pw.transport.links.strangers`), also before their TLS handshake has ended. A stranger has five seconds until
its first request is complete, and as long from an answer to the next request, however many bytes it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import typer
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pw.cli.process import check_bind
from pw.transport.access.security import Security
from pw.transport.endpoints import NO_DESCRIPTORS_S, listen, reachable_endpoint
from pw.transport.links.strangers import Strangers

ENDING_S = 1

Peer = tuple[str, int]
"""The address and the port of a browser."""


class _Guest:
    """A connection of a browser."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, handshake_s: float
    ) -> None:
        self._loop = loop
        self._handshake_s = handshake_s
        self.connection = connection
        self.transport: asyncio.BaseTransport | None = None
        self.is_admitted = False
        """Whether the connection has shown the token."""
        self._is_dropped = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_stranger(self) -> bool:
        """Whether it may be dropped for others."""
        return not (self.is_admitted or self.is_gone)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self._is_dropped or (self.transport is not None and self.transport.is_closing())

    def expect_request(self) -> None:
        """Drop the connection if no request comes in time, unless it is admitted."""
        self.heard()
        if self.is_stranger:
            self._timer = self._loop.call_later(self._handshake_s, self.drop)

    def heard(self) -> None:
        """A request has come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drop(self) -> None:
        """End the connection at once."""
        self.heard()
        self._is_dropped = True
        if self.transport is not None:
            self.transport.abort()  # type: ignore[attr-defined]  # all transports of sockets have it
        else:  # its handshake fails
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


class _Door:
    """Accepts connections, and knows which are strangers'."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        self._loop = loop
        self._listener = listener
        self._guests: dict[Peer, _Guest] = {}
        self.strangers: Strangers[_Guest] = Strangers(lambda one: one.is_stranger)
        self._tasks: set[asyncio.Task[None]] = set()
        self._protocol: Callable[[], asyncio.Protocol]
        self._context: ssl.SSLContext | None = None

    def open(
        self, protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
    ) -> None:
        """Begin to accept connections for this protocol."""
        self._protocol, self._context = protocol, context
        self._listen()

    def close(self) -> None:
        """Accept nothing any more."""
        self._loop.remove_reader(self._listener)
        for task in self._tasks:
            task.cancel()

    def admit(self, peer: Peer | None) -> None:
        """A browser has shown the token."""
        if peer is not None and (guest := self._guests.get(peer)) is not None:
            guest.is_admitted = True

    def watched(self, application: ASGIApp) -> ASGIApp:
        """Return the application with a bound for the time between requests of strangers."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            guest = self._guests.get(scope.get("client") or ("", 0))
            if guest is None:
                await application(scope, receive, send)
                return
            guest.heard()
            try:
                await application(scope, receive, send)
            finally:
                guest.expect_request()

        return answer

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(NO_DESCRIPTORS_S, self._listen)
            return
        connection.setblocking(False)
        self._guests = {at: one for at, one in self._guests.items() if not one.is_gone}
        guest = _Guest(self._loop, connection, self.strangers.handshake_s)
        oldest = self.strangers.add(guest, peer[0])
        if oldest is not None:
            oldest.drop()
        guest.expect_request()
        task = self._loop.create_task(self._greet(guest, (peer[0], peer[1])))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, guest: _Guest, peer: Peer) -> None:
        """Do the handshake, and have the protocol go on."""

        def protocol() -> asyncio.Protocol:
            self._guests[peer] = guest
            return self._protocol()

        try:
            guest.transport, _ = await self._loop.connect_accepted_socket(
                protocol, guest.connection, ssl=self._context
            )
        except OSError:  # also ssl.SSLError: it speaks no TLS, or has gone
            guest.drop()
            guest.connection.close()


class _Server(uvicorn.Server):
    """A server on the loop of a daemon, which handles the signals, for the connections of a door."""

    def __init__(self, config: uvicorn.Config, door: _Door) -> None:
        super().__init__(config)
        self._door = door

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the daemon."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Have the door accept, in place of a server of the loop."""
        config = self.config
        make: Any = config.http_protocol_class
        self.servers = []
        self._door.open(
            lambda: make(config=config, server_state=self.server_state, app_state={}), config.ssl
        )
        self.started = True


class WebServer:
    """A server for browsers on a socket of its own.

    Args:
        endpoint: where it listens, such as `tcp://127.0.0.1:8265`.
        security: its credentials, for TLS.
        loop: the event loop to live on.

    Raises:
        typer.BadParameter: browsers cannot reach the endpoint, or only with credentials.
    """

    def __init__(self, endpoint: str, security: Security, loop: asyncio.AbstractEventLoop) -> None:
        check_bind(endpoint, security)
        if not endpoint.startswith("tcp://"):
            raise typer.BadParameter(f"a browser cannot reach {endpoint!r}; give tcp://host:port")
        self._loop = loop
        self._socket = listen(endpoint)
        self._door = _Door(loop, self._socket)
        self.credentials = security.credentials
        self.strangers = self._door.strangers
        """Connections of browsers that have not shown the token."""
        self.admit = self._door.admit
        """Function that takes the peer of a connection that has shown the token."""
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Return the port that listens."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The address for browsers, without a path."""
        scheme = "http" if self.credentials is None else "https"
        return reachable_endpoint(self._socket, None).replace("tcp", scheme, 1)

    def serve(self, application: ASGIApp) -> None:
        """Begin to serve an application."""
        credentials, plain = self.credentials, None

        def context(*_: object) -> ssl.SSLContext:
            assert credentials is not None
            return credentials.for_browsers()

        config = uvicorn.Config(
            self._door.watched(application),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # strangers may send anything
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=ENDING_S,
            ssl_context_factory=plain if credentials is None else context,
        )
        self._server = _Server(config, self._door)
        self._task = self._loop.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        """End all connections."""
        self._door.close()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=3 * ENDING_S)
