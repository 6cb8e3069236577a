"""The dashboard of `pw-controller --dashboard` and `--metrics`: a process beside the controller."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from pw.core import installed
from pw.core.errors import Error
from pw.core.ids import CONTROLLER
from pw.processes.daemons import ANYWHERE, LocalDaemon, start_dashboard
from pw.transport.access import private_files
from pw.transport.access.private import PrivateFolder
from pw.transport.access.security import Security
from pw.transport.log import log

LINK = "dashboard"
"""Name of the file with the link of the page, in the folder of the controller."""


@dataclass(eq=False)
class Beside:
    """A dashboard that is started with the controller, and ends with it."""

    _shows: bool
    _metrics: str
    _credentials: str
    _insecure: bool
    _folder: PrivateFolder
    _page: LocalDaemon | None = None

    @classmethod
    def of(cls, shows: bool, metrics: str, credentials: str, security: Security) -> Beside | None:
        """Return it if it is wanted. Raises Error if it could not connect."""
        if not (shows or metrics):
            return None
        installed.check_extra("dashboard", *installed.DASHBOARD)
        if security.credentials is not None and not credentials:
            raise Error(
                "--dashboard and --metrics need --dashboard-credentials in a cluster with credentials: those "
                "of a client, for example of `pw keys issue client dashboard --tenant operator`"
            )
        return cls(shows, metrics, credentials, security.insecure, PrivateFolder.make())

    @property
    def events(self) -> str:
        """Return the endpoint of the controller's events for the dashboard, if it publishes none elsewhere."""
        return f"ipc://{self._folder.path}/events"

    def start(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        """Start it; its link is printed when it is ready."""
        page = self._page = start_dashboard(
            address,
            metrics=self._metrics or None,
            credentials=self._credentials or None,
            insecure=self._insecure,
            bind=ANYWHERE if self._shows else "none",
        )

        def ready() -> None:
            loop.remove_reader(page.channel.fileno())
            try:
                typer.echo(f"pw dashboard: {self._shown(page.address(0.0))}")
            except Error as error:
                log("error", "no dashboard", CONTROLLER, reason=str(error))

        loop.add_reader(page.channel.fileno(), ready)

    def _shown(self, link: str) -> str:
        """Return the link for a terminal; for a log, where its token does not stand but in a file."""
        page, _, token = link.partition("?token=")
        if not token or sys.stdout.isatty():
            return link
        file = Path(self._folder.path) / LINK
        private_files.write(file, f"{link}\n".encode())
        return f"{page} (the link with its token is in {file}, which only this user can read)"

    def close(self) -> None:
        """End it."""
        if self._page is not None:
            self._page.terminate()
            self._page.stop()
        self._folder.leave()
