"""Tenants: the groups of clients that a cluster keeps apart, and how a client proves its number.

The tenant of a client is in its certificate. A client sees and changes what clients of its tenant
have. The tenant `OPERATOR` sees and changes everything; a client on a link without a certificate
has its rights.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

OPERATOR = "operator"
"""The tenant that may cancel the runs of all tenants, drain hosts, and see everything."""

_NUMBERS = range(1, 1 << 63)


def may_touch(tenant: str, other: str) -> bool:
    """Whether clients of a tenant may see and change what clients of the `other` tenant have."""
    return tenant in (OPERATOR, other)


class Claims:
    """Makes and checks claims: a client shows one to get its number back from a later controller.

    A claim is a keyed hash (BLAKE2b, RFC 7693) of the client's number and its tenant.

    Args:
        secret: of all controllers of the cluster, one after the other; empty where no link has a
            certificate, and so every client has the rights of the operator.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret, digest_size=32, person=b"pw claims").digest()

    def claim(self, client: int, tenant: str) -> bytes:
        """The claim (32 bytes) of the client with a number to that number."""
        said = client.to_bytes(8, "big") + tenant.encode()
        return blake2b(said, digest_size=32, key=self._key).digest()

    def is_valid(self, claim: bytes, client: int, tenant: str) -> bool:
        """Whether a claim is for this number and this tenant."""
        return client in _NUMBERS and hmac.compare_digest(claim, self.claim(client, tenant))


NO_SECRET = Claims(b"")
"""For a cluster without certificates, in which all clients have the rights of the operator."""
