"""A session's thread that keeps what is posted there, and answers nothing of it."""

from __future__ import annotations

from pw.client.connection.runtime import Runtime
from pw.client.session.thread_messages import Close, Open, Put, Tell, resolve
from pw.core.messages import Attached, Run
from tests.stages.local_runtime import QuietThread

CREDITS = 8


class Scripted(QuietThread):
    """A session that gives no credits back."""

    address = endpoint = None

    def __init__(self, runtime: Runtime) -> None:
        self.notes: list[object] = []

    def post(self, note: object) -> None:
        self.notes.append(note)
        if isinstance(note, Open):
            resolve(note.attached, Attached(1, b"", CREDITS, ()))
        elif isinstance(note, Close):
            resolve(note.closed, ())

    @property
    def puts(self) -> int:
        return sum(isinstance(note, Put) for note in self.notes)

    @property
    def runs(self) -> int:
        return sum(isinstance(note, Tell) and isinstance(note.message, Run) for note in self.notes)
