"""The bytes of one chunk connection, plain or encrypted, over a socket that does not block.

A dialler first sends `CHUNKS_PREAMBLE` in clear, which tells a listener that serves links and chunks at
one port which of both comes. Then, with credentials, comes TLS 1.3, in which both ends show their
certificates.

Encrypted bytes are received into one buffer of the thread, and decrypted into the landing. They
are encrypted out of the pushed array, in pieces that stay in the processor's cache.

The dialler of TLS 1.3 believes the handshake to be over before the listener has seen its
certificate. So it sends nothing until the listener has said, inside, that it takes the dialler: the
first byte is `+`, or `-` before the reason of a refusal.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence

from pw.core.errors import AccessRefused
from pw.core.messages.roles import Role
from pw.transport.access.credentials import Credentials, Identity, explain
from pw.transport.access.security import NO_TLS
from pw.transport.access.tls import HANDSHAKE_BYTES, RECORD_BYTES, NotTls, TlsEnd, TlsError
from pw.transport.endpoints import CHUNKS_PREAMBLE

_PIECE_BYTES = 1 << 18
"""How many bytes are encrypted before they are sent."""
_SENT_AT_ONCE = 1 << 20
_STAGE_BYTES = 1 << 19
_YES, _NO = b"+", b"-"
_LEFT = "it closed the connection at once; does it use TLS, as this process does?"
_MOST_WORDS = 1 << 10
_SHORT_BYTES = 1 << 12
"""Shorter lines share a record."""
_WORTH_WAKING_BYTES = 512 << 10


class Stream:
    """A connection without encryption.

    Args:
        connected: the socket; it may still be connecting.
        dialled: whether this end has dialled.
    """

    is_open = True
    """Whether bytes can be sent and received: the handshake is over."""
    holds = False
    """Whether received bytes wait here, of which the kernel does not tell."""
    worth_waking_bytes = _WORTH_WAKING_BYTES
    slack_bytes = 0
    """How many of the missing bytes may have come in a part of a record."""

    def __init__(self, connected: socket.socket, dialled: bool) -> None:
        self.socket = connected
        self.identity: Identity | None = None
        self._unsent = memoryview(CHUNKS_PREAMBLE if dialled else b"")

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait here that `send` has taken, or those of a handshake."""
        return bool(self._unsent)

    def shake(self) -> bool:
        """Receive a part of the handshake, and answer; whether it is over.

        Raises:
            AccessRefused: one end refuses the other.
            OSError: the connection is lost.
        """
        with contextlib.suppress(BlockingIOError):
            self.flush()
        return True

    def receive_into(self, target: memoryview) -> int:
        """Receive bytes; 0 at the end.

        Raises:
            OSError: BlockingIOError if nothing has come, or no whole record.
        """
        return self.socket.recv_into(target)

    def send(self, lines: Sequence[memoryview]) -> int:
        """Send bytes in order; how many are sent, or wait here.

        Raises:
            OSError: BlockingIOError if none are.
        """
        self.flush()
        return self.socket.sendmsg(lines)

    def flush(self) -> None:
        """Send what waits here.

        Raises:
            OSError: BlockingIOError if something still waits.
        """
        while self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class TlsStream(Stream):
    """A connection with TLS.

    Args:
        connected: the socket; it may still be connecting.
        dialled: whether this end has dialled.
        credentials: of this process.
        stage: a buffer that all streams of a thread share.
        role: the role that the peer must have; None for any.
    """

    is_open = False
    worth_waking_bytes = _STAGE_BYTES
    slack_bytes = 2 * RECORD_BYTES

    def __init__(
        self,
        connected: socket.socket,
        dialled: bool,
        credentials: Credentials,
        stage: memoryview,
        role: Role | None = None,
    ) -> None:
        super().__init__(connected, dialled)
        credentials.refresh()
        self._credentials = credentials
        self._stage = stage
        self._role = role
        self._dialled = dialled
        self._shaken_bytes = 0
        context = credentials.connect() if dialled else credentials.accept()
        self._tls = TlsEnd(context, listens=not dialled)
        self._keep(self._tls.output())

    def shake(self) -> bool:
        """Receive a part of the handshake, and answer; whether it is over (see `Stream.shake`)."""
        try:
            with contextlib.suppress(BlockingIOError):
                self.flush()
            room = HANDSHAKE_BYTES - self._shaken_bytes
            if not room:
                raise TlsError(f"it has sent {HANDSHAKE_BYTES} bytes before it was let in")
            data = self.socket.recv(room)
            self._shaken_bytes += len(data)
            if not data:
                raise ConnectionResetError
            if not self._tls.is_open:
                if not self._tls.feed_handshake(data):
                    return False
                self._identified()
            else:
                self._tls.take(data)
            if self._dialled:
                self._hear_answer()
        except BlockingIOError:
            return False
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ConnectionResetError(_LEFT) from error
        except NotTls as error:
            raise AccessRefused(NO_TLS) from error
        except TlsError as error:
            raise AccessRefused(str(error)) from error
        except ssl.SSLError as error:
            raise AccessRefused(explain(error)) from error
        finally:
            self._keep(self._tls.output())
            with contextlib.suppress(OSError):
                self.flush()
        return self.is_open

    def _identified(self) -> None:
        """Check the peer's certificate; a listener says whether it takes the peer."""
        try:
            self.identity = self._credentials.identify(self._tls.certificate, self._role)
        except AccessRefused as error:
            if not self._dialled:
                self._keep(self._tls.write(_NO + str(error).encode()[:_MOST_WORDS]))
            raise
        if not self._dialled:
            self._keep(self._tls.write(_YES))
            self.is_open = self.holds = True

    def _hear_answer(self) -> None:
        """Take what the listener says: in TLS 1.3 it sees the dialler's certificate last."""
        answer = bytearray(1 + _MOST_WORDS)
        heard = self._tls.decrypt_into(memoryview(answer)[:1])
        if not heard:
            return
        if answer[:1] != _YES:
            size = self._tls.decrypt_into(memoryview(answer)[1:])
            raise AccessRefused(answer[1 : 1 + size].decode(errors="replace"))
        self.is_open = self.holds = True

    def receive_into(self, target: memoryview) -> int:
        """Receive and decrypt bytes, once (see `Stream.receive_into`)."""
        tls = self._tls
        try:
            if not self.holds:
                count = self.socket.recv_into(self._stage)
                if not count:
                    return 0
                tls.take(self._stage[:count])
            received = tls.decrypt_into(target)
        except ssl.SSLError as error:
            raise ConnectionAbortedError(explain(error)) from error
        self.holds = received == len(target) and tls.holds
        if tls.has_output:
            self._keep(tls.output())
        if not received and not tls.ended:
            raise BlockingIOError
        return received

    def send(self, lines: Sequence[memoryview]) -> int:
        """Encrypt and send bytes in order (see `Stream.send`)."""
        self.flush()
        tls, taken = self._tls, 0
        for pieces, size in _pieces(lines):
            for piece in pieces:
                tls.encrypt(piece)
            record = tls.output()
            taken += size
            try:
                sent = self.socket.send(record)
            except BlockingIOError:
                sent = 0
            if sent < len(record):
                self._unsent = memoryview(record)[sent:]
                break
            if taken >= _SENT_AT_ONCE:
                break
        return taken

    def close(self) -> None:
        """Say that nothing more comes, and close the socket."""
        if self.is_open and not self._unsent:
            with contextlib.suppress(OSError):
                self.socket.send(self._tls.close())
        super().close()

    def _keep(self, output: bytes) -> None:
        if output:
            self._unsent = memoryview(bytes(self._unsent) + output)


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
