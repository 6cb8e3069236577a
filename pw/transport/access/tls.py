"""TLS as one end of one connection sees it, without a socket.

    handshake -feed_handshake-> open
    handshake, open -damaged bytes, an alert, a certificate that is not trusted-> TlsError
    open -close_notify-> ended

The connection feeds received bytes and sends `output`. After an error `output` may still hold the
alert that tells the peer the reason. Input is not trusted: before the handshake is over it is at
most `HANDSHAKE_BYTES`.

Source: RFC 8446; Python's `ssl.MemoryBIO` and `ssl.SSLObject`.
"""

from __future__ import annotations

import contextlib
import ssl

HANDSHAKE_BYTES = 1 << 16
RECORD_BYTES = 1 << 14
"""The most plain bytes in one record."""
_ALERT = 0x15
_RECORD_KINDS = range(0x14, 0x18)
_ACCESS_DENIED = 49


class TlsError(Exception):
    """The peer does not speak TLS, or one end refuses the other."""


class NotTls(TlsError):
    """The first bytes of the peer are not TLS."""


def is_tls(data: bytes) -> bool:
    """Whether bytes at the start of a connection begin a TLS handshake, or an alert."""
    return data[:1] in (b"\x15", b"\x16")


def plain_alert() -> bytes:
    """Return the alert of a listener that takes part in no handshake: a fatal one, access denied."""
    return bytes((_ALERT, 3, 3, 0, 2, 2, _ACCESS_DENIED))


class TlsEnd:
    """One end of a TLS connection.

    Args:
        context: of this end's certificate and of the authority.
        listens: whether this end was dialled.
    """

    def __init__(self, context: ssl.SSLContext, listens: bool) -> None:
        self.is_open = False
        """Whether the handshake is over, as far as this end knows."""
        self.ended = False
        """Whether the peer has said that it sends nothing more."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._received_bytes = 0
        # Bound once, because each message needs them.
        self._take, self._read = self._incoming.write, self._tls.read
        self.encrypt = self._tls.write
        """Takes plain bytes; they are in `output` then, behind all that was there before."""
        self.output = self._outgoing.read
        """Removes and returns what is to be sent."""
        if not listens:
            self._shake()

    def feed_handshake(self, data: bytes) -> bool:
        """Take bytes before the handshake is over; whether it is over now.

        Raises:
            NotTls: the peer's first bytes are not TLS.
            TlsError: there are too many bytes.
            ssl.SSLError: the handshake has failed.
        """
        if not self._received_bytes and data and data[0] not in _RECORD_KINDS:
            raise NotTls("the peer does not speak TLS")
        self._received_bytes += len(data)
        if self._received_bytes > HANDSHAKE_BYTES:
            raise TlsError(
                f"more than {HANDSHAKE_BYTES} bytes before the peer has shown its certificate"
            )
        self._incoming.write(data)
        return self._shake()

    def _shake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self.is_open = True
        return True

    @property
    def certificate(self) -> bytes:
        """The peer's certificate (DER), which the authority has signed; empty if it sent none."""
        return self._tls.getpeercert(binary_form=True) or b""

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes once the handshake is over; the plain ones, None without a whole record.

        Raises:
            ssl.SSLError: they are damaged, or the peer refuses this end.
        """
        incoming, read = self._incoming, self._read
        self._take(data)
        # Each read takes one record. An exception costs as much as a read, so none is asked for
        # when all bytes are taken, as they are after most reads.
        try:
            first = read(RECORD_BYTES)
        except ssl.SSLWantReadError:
            return None
        if not incoming.pending:
            self.ended = not first
            return first
        pieces = [first]
        try:
            while incoming.pending and pieces[-1]:
                pieces.append(read(RECORD_BYTES))
        except ssl.SSLWantReadError:
            pass
        self.ended = not pieces[-1]
        return b"".join(pieces)

    def take(self, data: bytes | memoryview) -> None:
        """Take bytes once the handshake is over, for `decrypt_into`."""
        self._take(data)

    def decrypt_into(self, target: memoryview) -> int:
        """Decrypt the whole records that were taken, as far as `target` has room; how many bytes.

        Raises:
            ssl.SSLError: they are damaged, or the peer refuses this end.
        """
        read, incoming, size, count = self._read, self._incoming, len(target), 0
        try:
            while count < size:
                wanted = size - count
                length: int = read(wanted, target[count:])  # type: ignore[assignment]
                if not length:
                    self.ended = True
                    break
                count += length
                if length < wanted and not incoming.pending:
                    break
        except ssl.SSLWantReadError:
            pass
        return count

    @property
    def holds(self) -> bool:
        """Whether bytes that were taken wait for `decrypt_into`; they may be a part of a record."""
        return bool(self._incoming.pending or self._tls.pending())

    def write(self, data: bytes | memoryview) -> bytes:
        """Plain bytes as they are sent, behind all `output` so far."""
        self.encrypt(data)
        return self.output()

    @property
    def has_output(self) -> bool:
        """Whether the protocol itself has something to send."""
        return bool(self._outgoing.pending)

    def close(self) -> bytes:
        """The last bytes to send: that nothing more comes."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self.output()
