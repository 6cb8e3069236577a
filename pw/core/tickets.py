"""Tickets: how a client proves to a host that the controller has let it in.

The controller signs the client's number and the name of its node (Ed25519, RFC 8032). Hosts get the
public key only, so a host can check tickets and cannot make any.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_CLIENTS = range(1, 1 << 63)


class Tickets:
    """Makes the tickets of one controller.

    Args:
        secret: of this controller alone; bytes of any length.
    """

    def __init__(self, secret: bytes) -> None:
        seed = hashlib.blake2b(secret, digest_size=32, person=b"pw tickets").digest()
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()
        """Public key that hosts need to check tickets."""

    def ticket(self, client: int, node: str) -> bytes:
        """A ticket (64 bytes) for the client with a number, at a node."""
        return self._key.sign(_identity(client, node))


def is_valid(ticket: bytes, public: bytes, client: int, node: str) -> bool:
    """Whether a ticket is for this client at this node, from the controller with this public key.

    It takes about 150 us, once for each client.
    """
    if client not in _CLIENTS or not public:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(ticket, _identity(client, node))
    except (InvalidSignature, ValueError):
        return False
    return True


def _identity(client: int, node: str) -> bytes:
    return client.to_bytes(8, "big") + node.encode()
