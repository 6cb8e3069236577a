"""Collects timelines: reads what the controller and all hosts record (`pw.core.timeline`).

    started -every process has answered PINGS times, or is lost-> ready
    ready   -every READ_S: one question to each process-> ready
    ready   -StopTimeline: questions with `stop`, until nothing is left-> collected

A question is also a round of the clocks: the process answers with its time, and that was between the
question and the answer. The round that took the shortest tells the difference of the two clocks best; half
of what it took is the error.

A process that is lost, or does not answer in time, holds up nothing: its source says why it has no more
records. The next process of that name is another source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pw.client.session.hosts import Hosts
from pw.client.session.journaling import JournalingEnv
from pw.client.session.thread_messages import Settle, StartTimeline, StopTimeline, reject, resolve
from pw.core.actors.actor import Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import Error
from pw.core.ids import CONTROL, CONTROLLER, Address
from pw.core.messages import ReadRecords, Records

PINGS = 8
"""Rounds of the clocks before a timeline is ready."""

READ_S = 0.25
"""Seconds between two questions for new records."""

PATIENCE_S = 3.0
"""Seconds that the start and the end of a timeline wait for a process that does not answer."""

KEPT_BYTES = 256 << 20
"""Records of a timeline that a client keeps, as bytes; later ones are dropped and counted."""


@dataclass(slots=True, eq=False)
class RecordedProcess:
    """One process, and what it has recorded."""

    node: str
    offset_s: float = 0.0
    """Seconds by which its clock is ahead of this process's clock."""
    error_s: float = math.inf
    """Largest error of the offset, in seconds."""
    parts: list[bytes] = field(default_factory=list)
    """The records; each part is a msgpack array of the values of some."""
    names: dict[int, str] = field(default_factory=dict)
    since_s: float = 0.0
    """Time of its own clock, in seconds, at which it began to record."""
    count: int = 0
    """Records that it has sent."""
    dropped: int = 0
    """Records that found no room, there or here."""
    lost: str = ""
    """Reason why it has sent no more; empty if it has sent everything."""

    def ping(self, sent_s: float, there_s: float, received_s: float) -> None:
        """Learn from one round of the clocks: asked and answered on this clock, and the time there."""
        error_s = (received_s - sent_s) / 2
        if error_s < self.error_s:
            self.error_s, self.offset_s = error_s, there_s - (sent_s + received_s) / 2


class _OpenQuestion(NamedTuple):
    """A question that is not answered."""

    number: int
    sent_s: float
    stop: bool


@dataclass(slots=True, eq=False)
class _Timeline:
    """A timeline that is recorded."""

    number: int
    ready: Settle | None
    collected: Settle | None = None
    sources: list[RecordedProcess] = field(default_factory=list)
    current: dict[str, RecordedProcess] = field(default_factory=dict)
    """The source of each process that lives."""
    questions: dict[str, _OpenQuestion] = field(default_factory=dict)
    """The open question to each process."""
    rounds: dict[str, int] = field(default_factory=dict)
    """Rounds of the clocks that each process still needs."""
    done: set[str] = field(default_factory=set)
    """Processes that have nothing left to send."""
    bytes: int = 0


