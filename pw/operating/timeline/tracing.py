"""`pw.trace`: records a timeline while a block runs, and writes it for Perfetto."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pw.client.connection import current
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError, ConnectionFailed, Error
from pw.operating.timeline import chrome
from pw.operating.timeline.resolve import resolved
from pw.operating.timeline.timeline import Timeline

if TYPE_CHECKING:
    from pw.client.connection.runtime import Runtime


class trace:  # noqa: N801 - it is used like a function, as `with pw.trace(...)`
    """Record what the whole cluster does while a block runs, and write it for Perfetto.

        with pw.trace("trace.json") as timeline:
            for batch in batches:
                params = step(params, batch)
            params.block_until_ready()
        print(timeline.summary)

    https://ui.perfetto.dev and chrome://tracing open the file: one row a device, coloured by client and
    program, rows for the transfers of each host, for the controller and the schedulers, and arrows from
    launches to computations and along edges. The work of other clients is in it, too. Calls return at once, so
    wait inside of the block for what the timeline is to show.

    Several timelines may be recorded at the same time. None holds up anything: each process keeps at most
    131,072 records until this one has read them, and counts those that it drops. What is missing is in
    `timeline.notes`, and in the file under `otherData`, like the error of the clocks.

    Args:
        path: of the file; None for no file.
        runtime: the session; by default that of this process's calls (`pw.connect`).

    Raises:
        ArgumentError: the file's folder does not exist.
        ConnectionFailed: the controller does not answer.
        Disconnected: the session ended during the block, and the block raised nothing.
    """

    @checks_keywords
    def __init__(
        self, path: str | os.PathLike[str] | None, *, runtime: Runtime | None = None
    ) -> None:
        self._path = None if path is None else Path(path)
        self._runtime = runtime
        self._number = 0
        self._began_s = 0.0
        self._clients: dict[int, str] = {}
        self._timeline = Timeline()

    def __enter__(self) -> Timeline:
        if self._path is not None and not self._path.absolute().parent.is_dir():
            raise ArgumentError(f"there is no folder {str(self._path.absolute().parent)!r}")
        runtime = self._runtime = self._runtime or current.runtime()
        self._number = runtime.ask.start_timeline()
        self._look_at_clients()
        self._began_s = time.monotonic()
        return self._timeline

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._end()
        else:
            with contextlib.suppress(Error):  # the block's own error is the one to tell
                self._end()

    def _end(self) -> None:
        ended_s = time.monotonic()
        runtime = self._runtime
        assert runtime is not None, "it was entered"
        sources = runtime.ask.stop_timeline(self._number)
        self._look_at_clients()
        timeline = resolved(sources, self._clients, self._began_s, ended_s)
        self._timeline.take(timeline)
        if self._path is not None:
            chrome.write(self._timeline, self._path)

    def _look_at_clients(self) -> None:
        """Take the names of the clients that are there."""
        assert self._runtime is not None
        with contextlib.suppress(ConnectionFailed):  # the controller is lost: numbers have to do
            status = self._runtime.ask.status()
            self._clients.update({client.number: client.name for client in status.clients})
