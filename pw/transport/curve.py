"""CURVE, ZeroMQ's mechanism for connections that are authenticated and encrypted (RFC 26).

Both ends have permanent keys; for every connection each makes another pair, so that what was
recorded cannot be read with permanent keys that are stolen later. Here all nodes of a cluster have
the same permanent keys, which makes them one shared secret: who lacks it can neither dial nor be
dialled, and a dialler who proves to hold it is welcome.

    client: HELLO       I know your public key; here is my transient one
    server: WELCOME     here is mine, and a cookie
    client: INITIATE    the cookie, and proof that my transient key is backed by a permanent one
    server: READY       welcome
    both:   MESSAGE     one part or command in a box, numbered
"""

from __future__ import annotations

import os
from typing import NamedTuple

from nacl import bindings
from nacl.exceptions import CryptoError

from pw.transport.zmtp import ZmtpError

_KEY_BYTES, _BOX_BYTES, _COOKIE_BYTES = 32, 16, 96
_HEAD = b"\x07MESSAGE"
_HELLO_PADDING = bytes(72)
_HELLO_PLAIN = bytes(64)


class Keys(NamedTuple):
    """The permanent keys of a cluster, 32 bytes each."""

    public: bytes
    secret: bytes


def new_keys() -> Keys:
    """Random keys for a new cluster."""
    return Keys(*bindings.crypto_box_keypair())


class Curve:
    """One end of the handshake, and of the numbered boxes after it.

    Args:
        keys: the permanent keys of this end, and of the other.
        as_server: whether this end was dialled.
        metadata: what to tell the peer once it is trusted.
    """

    def __init__(self, keys: Keys, as_server: bool, metadata: bytes) -> None:
        self.name = b"CURVE"
        self.seals = True
        self.as_server = as_server
        self.peer_metadata: bytes | None = None
        self._permanent = keys
        self._transient = new_keys()
        self._metadata = metadata
        self._cookie = os.urandom(_COOKIE_BYTES)
        self._peer = b""
        self._key = b""
        self._sent = self._received = 0
        ours, theirs = (b"S", b"C") if as_server else (b"C", b"S")
        self._seal_prefix = b"CurveZMQMESSAGE" + ours
        self._open_prefix = b"CurveZMQMESSAGE" + theirs

    def begin(self) -> list[tuple[bytes, bytes]]:
        """Commands, name and body, to send when the greetings have been exchanged."""
        if self.as_server:
            return []
        self._key = _shared(self._permanent.public, self._transient.secret)
        body = self._boxed(b"CurveZMQHELLO---", _HELLO_PLAIN)
        return [(b"HELLO", b"\x01\x00" + _HELLO_PADDING + self._transient.public + body)]

    def answer(self, name: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
        """The commands that answer a command of the handshake.

        Raises:
            ZmtpError: the peer does not hold the keys, or does not know CURVE.
        """
        step = (self.as_server, name, bool(self._peer))
        try:
            if step == (True, b"HELLO", False):
                return self._welcome(body)
            if step == (False, b"WELCOME", False):
                return self._initiate(body)
            if step == (True, b"INITIATE", True):
                return self._ready(body)
            if step == (False, b"READY", True):
                self.peer_metadata = self._unboxed(b"CurveZMQREADY---", body)
                return []
        except (CryptoError, ValueError, TypeError) as error:
            raise ZmtpError(f"{name!r} without the keys of this cluster") from error
        raise ZmtpError(f"command {name!r} in the handshake")

    def seal(self, flags: int, body: bytes) -> bytes:
        """A MESSAGE that holds one part or command."""
        return _HEAD + self._boxed(self._seal_prefix, bytes((flags,)) + body)

    def unseal(self, message: bytes) -> tuple[int, bytes]:
        """Flags and body of a MESSAGE.

        Raises:
            ZmtpError: it was not sealed by the peer, or was changed, repeated or reordered.
        """
        if not message.startswith(_HEAD):
            raise ZmtpError("a message in no box")
        try:
            plain = self._unboxed(self._open_prefix, message[len(_HEAD) :])
        except (CryptoError, ValueError, TypeError) as error:
            raise ZmtpError("a message that the peer has not sealed") from error
        if not plain:
            raise ZmtpError("an empty box")
        return plain[0], plain[1:]

    def _welcome(self, body: bytes) -> list[tuple[bytes, bytes]]:
        self._peer = body[74 : 74 + _KEY_BYTES]
        self._key = _shared(self._peer, self._permanent.secret)
        if (
            body[:2] != b"\x01\x00"
            or self._unboxed(b"CurveZMQHELLO---", body[106:]) != _HELLO_PLAIN
        ):
            raise ZmtpError("another version of CURVE")
        nonce = os.urandom(16)
        plain = self._transient.public + self._cookie
        box = bindings.crypto_box_afternm(plain, b"WELCOME-" + nonce, self._key)
        self._key = _shared(self._peer, self._transient.secret)
        return [(b"WELCOME", nonce + box)]

    def _initiate(self, body: bytes) -> list[tuple[bytes, bytes]]:
        plain = bindings.crypto_box_open_afternm(body[16:], b"WELCOME-" + body[:16], self._key)
        self._peer, cookie = plain[:_KEY_BYTES], plain[_KEY_BYTES:]
        nonce = os.urandom(16)
        vouch = bindings.crypto_box(
            self._transient.public + self._permanent.public,
            b"VOUCH---" + nonce,
            self._peer,
            self._permanent.secret,
        )
        self._key = _shared(self._peer, self._transient.secret)
        plain = self._permanent.public + nonce + vouch + self._metadata
        return [(b"INITIATE", cookie + self._boxed(b"CurveZMQINITIATE", plain))]

    def _ready(self, body: bytes) -> list[tuple[bytes, bytes]]:
        if body[:_COOKIE_BYTES] != self._cookie:
            raise ZmtpError("a cookie that is not ours")
        plain = self._unboxed(b"CurveZMQINITIATE", body[_COOKIE_BYTES:])
        permanent, nonce, vouch, metadata = plain[:32], plain[32:48], plain[48:128], plain[128:]
        opened = bindings.crypto_box_open(
            vouch, b"VOUCH---" + nonce, permanent, self._transient.secret
        )
        if permanent != self._permanent.public or opened != self._peer + permanent:
            raise ZmtpError("a peer with other keys")
        self.peer_metadata = metadata
        return [(b"READY", self._boxed(b"CurveZMQREADY---", self._metadata))]

    def _boxed(self, prefix: bytes, plain: bytes) -> bytes:
        self._sent += 1
        number = self._sent.to_bytes(8, "big")
        return number + bindings.crypto_box_afternm(plain, prefix + number, self._key)

    def _unboxed(self, prefix: bytes, data: bytes) -> bytes:
        number = data[:8]
        plain = bindings.crypto_box_open_afternm(data[8:], prefix + number, self._key)
        if int.from_bytes(number, "big") <= self._received:
            raise ZmtpError("a box that was here before")
        self._received = int.from_bytes(number, "big")
        return plain


def _shared(public: bytes, secret: bytes) -> bytes:
    return bindings.crypto_box_beforenm(public, secret)
