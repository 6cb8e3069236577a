"""The process of `pw dashboard`: serves the page and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer
import uvicorn
import uvloop

from pw.cli.process import Daemon, check_bind
from pw.core.errors import Error
from pw.core.installed import is_installed
from pw.dashboard.metrics import Metrics
from pw.dashboard.reader import Reader
from pw.dashboard.server import Page, metrics_application
from pw.processes.child import Announcement
from pw.transport.access.security import Security
from pw.transport.endpoints import listen, reachable_endpoint

TOKEN = "PW_DASHBOARD_TOKEN"
OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""Where OpenTelemetry wants spans."""
ENDING_S = 1
START_S = 30.0


class _Server(uvicorn.Server):
    """A server on the loop of a daemon, which handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the daemon."""
        yield


class _Listening:
    """A server on a socket of its own."""

    def __init__(self, endpoint: str, security: Security) -> None:
        check_bind(endpoint, security)
        if not endpoint.startswith("tcp://"):
            raise typer.BadParameter(f"a browser cannot reach {endpoint!r}; give tcp://host:port")
        self._socket = listen(endpoint)
        self.credentials = security.credentials
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The address for browsers, without a path."""
        scheme = "http" if self.credentials is None else "https"
        return reachable_endpoint(self._socket, None).replace("tcp", scheme, 1)

    def serve(self, application: object, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to serve an ASGI application."""
        credentials, plain = self.credentials, None

        def context(*_: object) -> ssl.SSLContext:
            assert credentials is not None
            return credentials.for_browsers()

        config = uvicorn.Config(
            application,  # type: ignore[arg-type]  # any ASGI application
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=ENDING_S,
            ssl_context_factory=plain if credentials is None else context,
        )
        self._server = _Server(config)
        self._task = loop.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=3 * ENDING_S)


def serve(address: str, bind: str, metrics: str, parent_fd: int) -> NoReturn:
    """Serve until a signal or the end of the parent (see `pw.cli.dashboard`)."""
    token = os.environ.get(TOKEN, "")
    security = Security.of("tcp://", warns=False)
    page = None if bind == "none" else _Listening(bind, security)
    scraped = _Listening(metrics, security) if metrics else None
    if page is None and scraped is None:
        raise Error("there is nothing to serve: give --bind or --metrics")
    has_spans = OTLP in os.environ and is_installed("opentelemetry.sdk.trace")
    reader = Reader(address, wants_runs=bool(metrics) or has_spans)
    if has_spans:
        from pw.dashboard.spans import Spans

        reader.runs.append(Spans().ended)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    daemon = Daemon(loop, parent_fd)
    link, shown = "", None
    if scraped is not None:
        scraped.serve(metrics_application(Metrics(reader), token), loop)
    if page is not None:
        own = token or secrets.token_urlsafe(24)
        cookie = f"pw-dashboard-{page.port}"
        shown = Page(reader, loop)
        page.serve(shown.application(own, cookie), loop)
        link = f"{page.url}/?token={own}"
    else:
        reader.is_watched = lambda: False
    reader.start(START_S)
    if not daemon.announce(Announcement(link or f"{scraped.url}/metrics" if scraped else link)):
        if link:
            typer.echo(f"pw dashboard: {link}")
        if scraped is not None:
            typer.echo(f"metrics: {scraped.url}/metrics")
        sys.stdout.flush()

    def teardown() -> None:
        if shown is not None:
            shown.close()
        for one in (page, scraped):
            if one is not None:
                loop.run_until_complete(one.close())
        reader.close()

    raise SystemExit(daemon.run(teardown))
