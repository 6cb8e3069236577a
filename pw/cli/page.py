"""The process of `pw dashboard`: serves the page and metrics."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from typing import NoReturn

import typer
import uvloop

from pw.cli.process import Daemon
from pw.cli.web import WebServer
from pw.core.errors import Error
from pw.core.installed import is_installed
from pw.operating.dashboard.metrics import Metrics
from pw.operating.dashboard.reader import Reader
from pw.operating.dashboard.server import Page, metrics_application
from pw.processes.child import Announcement
from pw.transport.access.security import Security

TOKEN = "PW_DASHBOARD_TOKEN"
OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""Environment variable that says where OpenTelemetry wants spans."""
START_S = 30.0


def serve(address: str, bind: str, metrics: str, parent_fd: int) -> NoReturn:
    """Serve until a signal or the end of the parent (see `pw.cli.dashboard`)."""
    token = os.environ.get(TOKEN, "")
    security = Security.of("tcp://", warns=False)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    page = None if bind == "none" else WebServer(bind, security, loop)
    scraped = WebServer(metrics, security, loop) if metrics else None
    if page is None and scraped is None:
        raise Error("there is nothing to serve: give --bind or --metrics")
    has_spans = OTLP in os.environ and is_installed("opentelemetry.sdk.trace")
    reader = Reader(address, wants_runs=bool(metrics) or has_spans)
    if has_spans:
        from pw.operating.dashboard.spans import Spans

        reader.runs.append(Spans().ended)
    daemon = Daemon(loop, parent_fd)
    link, shown = "", None
    if scraped is not None:
        scraped.serve(metrics_application(Metrics(reader), token, scraped.admit))
    if page is not None:
        own = token or secrets.token_urlsafe(24)
        cookie = f"pw-dashboard-{page.port}"
        shown = Page(reader, loop)
        page.serve(shown.application(own, cookie, page.admit))
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