class Timelines(Part):
    """The timelines that this client records."""

    def __init__(self, env: JournalingEnv, hosts: Hosts) -> None:
        self._env = env
        self._hosts = hosts
        self._open: dict[int, _Timeline] = {}
        self._questions = 0
        self._closed: Error | None = None
        self._reads = Ticker(env, READ_S, self._read_all)

    @handles(StartTimeline)
    def _on_start(self, sender: Address, note: StartTimeline) -> None:
        if self._closed is not None:
            reject(note.ready, self._closed)
            return
        timeline = self._open[note.number] = _Timeline(note.number, note.ready)
        for node in (CONTROLLER, *self._hosts.names):
            timeline.rounds[node] = PINGS
            self._ask(timeline, node)
        self._reads.start()
        self._env.call_later(PATIENCE_S, partial(self._is_late, timeline))

    @handles(StopTimeline)
    def _on_stop(self, sender: Address, note: StopTimeline) -> None:
        timeline = self._open.get(note.number)
        if self._closed is not None or timeline is None:
            reject(note.collected, self._closed or Error("this timeline was not started"))
            return
        timeline.collected = note.collected
        timeline.rounds.clear()
        # A host that has left its island is asked as well, if it has recorded.
        for node in dict.fromkeys((CONTROLLER, *self._hosts.names, *timeline.current)):
            self._ask(timeline, node)
        self._env.call_later(PATIENCE_S, partial(self._is_late, timeline))
        self._settle(timeline)

    def _read_all(self) -> bool:
        for timeline in self._open.values():
            for node in (CONTROLLER, *self._hosts.names):
                self._ask(timeline, node)
        return bool(self._open)

    def _ask(self, timeline: _Timeline, node: str) -> None:
        """Ask a process for its next records, unless it has not answered yet or has sent everything."""
        if node in timeline.questions or node in timeline.done:
            return
        if node == CONTROLLER and not self._env.is_open:
            return
        self._questions += 1
        stop = timeline.collected is not None
        timeline.questions[node] = _OpenQuestion(self._questions, self._env.now_s(), stop)
        message = ReadRecords(timeline.number, self._questions, stop)
        if node == CONTROLLER:
            self._env.send(CONTROL, message)
        else:
            self._hosts.send(node, message)

    @handles(Records)
    def _on_records(self, sender: Address, message: Records) -> None:
        node, timeline = sender.node, self._open.get(message.timeline)
        question = None if timeline is None else timeline.questions.get(node)
        if timeline is None or question is None or question.number != message.question:
            return  # it has come too late
        del timeline.questions[node]
        if message.error is not None:
            self._fail(timeline, message.error.exception())
            return
        if message.refused:
            self._hosts.lost(node)  # the next question introduces this client again
            if timeline.collected is not None:
                self._end(timeline, node, "it did not know this client")
        else:
            self._take(timeline, node, question, message)
        self._settle(timeline)

    def _take(
        self, timeline: _Timeline, node: str, question: _OpenQuestion, message: Records
    ) -> None:
        source = timeline.current.get(node)
        if source is not None and (source.since_s, source.count) != (
            message.since_s,
            message.first,
        ):
            source.lost = "its recording was interrupted"
            source = None
        if source is None:
            source = timeline.current[node] = RecordedProcess(node, since_s=message.since_s)
            timeline.sources.append(source)
        source.ping(question.sent_s, message.now_s, self._env.now_s())
        source.names.update(message.names)
        source.dropped += message.dropped
        source.count = message.first + message.count
        if timeline.bytes + len(message.data) > KEPT_BYTES:
            source.dropped += message.count
        elif message.count:
            source.parts.append(message.data)
            timeline.bytes += len(message.data)
        rounds = timeline.rounds[node] = max(0, timeline.rounds.get(node, 0) - 1)
        if question.stop and not message.left:
            timeline.done.add(node)
        elif rounds or message.left or timeline.collected is not None:
            self._ask(timeline, node)

    def lost(self, node: str, why: str) -> None:
        """Take note that a process is lost, with what it has not sent."""
        for timeline in list(self._open.values()):
            self._end(timeline, node, why)
            self._settle(timeline)

    def _end(self, timeline: _Timeline, node: str, why: str) -> None:
        """Expect nothing more from a process; the next one of its name is another source."""
        source = timeline.current.pop(node, None)
        was_asked = timeline.questions.pop(node, None) is not None
        timeline.rounds.pop(node, None)
        if source is None and was_asked:
            source = RecordedProcess(node)
            timeline.sources.append(source)
        if source is not None:
            source.lost = why
        if timeline.collected is not None:
            timeline.done.add(node)

    def _fail(self, timeline: _Timeline, error: Error) -> None:
        """End a timeline with an error."""
        del self._open[timeline.number]
        for future in (timeline.ready, timeline.collected):
            if future is not None:
                reject(future, error)

    def _is_late(self, timeline: _Timeline) -> None:
        """Wait no longer for the processes that have not answered."""
        if self._open.get(timeline.number) is not timeline:
            return
        if timeline.ready is not None:
            timeline.rounds.clear()
        elif timeline.collected is not None:
            for node in list(timeline.questions):
                self._end(timeline, node, f"it has not answered within {PATIENCE_S:g} s")
        self._settle(timeline)

    def _settle(self, timeline: _Timeline) -> None:
        """Settle what the timeline has reached."""
        if timeline.ready is not None and not any(timeline.rounds.values()):
            resolve(timeline.ready, None)
            timeline.ready = None
        is_over = timeline.collected is not None and not timeline.questions
        if is_over and self._open.pop(timeline.number, None) is not None:
            assert timeline.collected is not None
            for node in timeline.current.keys() - timeline.done:
                timeline.current[node].lost = "it could not be asked at the end"
            resolve(timeline.collected, tuple(timeline.sources))

    def close(self, error: Error) -> None:
        """Fail all timelines."""
        self._closed = error
        for timeline in list(self._open.values()):
            self._fail(timeline, error)
