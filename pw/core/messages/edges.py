"""Edges of programs: between the shard coordinators of two hosts."""

from __future__ import annotations

from pw.core.errors import ErrorReport
from pw.core.landing import Landing
from pw.core.messages.base import Base


class EdgeCredit(Base, frozen=True, tag=90):
    """Receiving ShardCoordinator to the sending one: put the bytes of this edge here.

    Without a landing: do not send, I have no room for them or will never get the launch that needs them.
    """

    run: int
    edge: int
    landing: Landing | None


class EdgeData(Base, frozen=True, tag=91):
    """Sending ShardCoordinator to the receiving one: the bytes of a small edge."""

    run: int
    edge: int
    data: bytes


class EdgeFailed(Base, frozen=True, tag=92):
    """Sending ShardCoordinator to the receiving one: this edge has no value, its producer failed."""

    run: int
    edge: int
    error: ErrorReport
    alone: bool = False
    """There is a value, only it cannot be sent to this host; others may get theirs."""


class EdgeProbe(Base, frozen=True, tag=113):
    """Receiving ShardCoordinator to the sending one: I have waited long for this edge, is it still to come?"""

    run: int
    edge: int


class EdgeGone(Base, frozen=True, tag=114):
    """Sending ShardCoordinator to the receiving one: I have sent that, and will not send it again."""

    run: int
    edge: int
