"""The bytes of one connection between ZMTP and the socket, plain or encrypted.

Both wires never block: bytes that the socket does not take wait here, in order, until it is
writable. Errors of writing are not reported: the peer is gone, and its last messages are read
before the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from itertools import islice

from pw.transport.access.tls import TlsEnd

_WRITES_AT_ONCE = 64
_ENCRYPTED_BYTES = 1 << 16
"""How many plain bytes are encrypted before the socket has taken them."""
_READ_BYTES = 1 << 18
"""The most bytes that TLS holds of one read."""


class Wire:
    """A connected socket without encryption."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connected: socket.socket) -> None:
        self.is_blocked = False
        """Whether bytes wait until the socket is writable."""
        self.socket = connected
        self.receive: Callable[[int], bytes | None] = connected.recv
        """Returns received bytes, b"" at the end; raises BlockingIOError and other OSErrors."""
        self.waiting_bytes = 0
        """Of messages that the socket has not taken."""
        self._loop = loop
        self._waiting: deque[bytes | memoryview] = deque()

    def send(self, data: bytes) -> bool:
        """Send now, or in order when the socket is writable; False if it is not."""
        if self.is_blocked:
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
        self._block()
        return False

    def _wait(self, data: bytes | memoryview) -> None:
        self._waiting.append(data)
        self.waiting_bytes += len(data)

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self.waiting_bytes = 0

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; blocks up to `linger_s` to send the bytes that wait."""
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        if linger_s > 0:
            with contextlib.suppress(OSError):
                self.socket.settimeout(linger_s)
                self._send_rest()
        self._drop_waiting()
        self.socket.close()

    def _send_rest(self) -> None:
        self.socket.sendall(b"".join(self._waiting))

    def _block(self) -> None:
        self.is_blocked = True
        self._loop.add_writer(self.socket, self._writable)

    def _writable(self) -> None:
        try:
            self._send_waiting()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self.socket, self._writable)
            return
        except OSError:
            self._drop_waiting()
        self.is_blocked = False
        self._loop.remove_writer(self.socket)

    def _send_waiting(self) -> None:
        """Send all that waits. Raises OSError: BlockingIOError if the socket does not take it."""
        waiting = self._waiting
        while waiting:
            size = self.socket.sendmsg(list(islice(waiting, _WRITES_AT_ONCE)))
            self.waiting_bytes -= size
            self._sent(waiting, size)

    def _sent(self, queue: deque[bytes | memoryview], size: int) -> None:
        """Remove so many bytes from the front of a queue."""
        while size:
            if size < len(queue[0]):
                queue[0] = memoryview(queue[0])[size:]
                break
            size -= len(queue.popleft())


class TlsWire(Wire):
    """A connected socket with TLS.

    Bytes wait unencrypted, so that a large message is never in memory twice. Encrypted ones wait
    in `_encrypted`; they leave in the order in which TLS has made them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connected: socket.socket, tls: TlsEnd
    ) -> None:
        super().__init__(loop, connected)
        self.tls = tls
        self.receive = self._receive
        self._send, self._recv = connected.send, connected.recv
        self._encrypted: deque[bytes | memoryview] = deque()
        self.say()

    def shake(self) -> bool:
        """Receive bytes of the handshake, and answer; whether it is over.

        Raises:
            OSError: BlockingIOError if nothing has come; ConnectionResetError at the end.
            TlsError, ssl.SSLError: the handshake has failed; the peer has been told why.
        """
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("closed")
        try:
            return self.tls.feed_handshake(data)
        finally:
            self.say()

    def say(self) -> None:
        """Send what the protocol itself has to say."""
        if self.tls.has_output:
            self._encrypted.append(self.tls.output())
            self._try()

    def send(self, data: bytes) -> bool:
        """Send now, or in order when the socket is writable; False if it is not."""
        if self.is_blocked or len(data) > _ENCRYPTED_BYTES:
            self._wait(data)
            return not self.is_blocked and self._try()
        tls = self.tls
        tls.encrypt(data)
        record = tls.output()
        try:
            sent = self._send(record)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return True
        if sent == len(record):
            return True
        self._encrypted.append(memoryview(record)[sent:])
        self._block()
        return False

    def _try(self) -> bool:
        if self.is_blocked:
            return False
        try:
            self._send_waiting()
        except (BlockingIOError, InterruptedError):
            self._block()
            return False
        except OSError:
            self._drop_waiting()
            self._encrypted.clear()
        return True

    def _send_waiting(self) -> None:
        while self._encrypt():
            while encrypted := self._encrypted:
                self._sent(encrypted, self.socket.send(encrypted[0]))

    def _encrypt(self) -> bool:
        """Encrypt the next bytes that wait, if none wait encrypted; whether there are any."""
        waiting = self._waiting
        if self._encrypted or not waiting:
            return bool(self._encrypted)
        pieces, size = [], 0
        while waiting and size < _ENCRYPTED_BYTES:
            piece = memoryview(waiting.popleft())
            room = _ENCRYPTED_BYTES - size
            if len(piece) > room:
                waiting.appendleft(piece[room:])
                piece = piece[:room]
            pieces.append(piece)
            size += len(piece)
        self.waiting_bytes -= size
        self._encrypted.append(self.tls.write(b"".join(pieces)))
        return True

    def _receive(self, size: int) -> bytes | None:
        """Receive once. Returns None if bytes have come, but no whole record.

        Raises:
            OSError: BlockingIOError if nothing has come.
            ssl.SSLError: the bytes are damaged, or the peer refuses this end.
        """
        data = self._recv(size if size < _READ_BYTES else _READ_BYTES)
        if not data:
            return data
        try:
            plain = self.tls.feed(data)
        except ssl.SSLError:
            self.say()
            raise
        if plain is None:
            self.say()  # an answer to a change of keys; else it goes with the next message
        return plain

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; blocks up to `linger_s` to send the bytes that wait."""
        if self.tls.is_open and linger_s <= 0 and not self.is_blocked:
            with contextlib.suppress(OSError):
                self.socket.send(self.tls.close())
        super().close(linger_s)
        self._encrypted.clear()

    def _send_rest(self) -> None:
        self._send_waiting()  # the socket blocks now
        if self.tls.is_open:
            with contextlib.suppress(ssl.SSLError):
                self.socket.sendall(self.tls.close())
