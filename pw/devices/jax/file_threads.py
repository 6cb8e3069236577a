"""The threads on which a host writes and reads files: neither the loop nor the devices wait for a disk.

They are not those of an executor, because Python ends these before it calls what was registered for the end of
a script; a cluster in the client's process still writes the checkpoints then that the session waits for.
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
    """What `pw.devices.host.files.Aside` promises; threads are started when first needed."""

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
        """Call nobody any more; what is being written is written to its end."""
        self._completions.close()
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, done = call
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - `done` hears of it
                result = error
            self._completions.post(done, result)
            del call, work, done, result  # an idle thread must not keep the last buffers alive
