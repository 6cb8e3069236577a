"""The threads on which a host writes and reads files, so that the loop does not wait for a disk.

They are not those of a `ThreadPoolExecutor`: Python ends these before it calls exit handlers, and a
cluster in the client's process still writes checkpoints then.
"""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from pw.devices.jax.threads import Completions

THREADS = 4

Call = tuple[Callable[[], Any], Callable[[Any], None]]


class FileThreads:
    """Runs work aside (see `pw.devices.host.checkpoint_files.BlockingCalls`); threads start when first
    needed."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._completions = Completions(loop)
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = 0

    def call(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Call `done` on the loop thread with what `work` returns, or with the exception it raises."""
        if self._threads < THREADS:
            self._threads += 1
            name = f"pw-files-{self._threads}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        self._calls.put((work, done))

    def close(self) -> None:
        """Make no `done` call any more; files that are being written are completed."""
        self._completions.close()
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, done = call
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - `done` gets it
                result = error
            self._completions.post(done, result)
            del call, work, done, result  # an idle thread must not keep the last buffers alive
