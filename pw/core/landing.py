"""Where the bytes of a transfer should go: the one thing both ends of a bulk transfer agree on.

A receiver reserves a buffer and describes it in a `Landing`; the landing travels to the sender
inside an ordinary control message, and the sender pushes the bytes to it over the bulk plane.
The transfer number is drawn at random, so knowing it is what entitles a peer to write: a peer that
was not handed the landing cannot guess its way into somebody's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """Where a receiver wants the bytes of one transfer."""

    transfer: int
    """Unique at the receiving plane; 63 random bits, never 0."""
    size_bytes: int
    block: int
    """The receiver's shared-memory block; 0 for a small buffer, whose bytes travel inline."""
    machine: str
    """Machine, network namespace and user of the receiver."""
    socket: str
    """The receiver's unix socket: a path, or an abstract name without its leading NUL; empty if it has none."""
    endpoint: str
    """Where the receiver takes chunks, `tcp://ip:port` or `ipc://path`; empty if nowhere."""


class Bulk(Protocol):
    """The bulk plane as actors see it (see `pw.transport.bulk.BulkPlane`)."""

    def land(self, size_bytes: int, deliver: Callable[[Bytes], None]) -> Landing:
        """Reserve a buffer; `deliver` is called once, when all bytes are in."""

    def cancel(self, transfer: int) -> None:
        """Give up a landing."""

    def landed_bytes(self, transfer: int) -> int:
        """How much of a landing is known to be in; 0 also where the sender writes into it unseen."""

    def push(
        self,
        landing: Landing,
        parts: Sequence[tuple[int, np.ndarray[Any, Any]]],
        done: Callable[[Exception | None], None],
    ) -> None:
        """Copy arrays to offsets of a landing; `done` when they are no longer needed."""
