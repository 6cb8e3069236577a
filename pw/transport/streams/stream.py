"""The bytes of one connection over a socket that does not block.

A stream has no loop. A link drives it from the event loop, and the bulk plane from its thread: they
call `receive` or `receive_into` when the socket is readable, and `flush` when it is writable and
`has_unsent`. Links send whole messages, which wait here until the socket takes them (`send`).
Transfers keep what the socket does not take (`send_lines`), so that arrays are never copied.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from pw.transport.access.identity import Identity

_WRITES_AT_ONCE = 64


class Stream:
    """A connection without encryption.

    Args:
        connected: the socket; it may still be connecting.
    """

    is_open = True
    """Whether bytes can be sent and received: the handshake is over."""
    holds = False
    """Whether received bytes wait in this stream, of which the kernel does not tell."""
    worth_waking_bytes = 512 << 10
    """Bytes of a large chunk that are worth a wake-up."""
    slack_bytes = 0
    """Most of the missing bytes that may have come in a part of a record."""
    stage: memoryview | None = None
    """A buffer for encrypted bytes, which all streams of a thread share."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.identity: Identity | None = None
        """Identity in the peer's certificate, also of a refused peer."""
        self.receive: Callable[[int], bytes | None] = connected.recv
        """Returns received bytes, b"" at the end; raises BlockingIOError and other OSErrors."""
        self.waiting_bytes = 0
        """Bytes of messages that the socket has not taken."""
        self._waiting: deque[bytes | memoryview] = deque()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait here until the socket is writable."""
        return bool(self._waiting)

    def shake(self) -> bool:
        """Receive a part of the handshake, and answer; whether it is over.

        Raises:
            AccessRefused: one end refuses the other.
            OSError: the connection is lost.
        """
        return True

    def held(self) -> bytes:
        """Return the bytes that came with the end of the handshake."""
        return b""

    def receive_into(self, target: memoryview) -> int:
        """Receive bytes; 0 at the end.

        Raises:
            OSError: BlockingIOError if nothing has come, or no whole record.
        """
        return self.socket.recv_into(target)

    def send(self, data: bytes) -> bool:
        """Send a message, or keep it for `flush`; False if bytes wait here.

        Errors are not reported: the peer is gone, and its last messages are read before the end.
        """
        if self._waiting:
            self._wait(data)
            return False
        try:
            sent = self.socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return True
        if sent == len(data):
            return True
        self._wait(memoryview(data)[sent:])
        return False

    def send_lines(self, lines: Sequence[memoryview]) -> int:
        """Send bytes in order; how many are sent, or wait here.

        Raises:
            OSError: BlockingIOError if none are.
        """
        return self.socket.sendmsg(lines)

    def flush(self) -> None:
        """Send all that waits here.

        Raises:
            OSError: BlockingIOError if something still waits.
        """
        waiting = self._waiting
        while waiting:
            size = self.socket.sendmsg(list(islice(waiting, _WRITES_AT_ONCE)))
            self.waiting_bytes -= size
            drop_bytes(waiting, size)

    def drop(self) -> None:
        """Forget what waits here."""
        self._waiting.clear()
        self.waiting_bytes = 0

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; blocks up to `linger_s` to send the bytes that wait."""
        if linger_s > 0:
            with contextlib.suppress(OSError):
                self.socket.settimeout(linger_s)
                self.flush()
        self._say_end()
        self.drop()
        self.socket.close()

    def _say_end(self) -> None:
        """Say that nothing more comes: the kernel does."""

    def _wait(self, data: bytes | memoryview) -> None:
        self._waiting.append(data)
        self.waiting_bytes += len(data)


def drop_bytes(queue: deque[bytes | memoryview], size: int) -> None:
    """Remove so many bytes from the front of a queue."""
    while size:
        if size < len(queue[0]):
            queue[0] = memoryview(queue[0])[size:]
            break
        size -= len(queue.popleft())
