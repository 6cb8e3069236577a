"""Proof that both ends of a connection know the secret of their cluster, which itself never travels.

    dialler -> listener   HELLO      a nonce
    listener -> dialler   CHALLENGE  a nonce, and a digest of both nonces as listener
    dialler -> listener   PROOF      a digest of both nonces as dialler

Both nonces are new for each connection, so a recording proves nothing. The digests of the two ends
differ, so neither can be sent back. The dialler sends nothing else before the listener has proven
itself. Later messages are neither encrypted nor signed: this keeps foreign processes out, but does
not protect against a network that changes messages.

`Proof` has no sockets. The bulk plane sends its messages as they are; `ProofMechanism` carries them
in the handshake of a control link.
"""

from __future__ import annotations

import hashlib
import hmac
import os

PROOF_S = 5.0
"""How long a listener waits for a dialler's proof."""
_NONCE_BYTES = 32
_DIGEST_BYTES = 32
_DIALLER, _LISTENER = b"dialler", b"listener"

ONE_SECRET = (
    "All processes of a cluster have one secret. A unix socket has it in a file beside it; give it to other "
    "processes in a file that PW_SECRET_FILE names, or in PW_SECRET"
)
NO_PROOF = "it does not know the secret of this process's cluster"


class ProofError(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


class Proof:
    """One end of the exchange: feed what comes, send what `feed` returns, until `is_done`.

    Args:
        secret: the cluster's.
        plane: the purpose of the connection; a proof for one plane is invalid for another.
        listens: whether this end was dialled.
    """

    def __init__(self, secret: bytes, plane: bytes, listens: bool) -> None:
        self.is_done = False
        self.missing_bytes = _NONCE_BYTES if listens else _NONCE_BYTES + _DIGEST_BYTES
        """Size of the message that the peer is to send next."""
        self._secret = secret
        self._plane = plane
        self._listens = listens
        self.hello = os.urandom(_NONCE_BYTES)
        """A nonce: the dialler's first message."""
        self._nonces = b""

    def answer(self, message: bytes) -> bytes:
        """The answer to the peer's next message; empty for none.

        Raises:
            ProofError: the message proves nothing.
        """
        if len(message) != self.missing_bytes:
            raise ProofError("a message of the wrong size")
        if not self._listens:
            self._nonces = self.hello + message[:_NONCE_BYTES]
            self._check(_LISTENER, message[_NONCE_BYTES:])
            return self._digest(_DIALLER)
        if not self._nonces:
            self._nonces = message + self.hello
            self.missing_bytes = _DIGEST_BYTES
            return self.hello + self._digest(_LISTENER)
        self._check(_DIALLER, message)
        return b""

    def take(self, inbox: bytearray) -> bytes:
        """Remove the message at the front of `inbox`, if it is complete, and answer it (see
        `answer`)."""
        if self.is_done or len(inbox) < self.missing_bytes:
            return b""
        message = bytes(inbox[: self.missing_bytes])
        del inbox[: self.missing_bytes]
        return self.answer(message)

    def _digest(self, end: bytes) -> bytes:
        said = b"pw 1 " + self._plane + b" " + end + b" " + self._nonces
        return hmac.digest(self._secret, said, hashlib.sha256)

    def _check(self, end: bytes, digest: bytes) -> None:
        if not hmac.compare_digest(digest, self._digest(end)):
            raise ProofError(NO_PROOF)
        self.is_done = True
