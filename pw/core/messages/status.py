"""The state of the cluster, and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pw.core.messages.base import (
    ClientToController,
    ClientToStore,
    ControllerToSession,
    HostToSession,
)
from pw.core.messages.device_tests import SickDevice
from pw.core.messages.pace import SlowHost


class GetStatus(ClientToController, frozen=True, tag=47):
    """ClientSession to Controller: describe the cluster."""

    request: int


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """What it takes to empty a host that is told to end (`pw-worker --drain`)."""

    grace_s: float
    """Seconds that the host has."""
    size_bytes: int = 0
    """Bytes of the arrays on its devices."""
    needs_s: float = 0.0
    """Seconds that moving them takes, as fast as clients have left devices so far."""

    @property
    def is_too_short(self) -> bool:
        """Whether the host would end before its arrays have moved."""
        return self.needs_s > self.grace_s


class HostInfo(msgspec.Struct, frozen=True, array_like=True):
    """One host."""

    name: str
    island: str
    """Name of the host's island; of a spare, the island that it waits for, empty for any."""
    state: str
    """State of the host: `ready`, `joining` its island, `spare` (takes the place of a lost host) or
    `draining`."""
    pid: int
    """Process id of the host's runtime."""
    devices: int
    endpoint: str
    python: bool
    """True if the host runs clients' Python functions (`pw-worker --allow-python`)."""
    sick: tuple[SickDevice, ...] = ()
    """Devices of the host that are suspect, or have failed their test."""
    slow: SlowHost | None = None
    """How slow the host is beside the other hosts of its gangs; None if it is as fast, or has none."""
    notice: Notice | None = None
    """What it takes to empty the host when it is told to end; None if it ends at once."""


class IslandInfo(msgspec.Struct, frozen=True, array_like=True):
    """Hosts whose devices run computations together."""

    name: str
    state: str
    """State of the island: `ready`, `forming`, or `waiting` for hosts."""
    platform: str
    kind: str
    hosts: tuple[HostInfo, ...]
    expected_hosts: int
    missing: tuple[str, ...]
    """Names of hosts with a place in the island that are not connected."""
    formed: int
    """Number of times that the island was formed: once, and after each loss or change of hosts."""
    slices: int
    queued: int
    """Number of segments that wait for their launch."""
    launched: int
    """Number of launches in flight."""
    device_s: float = 0.0
    """Device time of all launches that have ended, in seconds: of each device, in all."""
    is_late: bool = False
    """True if the island has been away so long that its slices move to any island that has room."""
    grid: tuple[int, ...] = ()
    """Number of places along each axis of the island's grid of devices; empty before it has formed."""
    wraps: tuple[int, ...] = ()
    """For each axis the number of devices after which it wraps around; 0 where it does not."""
    free_blocks: tuple[tuple[int, ...], ...] = ()
    """Extents of the blocks that the devices without a slice are made of, the largest first."""
    exclusive: int = 0
    """Number of devices of slices that are exclusive."""
    slice_memory_bytes: int = 0
    """Bytes that the slices with a bound of memory may have together, on the device where that is most."""
    left_out: int = 0
    """Number of devices that have failed their test, which no slice gets."""

    @property
    def devices(self) -> int:
        """Number of devices of the connected hosts that slices may have."""
        return sum(host.devices for host in self.hosts) - self.left_out


def slow_hosts(islands: tuple[IslandInfo, ...]) -> list[SlowHost]:
    """Return the slow hosts of islands, the slowest first."""
    slow = [host.slow for island in islands for host in island.hosts if host.slow is not None]
    return sorted(slow, key=lambda one: -one.factor)


class IslandWork(NamedTuple):
    """What the scheduler of an island knows of its work."""

    queued: int = 0
    """Number of segments that wait for their launch."""
    launched: int = 0
    """Number of launches in flight."""
    device_s: float = 0.0
    """Device time of all launches that have ended, in seconds: of each device, in all."""
    slow: Mapping[str, SlowHost] = {}
    """Slow hosts by name."""


