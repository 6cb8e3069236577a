"""Publishes the controller's events on a ZeroMQ PUB socket.

Theory of operation. Events of one turn of the loop leave together, one message for each topic: its subject
(`pw.1.run`), and a `Batch` as JSON. While many come, messages leave at most every `PAUSE_S`. Sending never
waits: libzmq keeps at most `MESSAGES_KEPT` messages for each reader, and drops what comes then. The
numbers in the batches show a reader what it has lost.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from pathlib import Path

import msgspec
import typer
import zmq

from pw.cli.process import check_bind
from pw.core.errors import ConnectionFailed, Error
from pw.core.events import Batch, Event, subject
from pw.transport.access.private import is_private
from pw.transport.access.security import Security

MESSAGES_KEPT = 256
"""Messages that wait for a slow reader."""
EVENTS_AT_ONCE = 256
"""Events of a message."""
PAUSE_S = 0.02
"""The time between two sends, while events come all the time."""


class Publisher:
    """A sink of events (`pw.core.events.Sink`), on the controller's event loop.

    Args:
        loop: the event loop; all methods are called on its thread.
        endpoint: where readers connect: `ipc:///path`, or `tcp://address:port` (port 0 takes a free one).

    Raises:
        ConnectionFailed: the socket cannot listen there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: str) -> None:
        self._loop = loop
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MESSAGES_KEPT)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConnectionFailed(f"cannot publish events at {endpoint}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._name = secrets.token_hex(8)
        self._encoder = msgspec.json.Encoder()
        self._waiting: dict[str, list[Event]] = {}
        self.numbers: Counter[str] = Counter()
        """Number of the next event of each topic."""
        self._sent_s = 0.0

    def publish(self, event: Event) -> None:
        """Take an event; it leaves with the others of this turn."""
        if not self._waiting:
            self._plan()
        self._waiting.setdefault(event.topic, []).append(event)

    def _plan(self) -> None:
        next_s = self._sent_s + PAUSE_S
        if self._loop.time() >= next_s:
            self._loop.call_soon(self.send)
        else:
            self._loop.call_at(next_s, self.send)

    def send(self) -> None:
        """Send what waits; readers without room lose it."""
        if self._socket.closed:
            return
        waiting, self._waiting = self._waiting, {}
        self._sent_s, time_s = self._loop.time(), time.time()
        for topic, events in waiting.items():
            first = self.numbers[topic]
            self.numbers[topic] += len(events)
            name = subject(topic).encode()
            for start in range(0, len(events), EVENTS_AT_ONCE):
                part = events[start : start + EVENTS_AT_ONCE]
                batch = Batch(self._name, first + start, time_s, part)
                # A PUB socket never waits: where a reader has no room, it drops the message.
                self._socket.send_multipart((name, self._encoder.encode(batch)), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what waits, and close the socket. Idempotent."""
        if not self._socket.closed:
            self.send()
            self._socket.close(linger=0)
            self._context.term()


def check_events(endpoint: str, security: Security) -> None:
    """Raise BadParameter or Error if other users or machines could read events unintentionally."""
    if not endpoint.startswith("ipc://"):
        check_bind(endpoint, Security(None, insecure=True))
        if not security.insecure:
            raise Error(
                f"events at {endpoint} could be read by every process that reaches it, since they are not "
                "encrypted; use ipc:///path in a directory that only you can enter, or add --insecure"
            )
        return
    folder = Path(endpoint.removeprefix("ipc://")).parent
    if not folder.is_absolute() or not is_private(folder):
        raise typer.BadParameter(
            f"events at {endpoint!r} could be read by other users, or {str(folder)!r} does not exist; name a "
            "socket in a directory that only you can enter (mkdir -m 700)"
        )
