"""The base of all messages."""

from __future__ import annotations

import msgspec

INLINE_BYTES = 8192
"""Host values up to this size travel inside a control message; larger ones take the bulk plane."""


class Base(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""
