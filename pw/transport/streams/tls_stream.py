"""The bytes of one connection with TLS 1.3, in which both ends show their certificates.

The dialler believes the handshake to be over before the listener has seen its certificate. So it
sends nothing until the listener has said, inside, that it takes the dialler: the first byte is `+`,
or `-` before the reason of a refusal.

Messages wait unencrypted, so that a large one is never in memory twice; at most 64 KiB are encrypted
ahead of the socket. Lines are encrypted out of the pushed array, in pieces that stay in the
processor's cache, and received ones are decrypted into the landing.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Iterator, Sequence

from pw.core.errors import AccessRefused
from pw.core.messages.roles import Role, role_of
from pw.transport.access.credentials import Credentials, explain
from pw.transport.access.security import NO_TLS
from pw.transport.access.tls import (
    HANDSHAKE_BYTES,
    RECORD_BYTES,
    NotTls,
    TlsEnd,
    TlsError,
    plain_alert,
)
from pw.transport.streams.stream import Stream, drop_bytes

_AHEAD_BYTES = 1 << 16
"""Most bytes of messages that are encrypted before the socket has taken them."""
_READ_BYTES = 1 << 18
"""The most bytes that TLS holds of one read of messages."""
_PIECE_BYTES = 1 << 18
"""Most bytes of lines that are encrypted before they are sent."""
_SENT_AT_ONCE = 1 << 20
_STAGE_BYTES = 1 << 19
_SHORT_BYTES = 1 << 12
"""Shorter lines share a record."""
_YES, _NO = b"+", b"-"
_MOST_WORDS = 1 << 10
_LEFT = "it closed the connection at once; does it use TLS, as this process does?"


class TlsStream(Stream):
    """A connection with TLS.

    Args:
        connected: the socket; it may still be connecting.
        dialled: whether this end has dialled.
        credentials: of this process.
        role: the role that the peer must have; None for any.
        node: the node whose name the peer's certificate must allow; empty for any.
    """

    is_open = False
    worth_waking_bytes = _STAGE_BYTES
    slack_bytes = 2 * RECORD_BYTES

    def __init__(
        self,
        connected: socket.socket,
        credentials: Credentials,
        *,
        dialled: bool,
        role: Role | None = None,
        node: str = "",
    ) -> None:
        super().__init__(connected)
        credentials.refresh()
        self._credentials = credentials
        self._dialled = dialled
        self._node = node
        self._role = role_of(node) if node else role
        context = credentials.connect() if dialled else credentials.accept()
        self._tls = TlsEnd(context, listens=not dialled)
        self.receive = self._receive
        self._send, self._recv = connected.send, connected.recv
        self.encrypted: deque[bytes | memoryview] = deque()
        """Bytes to send, in the order in which TLS has made them."""
        self._keep()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait here until the socket is writable."""
        return bool(self.encrypted or self._waiting)

    # --- the handshake -------------------------------------------------------------------------

    def shake(self) -> bool:
        """Receive a part of the handshake, and answer; whether it is over (see `Stream.shake`)."""
        try:
            with contextlib.suppress(BlockingIOError):
                self.flush()
            data = self._recv(HANDSHAKE_BYTES)
            if not data:
                raise ConnectionResetError
            if not self._tls.is_open:
                if not self._tls.feed_handshake(data):
                    return False
                self._identify()
            else:
                self._tls.take(data)
            if self._dialled:
                self._hear_answer()
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ConnectionResetError(_LEFT) from error
        except NotTls as error:
            if not self._dialled:
                self.encrypted.append(plain_alert())
            raise AccessRefused(NO_TLS) from error
        except TlsError as error:
            raise ConnectionAbortedError(str(error)) from error
        except ssl.SSLError as error:
            raise AccessRefused(explain(error)) from error
        finally:
            self._keep()
            self._try()
        return self.is_open

    def _identify(self) -> None:
        """Check the peer's certificate; a listener says whether it takes the peer."""
        credentials, certificate = self._credentials, self._tls.certificate
        try:
            identity = self.identity = credentials.identify(certificate, self._role)
            if self._node and not identity.may_be(self._node):
                words = f"its certificate is that of {identity}, not of {self._node}"
                raise AccessRefused(words)
        except AccessRefused as error:
            self.identity = credentials.shown(certificate)
            if not self._dialled:
                self._tls.encrypt(_NO + str(error).encode()[:_MOST_WORDS])
            raise
        if not self._dialled:
            self._tls.encrypt(_YES)
            self.is_open = self.holds = True

    def _hear_answer(self) -> None:
        """Take what the listener says: in TLS 1.3 it sees the dialler's certificate last."""
        answer = bytearray(1 + _MOST_WORDS)
        heard = self._tls.decrypt_into(memoryview(answer)[:1])
        if not heard:
            return
        if answer[:1] != _YES:
            size = self._tls.decrypt_into(memoryview(answer)[1:])
            words = answer[1 : 1 + size].decode(errors="replace")
            raise AccessRefused("".join(filter(str.isprintable, words)) or "it gives no reason")
        self.is_open = self.holds = True

    # --- messages ------------------------------------------------------------------------------

    def send(self, data: bytes) -> bool:
        """Encrypt and send a message, or keep it for `flush` (see `Stream.send`)."""
        if self.encrypted or self._waiting:
            self._wait(data)
            return False
        if len(data) > _AHEAD_BYTES:
            self._wait(data)
            return self._try()
        tls = self._tls
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
        self.encrypted.append(memoryview(record)[sent:])
        return False

    def _receive(self, size: int) -> bytes | None:
        """Receive once. Returns None if bytes have come, but no whole record.

        Raises:
            OSError: BlockingIOError if nothing has come; the peer refuses this end, or the bytes are
                damaged.
        """
        data = self._recv(size if size < _READ_BYTES else _READ_BYTES)
        if not data:
            return data
        try:
            plain = self._tls.feed(data)
        except ssl.SSLError as error:
            self._keep()
            self._try()
            raise ConnectionAbortedError(explain(error)) from error
        if plain is None:
            self._keep()  # an answer to a change of keys; else it goes with the next message
            self._try()
        return plain

    def held(self) -> bytes:
        """Return the bytes that came with the end of the handshake."""
        self.holds = False
        try:
            return self._tls.feed(b"") or b""
        except ssl.SSLError:  # the next `receive` reports it
            return b""

    # --- lines ---------------------------------------------------------------------------------

    def send_lines(self, lines: Sequence[memoryview]) -> int:
        """Encrypt and send bytes in order (see `Stream.send_lines`)."""
        self.flush()
        tls, total = self._tls, 0
        for pieces, size in _pieces(lines):
            for piece in pieces:
                tls.encrypt(piece)
            record = tls.output()
            total += size
            try:
                sent = self._send(record)
            except BlockingIOError:
                sent = 0
            if sent < len(record):
                self.encrypted.append(memoryview(record)[sent:])
                break
            if total >= _SENT_AT_ONCE:
                break
        return total

    def receive_into(self, target: memoryview) -> int:
        """Receive and decrypt bytes, once (see `Stream.receive_into`)."""
        tls = self._tls
        try:
            if not self.holds:
                if self.stage is None:
                    data: bytes | memoryview = self._recv(_READ_BYTES)
                else:
                    data = self.stage[: self.socket.recv_into(self.stage)]
                if not data:
                    return 0
                tls.take(data)
            received = tls.decrypt_into(target)
        except ssl.SSLError as error:
            raise ConnectionAbortedError(explain(error)) from error
        self.holds = received == len(target) and tls.holds
        if tls.has_output:
            self._keep()
        if not received and not tls.ended:
            raise BlockingIOError
        return received

    # --- what waits ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Send all that waits here (see `Stream.flush`)."""
        while self._encrypt():
            while encrypted := self.encrypted:
                drop_bytes(encrypted, self._send(encrypted[0]))

    def drop(self) -> None:
        """Forget what waits here."""
        super().drop()
        self.encrypted.clear()

    def _keep(self) -> None:
        """Send what the protocol itself has to say with the next bytes."""
        if self._tls.has_output:
            self.encrypted.append(self._tls.output())

    def _try(self) -> bool:
        """Send what the socket takes; whether nothing waits."""
        try:
            self.flush()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.drop()
        return True

    def _encrypt(self) -> bool:
        """Encrypt the next bytes that wait, if none wait encrypted; whether there are any."""
        waiting = self._waiting
        if self.encrypted or not waiting:
            return bool(self.encrypted)
        pieces, size = [], 0
        while waiting and size < _AHEAD_BYTES:
            piece = memoryview(waiting.popleft())
            room = _AHEAD_BYTES - size
            if len(piece) > room:
                waiting.appendleft(piece[room:])
                piece = piece[:room]
            pieces.append(piece)
            size += len(piece)
        self.waiting_bytes -= size
        self.encrypted.append(self._tls.write(b"".join(pieces)))
        return True

    def _say_end(self) -> None:
        if self.is_open and not self.has_unsent:
            with contextlib.suppress(OSError):
                self._send(self._tls.close())


def stage() -> memoryview:
    """A buffer for the encrypted bytes that a thread has received."""
    return memoryview(bytearray(_STAGE_BYTES))


def _pieces(lines: Sequence[memoryview]) -> Iterator[tuple[list[memoryview | bytes], int]]:
    """Cut lines to be encrypted a few records at a time; short ones share a record."""
    batch: list[memoryview | bytes] = []
    short: list[memoryview] = []
    size = 0
    for line in lines:
        rest = line
        while rest:
            piece, rest = rest[: _PIECE_BYTES - size], rest[_PIECE_BYTES - size :]
            size += len(piece)
            if len(piece) < _SHORT_BYTES:
                short.append(piece)
            else:
                batch += [b"".join(short), piece] if short else [piece]
                short = []
            if size >= _PIECE_BYTES:
                yield ([*batch, b"".join(short)] if short else batch), size
                batch, short, size = [], [], 0
    if size:
        yield ([*batch, b"".join(short)] if short else batch), size
