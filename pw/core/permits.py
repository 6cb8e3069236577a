"""Permits: the controller's word that a host may have replicas of an array from another host.

A permit is a keyed hash (BLAKE2b, RFC 7693) of the array and the host that gets it. The key is known
to the controller and to the host that gives (`pw.core.tenants.Claims.key_of`): a host can check
permits for what it has, and cannot make any for what others have.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

PERMIT_BYTES = 16


def permit(key: bytes, array: int, host: str) -> bytes:
    """Return the permit (16 bytes) for a host to get an array from the host with this key."""
    return blake2b(f"{array} {host}".encode(), digest_size=PERMIT_BYTES, key=key).digest()


def is_valid(shown: bytes, key: bytes, array: int, host: str) -> bool:
    """Return whether a permit is for this host and this array, at the host with this key."""
    return hmac.compare_digest(shown, permit(key, array, host))
