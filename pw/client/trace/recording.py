"""Which program a thread is tracing."""

from __future__ import annotations

import threading

from pw.client.trace.recorder import ProgramRecorder

_thread = threading.local()


def recording() -> ProgramRecorder | None:
    """The program that this thread is tracing, if any."""
    return getattr(_thread, "recorder", None)


class Recording:
    """Makes a recorder this thread's current one for the length of a `with` block."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._before: ProgramRecorder | None = None

    def __enter__(self) -> ProgramRecorder:
        self._before = recording()
        _thread.recorder = self._recorder
        return self._recorder

    def __exit__(self, *exc: object) -> None:
        _thread.recorder = self._before
