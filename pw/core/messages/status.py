"""The state of the cluster, and counters."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import Base


class GetStatus(Base, frozen=True, tag=47):
    """ClientSession to Controller: describe the cluster."""

    request: int


class HostStatus(msgspec.Struct, frozen=True, array_like=True):
    """One host in a status report."""

    node: str
    process: int
    devices: int
    endpoint: str
    joined: bool


class IslandStatus(msgspec.Struct, frozen=True, array_like=True):
    """One island in a status report."""

    island: str
    epoch: int
    state: str
    platform: str
    kind: str
    hosts: tuple[HostStatus, ...]
    expected_hosts: int
    slices: int
    queued: int
    launched: int
    missing: tuple[str, ...] = ()
    """Hosts with a place in it that are not connected."""


class WaitingHost(msgspec.Struct, frozen=True, array_like=True):
    """One host without a place in an island, in a status report."""

    node: str
    state: str
    """`spare`: it takes the place of a lost host; `draining`: it ends when other hosts have its values."""
    island: str
    """The island in which it may take a place; empty for any."""
    process: int
    devices: int
    endpoint: str


class ClientStatus(msgspec.Struct, frozen=True, array_like=True):
    """One client in a status report."""

    client: int
    name: str
    arrays: int
    programs: int
    slices: int
    runs_in_flight: int
    share: float = 1.0
    priority: int = 0


class RunStatus(msgspec.Struct, frozen=True, array_like=True):
    """One run in flight in a status report."""

    run: int
    """The number from its client, also of a replay."""
    program: str
    islands: tuple[str, ...]
    segments_left: int
    age_s: float


class Status(Base, frozen=True, tag=48):
    """Controller to ClientSession: the state of the cluster."""

    request: int
    pw_version: str
    jax_version: str
    policy: str
    islands: tuple[IslandStatus, ...]
    clients: tuple[ClientStatus, ...]
    runs: tuple[RunStatus, ...] = ()
    """The oldest runs of each client."""
    waiting: tuple[WaitingHost, ...] = ()
    """Hosts without a place in an island."""


class GetStats(Base, frozen=True, tag=49):
    """ClientSession to Controller or ObjectStore: report the counters of the process."""

    request: int


class Stats(Base, frozen=True, tag=50):
    """Controller or ObjectStore to ClientSession: the counters of this process."""

    request: int
    node: str
    counters: dict[str, int]
