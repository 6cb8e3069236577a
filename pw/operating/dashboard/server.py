"""Serves the page of a reader and its metrics, to those who have the token.

Theory of operation. Snapshots come from the reader's thread. Each browser has one event stream, and in it at
most one snapshot that waits: a newer one takes its place, so a slow browser sees fewer and costs no
memory. A browser that takes nothing for `STALLED_S` is dropped. What the page asks for at a click goes to the
reader, which asks the controller at its own pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pw.client.display.tables import Shown
from pw.client.looking.plan import Plan
from pw.client.looking.queue import ClusterQueue
from pw.core.errors import Error
from pw.operating.dashboard.metrics import Metrics
from pw.operating.dashboard.reader import Busy, Reader
from pw.operating.dashboard.snapshot import Snapshot, devices_of

PAGE = Path(__file__).parent / "page"
FILES = {"": "index.html", "page.js": "page.js", "page.css": "page.css"}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
MOST_BROWSERS = 64
STALLED_S = 30.0
CLICK_S = 20.0
POLICY = (
    "default-src 'self'",
    "img-src 'self' data:",
    "frame-ancestors 'none'",
    "form-action 'none'",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LINK = "open the link that pw has printed when it started the dashboard: it has a token"

Admit = Callable[[tuple[str, int] | None], None]
"""Function that takes the address and port of a connection that has shown the token."""

_json = msgspec.json.Encoder()


class Page:
    """The application of one reader.

    Args:
        reader: where snapshots come from.
        loop: the event loop that serves.
    """

    def __init__(self, reader: Reader, loop: asyncio.AbstractEventLoop) -> None:
        self._reader = reader
        self._loop = loop
        self._newest = b""
        self._browsers: set[asyncio.Event] = set()
        self._is_closing = False
        reader.is_watched = lambda: bool(self._browsers)
        reader.listeners.append(self._arrived)

    def application(self, token: str, name: str, admit: Admit) -> ASGIApp:
        """Return the ASGI application; `name` is that of its cookie."""
        routes = [
            *(Route(f"/{path}", self._file) for path in FILES),
            Route("/events", self._events),
            Route("/island/{name:path}", self._island),
            Route("/picture", self._picture),
            Route("/why", self._why),
            Route("/queue", self._queue),
            Route("/plan", self._plan),
            Route("/trace", self._trace, methods=["POST"]),
        ]
        return Guard(Starlette(routes=routes), token, name, admit)

    def close(self) -> None:
        """End all streams."""
        self._is_closing = True
        for browser in self._browsers:
            browser.set()

    # --- snapshots -----------------------------------------------------------------------------------

    def _arrived(self, snapshot: Snapshot) -> None:
        if self._browsers:
            payload = _json.encode(snapshot)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._show, payload)

    def _show(self, payload: bytes) -> None:
        self._newest = b"data: " + payload + b"\n\n"
        for browser in self._browsers:
            browser.set()

    async def _events(self, request: Request) -> Response:
        if len(self._browsers) >= MOST_BROWSERS:
            return PlainTextResponse("too many browsers look at this dashboard", 503)
        return EventStream(self._stream(), media_type="text/event-stream", headers=HEADERS)

    async def _stream(self) -> AsyncIterator[bytes]:
        news = asyncio.Event()
        self._browsers.add(news)
        try:
            history = _json.encode(list(self._reader.history))
            yield b"event: history\ndata: " + history + b"\n\n"
            if self._reader.newest is not None:
                yield b"data: " + _json.encode(self._reader.newest) + b"\n\n"
            while True:
                await news.wait()
                news.clear()
                if self._is_closing:
                    return
                yield self._newest
        finally:
            self._browsers.discard(news)

    # --- single answers ------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        file = PAGE / FILES[request.url.path.removeprefix("/")]
        return FileResponse(file, media_type=TYPES[file.suffix], headers=HEADERS)

    async def _island(self, request: Request) -> Response:
        """The devices of an island, from what is known already."""
        newest, wanted = self._reader.newest, request.path_params["name"]
        islands = () if newest is None else newest.islands
        match = next((island for island in islands if island.name == wanted), None)
        if match is None:
            return PlainTextResponse(f"there is no island {wanted!r}", 404)
        readings = self._reader.readings
        hosts = {host.name: devices_of(readings, host.name, host.devices) for host in match.hosts}
        return _answer(hosts)

    async def _picture(self, request: Request) -> Response:
        return _answer(self._reader.picture)

    async def _why(self, request: Request) -> Response:
        return await self._asked("why", "", lambda reply: {"text": reply.text})

    async def _queue(self, request: Request) -> Response:
        return await self._asked("queue", "", lambda reply: _shown(ClusterQueue.of(reply)))

    async def _plan(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        return await self._asked("plan", name, lambda reply: _shown(Plan.of(reply)))

    async def _asked(self, what: str, name: str, form: Callable[[Any], Any]) -> Response:
        try:
            future: Future[Any] = self._reader.ask(what, name)
            reply = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), CLICK_S)
        except Busy as error:
            return PlainTextResponse(str(error), 503)
        except Error as error:
            return PlainTextResponse(str(error), 404)
        except TimeoutError:
            return PlainTextResponse("the controller does not answer", 504)
        return _answer(form(reply))

    async def _trace(self, request: Request) -> Response:
        """Record a timeline, and send it as a file for Perfetto."""
        try:
            seconds = float(request.query_params.get("seconds", "2"))
        except ValueError:
            return PlainTextResponse("seconds is no number", 400)
        with tempfile.NamedTemporaryFile(suffix=".json", delete=False) as file:
            path = Path(file.name)
        try:
            summary = await asyncio.to_thread(self._reader.trace, path, seconds)
        except (Error, TimeoutError) as error:
            path.unlink()
            return PlainTextResponse(str(error), 503 if isinstance(error, Busy) else 400)
        return FileResponse(
            path,
            media_type="application/json",
            filename=time.strftime("pw-%Y%m%d-%H%M%S.json"),
            headers=HEADERS | {"X-Summary": quote(summary)},
            background=BackgroundTask(path.unlink),
        )


class EventStream(StreamingResponse):
    """A stream that ends when its reader takes nothing for `STALLED_S`."""

    async def stream_response(self, send: Send) -> None:
        """Send as `StreamingResponse` does, each part in bounded time."""

        async def bounded(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().stream_response(bounded)


class Guard:
    """Lets requests with the token pass: in the link, in the cookie that the link sets, or as a bearer.

    Connections that have shown the token are admitted; others end with their first answer.
    """

    def __init__(self, application: ASGIApp, token: str, cookie: str, admit: Admit) -> None:
        self._application = application
        self._admit = admit
        self._token = token.encode()
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._application(scope, receive, send)
            return
        request = Request(scope)
        answer: Callable[[Scope, Receive, Send], Awaitable[None]]
        if self._is_right(request.query_params.get("token", "")):
            secure = scope["scheme"] == "https"
            answer = RedirectResponse(request.url.path, 303, headers=HEADERS)
            token = request.query_params["token"]
            answer.set_cookie(self._cookie, token, httponly=True, samesite="strict", secure=secure)
        elif self._is_right(request.cookies.get(self._cookie, "")) or self._is_right(
            request.headers.get("Authorization", "").removeprefix("Bearer ")
        ):
            answer = self._application
        else:
            refused = PlainTextResponse(LINK, 403, headers=HEADERS | {"Connection": "close"})
            await refused(scope, receive, send)
            return
        self._admit(scope.get("client"))
        await answer(scope, receive, send)

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token)


def metrics_application(metrics: Metrics, token: str, admit: Admit) -> ASGIApp:
    """Return the application that serves /metrics; to all who reach it if `token` is empty."""

    async def text(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    application = Starlette(routes=[Route("/metrics", text)])
    return Guard(application, token, "pw-metrics", admit) if token else application


def _answer(value: object) -> Response:
    return Response(_json.encode(value), media_type="application/json", headers=HEADERS)


def _shown(shown: Shown) -> dict[str, Any]:
    tables = [
        {"title": table.title, "columns": table.columns, "rows": table.rows}
        for table in shown.tables()
    ]
    return {"head": shown.head, "tables": tables}
