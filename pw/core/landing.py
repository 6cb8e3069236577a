"""`Landing`: the receiver's description of the buffer for a bulk transfer.

A receiver reserves a buffer and describes it in a `Landing`, which travels to the sender in a
control message. The sender pushes the bytes to it over the bulk plane. The transfer number is
random: a peer that did not get the landing cannot guess it, so it cannot write into the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np

from pw.core.ids import NAME_CHARACTERS

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
AWAITED_S = 10.0
"""Seconds for which a push waits for the connection of a receiver that dials."""


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """The buffer of a receiver for one transfer."""

    transfer: Annotated[int, msgspec.Meta(gt=0)]
    """Number of the transfer, unique at the receiving plane; 63 random bits, never 0."""
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    block: Annotated[int, msgspec.Meta(ge=0)]
    """Number of the receiver's shared-memory block; 0 for a small buffer, whose bytes travel inline."""
    machine: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS)]
    """Machine, network namespace and user of the receiver."""
    socket: str
    """Unix socket of the receiver: a path, or an abstract name without its leading NUL; empty if it has
    none."""
    endpoint: str
    """Endpoint of the receiver for chunks, `tcp://ip:port` or `ipc://path`; empty if it has none."""
    plane: str = ""
    """Number of a receiver that dials its senders, 128 random bits as 32 hexadecimal digits; else empty."""


class Bulk(Protocol):
    """The bulk plane as actors see it (see `pw.transport.bulk.plane.BulkPlane`)."""

    def land(self, size_bytes: int, deliver: Callable[[Bytes], None], sender: str = "") -> Landing:
        """Reserve a buffer; `deliver` is called once, when all bytes are in.

        `sender` is the endpoint of the process that will push, for a process that cannot be dialled.
        """

    def cancel(self, transfer: int, *, unused: bool = False) -> None:
        """Release a landing without its bytes; `unused`: its sender has said that it does not push."""

    def landed_bytes(self, transfer: int) -> int:
        """Return how many bytes have arrived; 0 if the sender writes into shared memory."""

    def push(
        self,
        landing: Landing,
        parts: Sequence[tuple[int, np.ndarray[Any, Any]]],
        done: Callable[[Exception | None], None],
    ) -> None:
        """Copy arrays to offsets of a landing; `done` is called when the arrays may be freed."""
