"""The cluster as it stands, and counters, for whoever asks."""

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
    """Hosts that have a place in it and are not here."""


class WaitingHost(msgspec.Struct, frozen=True, array_like=True):
    """One host without a place in an island, in a status report."""

    node: str
    state: str
    """`spare`: it takes the place of one that is lost; `draining`: it ends when others have what it holds."""
    island: str
    """Where it may take a place; empty for any island."""
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
    """The number that its client gave it, also when it is being run again."""
    program: str
    islands: tuple[str, ...]
    segments_left: int
    age_s: float


class Status(Base, frozen=True, tag=48):
    """Controller to ClientSession: the cluster as it stands."""

    request: int
    pw_version: str
    jax_version: str
    policy: str
    islands: tuple[IslandStatus, ...]
    clients: tuple[ClientStatus, ...]
    runs: tuple[RunStatus, ...] = ()
    """The oldest ones of each client."""
    waiting: tuple[WaitingHost, ...] = ()
    """Hosts without a place in an island."""


class GetStats(Base, frozen=True, tag=49):
    """ClientSession to Controller or ObjectStore: your counters, please."""

    request: int


class Stats(Base, frozen=True, tag=50):
    """Controller or ObjectStore to ClientSession: the counters of this process."""

    request: int
    node: str
    counters: dict[str, int]
