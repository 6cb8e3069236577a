"""What hosts tell the controller about their work, where it publishes events."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import ControllerToCoordinator, HostToController


class Observe(ControllerToCoordinator, frozen=True, tag=186):
    """Controller to ShardCoordinator: report transfers and counters once a period, until the epoch ends."""

    period_s: float


class Transferred(msgspec.Struct, frozen=True, array_like=True):
    """An edge that has ended at its receiver."""

    run: int
    edge: int
    sources: tuple[str, ...]
    """Names of the hosts that sent the parts of the transfer."""
    size_bytes: int
    seconds: float
    """Seconds from the launch until all parts were there."""
    failed: bool


class Observed(HostToController, frozen=True, tag=187):
    """ShardCoordinator to Controller: the edges that ended in a period, and the counters of the process."""

    transfers: tuple[Transferred, ...]
    skipped: int
    """Number of transfers that there was no room for."""
    counters: dict[str, int]
