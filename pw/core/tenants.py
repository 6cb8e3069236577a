"""Tenants: the groups of clients that a cluster keeps apart, and what later controllers believe.

The tenant of a client is in its certificate. A client sees and changes what clients of its tenant
have. The tenant `OPERATOR` sees and changes everything; a client on a link without a certificate
has its rights. How much a tenant may have is in `pw.core.rights`.
"""

from __future__ import annotations

import hmac
import math
from hashlib import blake2b

from pw.core.errors import ArgumentError
from pw.core.ids import CONTROLLER

OPERATOR = "operator"
"""Name of the tenant that may cancel the runs of all tenants, drain hosts, and see everything."""

PERMIT_BYTES = 16
"""Bytes of a permit."""

_NUMBERS = range(1, 1 << 63)


def may_touch(tenant: str, other: str) -> bool:
    """Whether clients of a tenant may see and change what clients of the `other` tenant have."""
    return tenant in (OPERATOR, other)


def shares_of_tenants(text: str) -> dict[str, float]:
    """Return the shares of tenants in a text like `research=2,rivals=1`.

    Raises:
        ArgumentError: it is no such list, or a share is not a positive number.
    """
    shares = {}
    for part in filter(None, map(str.strip, text.split(","))):
        tenant, _, number = part.partition("=")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not tenant or tenant in shares or not 0 < share < math.inf:
            raise ArgumentError(
                f"{part!r} is no share of a tenant; write each tenant once, with a positive number, as in "
                "research=2,rivals=1"
            )
        shares[tenant] = share
    return shares


class Claims:
    """Makes and checks what processes show to a later controller.

    A client shows a claim to get its number back: a keyed hash (BLAKE2b, RFC 7693) of the number
    and the tenant. A host shows a permit at the controller for an array that it keeps replicas of.

    Args:
        secret: of all controllers of the cluster, one after the other; empty where no link has a
            certificate, and so every client has the rights of the operator.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret, digest_size=32, person=b"pw claims").digest()

    def claim(self, client: int, tenant: str) -> bytes:
        """The claim (32 bytes) of the client with a number to that number."""
        identity = client.to_bytes(8, "big") + tenant.encode()
        return blake2b(identity, digest_size=32, key=self._key).digest()

    def is_valid(self, claim: bytes, client: int, tenant: str) -> bool:
        """Whether a claim is for this number and this tenant."""
        return client in _NUMBERS and hmac.compare_digest(claim, self.claim(client, tenant))

    def key_of(self, host: str) -> bytes:
        """The key (32 bytes) with which a host checks the permits of others."""
        return blake2b(host.encode(), digest_size=32, key=self._key, person=b"pw permits").digest()

    def permit(self, array: int, holder: str, receiver: str) -> bytes:
        """The permit (16 bytes) for the receiver to get replicas of an array from the holder."""
        return permit(self.key_of(holder), array, receiver)

    def may_keep(self, shown: bytes, array: int, host: str) -> bool:
        """Whether a host shows the permit of a controller to keep replicas of an array."""
        return is_valid_permit(shown, self.key_of(CONTROLLER), array, host)


NO_SECRET = Claims(b"")
"""For a cluster without certificates, in which all clients have the rights of the operator."""


def permit(key: bytes, array: int, host: str) -> bytes:
    """Return the permit for a host to get replicas of an array from the host with this key.

    It is a keyed hash (BLAKE2b, RFC 7693). The key is known to the controller and to the host that gives
    (`Claims.key_of`): a host can check permits for what it has, and cannot make any for what others have.
    """
    return blake2b(f"{array} {host}".encode(), digest_size=PERMIT_BYTES, key=key).digest()


def is_valid_permit(shown: bytes, key: bytes, array: int, host: str) -> bool:
    """Return whether a permit is for this host and this array, at the host with this key."""
    return hmac.compare_digest(shown, permit(key, array, host))
