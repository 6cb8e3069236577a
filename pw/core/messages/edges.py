"""Between the coordinators of two hosts: the edges of programs."""

from __future__ import annotations

from pw.core.errors import ErrorReport
from pw.core.landing import Landing
from pw.core.messages.base import HostToController, HostToCoordinator
from pw.core.messages.bounds import Count


class EdgeCredit(HostToCoordinator, frozen=True, tag=90):
    """Receiving ShardCoordinator to the sending one: push the bytes of this edge to this landing.

    Without a landing: do not send; the receiver has no room, or will not get the launch that needs them.
    """

    run: int
    edge: int
    landing: Landing | None


class EdgeData(HostToCoordinator, frozen=True, tag=91):
    """Sending ShardCoordinator to the receiving one: the bytes of a small edge."""

    run: int
    edge: int
    data: bytes


class EdgeFailed(HostToCoordinator, frozen=True, tag=92):
    """Sending ShardCoordinator to the receiving one: this edge has no value; its producer failed."""

    run: int
    edge: int
    error: ErrorReport
    alone: bool = False
    """True if the value exists, but cannot be sent to this host; other hosts may receive theirs."""


class BytesMoved(HostToController, frozen=True, tag=86):
    """ShardCoordinator to Controller, some seconds after edges were sent: how much it was for each client."""

    moved: tuple[tuple[int, Count], ...]
    """Clients, with the bytes that this host has sent to other hosts since its last report."""


class EdgeProbe(HostToCoordinator, frozen=True, tag=113):
    """Receiving ShardCoordinator to the sending one: the edge is late; answer whether it will still come."""

    run: int
    edge: int


class EdgeGone(HostToCoordinator, frozen=True, tag=114):
    """Sending ShardCoordinator to the receiving one: the edge was sent, and will not be sent again."""

    run: int
    edge: int