class ClientUse(msgspec.Struct, frozen=True, array_like=True):
    """Waiting launches of a client, and the time that it has had since it came."""

    queued: int = 0
    """Number of segments that wait for their launch."""
    waiting_s: float = 0.0
    """Seconds for which none of them could go."""
    launches: int = 0
    """Number of launches that have ended."""
    waited_s: float = 0.0
    """Seconds for which these launches were queued, in all."""
    device_s: float = 0.0
    """Device time of these launches, in seconds: of each device, in all."""

    def __add__(self, other: ClientUse) -> ClientUse:
        return ClientUse(
            self.queued + other.queued,
            max(self.waiting_s, other.waiting_s),
            self.launches + other.launches,
            self.waited_s + other.waited_s,
            self.device_s + other.device_s,
        )


class ClientInfo(msgspec.Struct, frozen=True, array_like=True):
    """A process that is connected."""

    number: int
    name: str
    share: float
    """Weight of the client, where the policy is `share`."""
    priority: int
    """Importance of the client, where the policy is `priority`."""
    arrays: int
    programs: int
    slices: int
    runs: int
    """Number of calls in flight."""
    is_me: bool
    """True for the session that has asked."""
    awaited_hosts: tuple[str, ...]
    """Names of hosts that the client's slices name, and wait for."""
    tenant: str = ""
    tenant_share: float = 1.0
    """Weight of the client's tenant among tenants, where the policy is `share`."""
    use: ClientUse = ClientUse()
    silent_s: float = 0.0
    """Seconds for which nothing has come from the client; 0 unless that is long."""
    suspended: str = ""
    """Words for who has suspended the client, and since when; empty if it is not suspended."""


class TenantInfo(msgspec.Struct, frozen=True, array_like=True):
    """What the clients of a tenant have together, and may have (`pw.core.rights`)."""

    name: str
    share: float
    """Weight of the tenant among tenants, where the policy is `share`."""
    amounts: dict[str, int]
    """Amounts that the tenant has, by the name of the right, and its `runs` in flight. Memory is in
    bytes, that of devices on the device where the tenant has most."""
    bounds: dict[str, int]
    """Amounts that the tenant may have, by the name of the right; a right without a bound is left out."""
    spent: dict[str, float] = {}
    """Amounts that the tenant has used (`pw.core.accounts.Spent`), by name, since the file of accounts began,
    or since the controller started."""


class RunInfo(msgspec.Struct, frozen=True, array_like=True):
    """A call in flight, one of the oldest of its client."""

    run: str
    """Name of the run, for `pw cancel`; also of a replay."""
    client: int
    function: str
    islands: tuple[str, ...]
    age_s: float
    segments_left: int
    """Number of segments of the run that have not ended."""


class Status(ControllerToSession, frozen=True, tag=48):
    """Controller to ClientSession: the state of the cluster."""

    request: int
    pw_version: str
    jax_version: str
    policy: str
    islands: tuple[IslandInfo, ...]
    other_hosts: tuple[HostInfo, ...]
    """Hosts that have no place in an island: spare and draining ones."""
    clients: tuple[ClientInfo, ...]
    runs: tuple[RunInfo, ...]
    """Oldest runs of each client."""
    events: str = ""
    """Address at which the controller publishes events; empty if it does not."""
    hidden_clients: int = 0
    """Number of clients of other tenants, which the asker may not see."""
    hidden_runs: int = 0
    """Number of calls in flight of those clients."""
    awaited_islands: int = 0
    """Number of islands that a cluster that starts still waits for."""
    tenants: tuple[TenantInfo, ...] = ()
    """Tenants that the asker may see: those with clients, and those with rights of their own."""


class GetStats(ClientToController, ClientToStore, frozen=True, tag=49):
    """ClientSession to Controller or ObjectStore: report the counters of the process."""

    request: int


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """A warning or an error that a process has logged."""

    time_s: float
    """Time of the line, in seconds since 1970 on its machine's clock."""
    level: str
    text: str


class Stats(ControllerToSession, HostToSession, frozen=True, tag=50):
    """Controller or ObjectStore to ClientSession: the counters of this process."""

    request: int
    node: str
    counters: dict[str, int]
    lines: tuple[LogLine, ...] = ()
    """Newest warnings and errors; only for operators, because they name what others have."""
