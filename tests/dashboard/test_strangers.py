"""Connections of strangers at the page and at the metrics: bounded in number and in time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pw.cli.web import WebServer
from pw.core.messages.roles import Role
from pw.operating.dashboard.server import Guard
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.access.security import Security
from pw.transport.links import strangers
from tests.stages.daemons import until

TOKEN = "sesame"
WAIT_S = 60.0


class Site:
    """A server on a thread of its own, with a page, and a stream that goes on as it is told."""

    def __init__(self, security: Security, token: str) -> None:
        self.loop = uvloop.new_event_loop()
        self.server = WebServer("tcp://127.0.0.1:0", security, self.loop)
        self.address = ("127.0.0.1", self.server.port)
        self.news = asyncio.Event()
        routes = [Route("/", self._page, methods=["GET", "POST"]), Route("/events", self._events)]
        application = Starlette(routes=routes)
        admit = self.server.admit
        self.server.serve(Guard(application, token, "pw", admit) if token else application)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def _page(self, request: Request) -> Response:
        return PlainTextResponse("here")

    async def _events(self, request: Request) -> Response:
        async def parts() -> object:
            yield b"first"
            await self.news.wait()
            yield b"second"

        return StreamingResponse(parts())  # type: ignore[arg-type]

    def tell(self) -> None:
        """Have streams go on."""
        self.loop.call_soon_threadsafe(self.news.set)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(WAIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


@contextmanager
def site(security: Security, token: str = TOKEN) -> Iterator[Site]:
    one = Site(security, token)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(params=["plain", "tls"])
def security(request: pytest.FixtureRequest, tmp_path: Path) -> Security:
    if request.param == "plain":
        return Security()
    file = tmp_path / "ann.pem"
    file.touch(0o600)
    file.write_bytes(Authority.create().issue(Role.CLIENT, "ann", "research"))
    return Security(Credentials.read(str(file)))


def dialled(at: Site) -> socket.socket:
    return socket.create_connection(at.address, timeout=WAIT_S)


def greeted(at: Site) -> socket.socket:
    """Return a connection, after its handshake if there is one."""
    connection = dialled(at)
    if at.server.credentials is None:
        return connection
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection)


def asked(path: str = "/", token: str = TOKEN, body: int = 0) -> bytes:
    method = f"POST {path}" if body else f"GET {path}"
    bearer = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"{method} HTTP/1.1\r\nHost: pw\r\n{bearer}Content-Length: {body}\r\n\r\n".encode()


def status(connection: socket.socket) -> int:
    """Read the first part of an answer."""
    return int(connection.recv(1 << 16).split()[1])


def until_second(stream: socket.socket) -> None:
    """Wait for the end of a stream."""
    stream.settimeout(WAIT_S)
    seen = b""
    while b"second" not in seen:
        part = stream.recv(1 << 16)
        assert part, "the stream was dropped"
        seen += part


def has_ended(connection: socket.socket) -> bool:
    """Look whether the server has ended a connection; what came before is read."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        pass
    return True


def is_open_after(connection: socket.socket, send: bytes) -> bool:
    """Send some bytes more. Returns whether the connection is still open."""
    try:
        connection.sendall(send)
    except OSError:
        return False
    return not has_ended(connection)


def test_hundreds_of_silent_strangers_keep_no_browser_out(security: Security) -> None:
    """They have not ended their handshake, or the first line of their request."""
    with site(security) as here, ExitStack() as all_of_them:
        stream = all_of_them.enter_context(greeted(here))
        stream.sendall(asked("/events"))
        assert status(stream) == 200
        idle = []
        for number in range(3 * strangers.STRANGERS_OF_ADDRESS):
            connection = greeted(here) if number % 8 == 0 else dialled(here)
            idle.append(all_of_them.enter_context(connection))
            if number % 8 == 1:
                connection.sendall(b"\x16" if here.server.credentials else b"GET / HT")
        until(
            lambda: sum(not has_ended(one) for one in idle) <= strangers.STRANGERS_OF_ADDRESS,
            "the end of the oldest strangers",
        )
        with greeted(here) as browser:
            browser.sendall(asked())
            assert status(browser) == 200
        here.tell()
        until_second(stream)


SLOW: dict[str, Callable[[Site], tuple[socket.socket, bytes, bytes]]] = {
    "no handshake": lambda at: (dialled(at), b"", b""),
    "half a handshake": lambda at: (dialled(at), b"\x16\x03\x01", b""),
    "no request": lambda at: (greeted(at), b"", b""),
    "a request byte by byte": lambda at: (greeted(at), b"GET / HTTP/1.1\r\nHost: pw\r\n", b"X"),
    "a body byte by byte": lambda at: (greeted(at), asked(token="", body=1 << 20), b"X"),
    "a second request": lambda at: (greeted(at), asked(token="") + b"GET / HTTP/1.1\r\n", b"X"),
}


@pytest.mark.parametrize("token", [TOKEN, ""])
@pytest.mark.parametrize("how", SLOW)
def test_a_slow_stranger_is_dropped(how: str, token: str, security: Security) -> None:
    """At the page and, without a token, at the metrics."""
    with site(security, token) as here:
        connection = None
        here.server.strangers.handshake_s = 0.3
        while connection is None:
            try:
                connection, first, later = SLOW[how](here)
                connection.sendall(first)
            except OSError:  # this machine is so slow that it was dropped before that
                connection = None
                here.server.strangers.handshake_s *= 2
                assert here.server.strangers.handshake_s < WAIT_S
        with connection:
            until(lambda: not is_open_after(connection, later), "the end of the connection")


def test_who_has_the_token_may_be_slow(security: Security) -> None:
    with site(security) as here, greeted(here) as stream:
        stream.sendall(asked("/events"))
        assert status(stream) == 200
        here.server.strangers.handshake_s = 0.1
        with dialled(here) as stranger:
            until(lambda: has_ended(stranger), "the end of a stranger that came later")
        here.tell()
        until_second(stream)


def test_a_refused_connection_ends(security: Security) -> None:
    with site(security) as here, greeted(here) as stranger:
        stranger.sendall(asked(token="wrong"))
        assert status(stranger) == 403
        until(lambda: has_ended(stranger), "the end of the connection")


def test_the_strangers_of_all_addresses_are_bounded(security: Security) -> None:
    with site(security) as here, ExitStack() as idle:
        here.server.strangers.most, here.server.strangers.most_of_address = 5, 3
        dials = []
        for number in range(2, 22):
            raw = idle.enter_context(socket.socket())
            raw.settimeout(WAIT_S)
            raw.bind((f"127.0.0.{number}", 0))
            raw.connect(here.address)
            dials.append(raw)
        until(lambda: sum(not has_ended(one) for one in dials) <= 5, "the end of the oldest")
        with greeted(here) as browser:
            browser.sendall(asked())
            assert status(browser) == 200
