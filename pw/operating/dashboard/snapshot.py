"""One plain picture of the cluster, which the page, `pw top` and metrics draw and never change.

It is made of the controller's answers (`Status`, `Memory`, counters), of the events that it publishes, and of
samples (`pw.operating.dashboard.sampling`). It has only what the credentials of the reader may see.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from pw.core.messages import HostInfo, Memory, Status, slow_hosts
from pw.operating.dashboard.sampling import Sample


class DeviceView(msgspec.Struct, frozen=True):
    """One device. None: not known."""

    device: int
    use: float | None
    """The busy part of its time, in the last sample."""
    arrays_bytes: int | None
    reserved_bytes: int
    limit_bytes: int | None
    host_bytes: int
    """Bytes of its shards that lie in host memory."""
    file_bytes: int
    """Bytes of its shards that lie in files of its host."""
    clients: tuple[tuple[str, int], ...]
    """Names of clients, and the bytes that each has there."""


class HostView(msgspec.Struct, frozen=True):
    """One host."""

    name: str
    state: str
    pid: int
    devices: int
    endpoint: str
    python: bool
    use: float | None
    """The mean of its devices."""
    used_bytes: int | None
    limit_bytes: int | None
    slow_factor: float
    """Factor by which the host is as slow as the median of its gangs; 1 for one that is not slow."""
    suspect_devices: int = 0
    """Number of devices that an error has named, and that are not tested yet."""
    failed_devices: int = 0
    """Number of devices that have failed their test."""


class SlowView(msgspec.Struct, frozen=True):
    """A slow host."""

    host: str
    words: str
    """One line about the host: how slow it is, for how long, and why."""


class IslandView(msgspec.Struct, frozen=True):
    """One island."""

    name: str
    state: str
    platform: str
    kind: str
    expected_hosts: int
    missing: tuple[str, ...]
    formed: int
    slices: int
    queued: int
    launched: int
    device_s: float
    devices: int
    use: float | None
    used_bytes: int | None
    limit_bytes: int | None
    hosts: tuple[HostView, ...]


class TenantView(msgspec.Struct, frozen=True):
    """The work and the devices of the clients of one tenant."""

    name: str
    share: float
    clients: int
    runs: int
    queued: int
    waiting_s: float
    """Seconds that the longest waiting run has waited."""
    arrays: int
    arrays_bytes: int
    launches: int
    """Ended, since its present clients came."""
    waited_s: float
    device_s: float
    use: float | None
    """Part of the time of all devices in the last sample."""


class ClientView(msgspec.Struct, frozen=True):
    """A connected process."""

    number: int
    name: str
    tenant: str
    share: float
    priority: int
    arrays: int
    programs: int
    slices: int
    runs: int
    queued: int
    waiting_s: float
    waited_s: float
    launches: int
    device_s: float
    arrays_bytes: int
    use: float | None
    awaited_hosts: tuple[str, ...]
    silent_s: float


class RunView(msgspec.Struct, frozen=True):
    """A run in flight, one of the oldest of its client."""

    run: str
    client: int
    program: str
    islands: tuple[str, ...]
    age_s: float
    segments_left: int


class Happening(msgspec.Struct, frozen=True):
    """Something that has happened, as one line."""

    time_s: float
    topic: str
    what: str
    words: str


class ProcessLine(msgspec.Struct, frozen=True):
    """A warning or an error that the controller or a host has logged."""

    process: str
    time_s: float
    level: str
    text: str


class WorkSample(msgspec.Struct, frozen=True):
    """The device time that clients had between two looks at the cluster."""

    from_s: float
    until_s: float
    device_s: tuple[tuple[int, float], ...]
    """Clients, and the seconds of each; those of all others have the number 0."""


class Rates(msgspec.Struct, frozen=True):
    """The work of the cluster a second, over the last seconds."""

    time_s: float
    runs: float
    launches: float
    sent_bytes: float
    queued: int
    in_flight: int
    use: float | None
    work: WorkSample | None = None
    """Work since the last snapshot; None if nothing new is known of it."""


class Snapshot(msgspec.Struct, frozen=True):
    """The cluster at one moment."""

    time_s: float
    """Seconds since 1970."""
    trouble: str
    """Reason why the picture is old; empty if it is not."""
    address: str
    pw_version: str
    jax_version: str
    policy: str
    tenant: str
    """Whose clients and runs it has; empty for those of all."""
    islands: tuple[IslandView, ...]
    waiting_hosts: tuple[HostView, ...]
    tenants: tuple[TenantView, ...]
    clients: tuple[ClientView, ...]
    hidden_clients: int
    hidden_runs: int
    runs: tuple[RunView, ...]
    transfers: tuple[tuple[str, str, float], ...]
    """Sender and receiver of transfers, and bytes a second."""
    slow: tuple[SlowView, ...]
    happenings: tuple[Happening, ...]
    lines: tuple[ProcessLine, ...]
    rates: Rates
    sample: int
    """Number of the newest sample; 0 before the first."""
    sampled_s: float
    has_events: bool
    silent: tuple[str, ...]
    """Hosts that have not told their memory in time."""
    counters: dict[str, int]
    """Sums over all processes."""
    recoveries: int
    """Recoveries of clients under way."""

    @property
    def hosts(self) -> list[HostView]:
        """All hosts that are connected."""
        return [*(host for island in self.islands for host in island.hosts), *self.waiting_hosts]


class Readings(msgspec.Struct):
    """Answers of the cluster besides its status; each part is as old as its last question."""

    memory: Memory | None = None
    counters: Mapping[str, int] = {}
    sample: Sample | None = None
    samples: int = 0
    sampled_s: float = 0.0
    transfers: tuple[tuple[str, str, float], ...] = ()
    happenings: tuple[Happening, ...] = ()
    lines: tuple[ProcessLine, ...] = ()
    recoveries: int = 0
    has_events: bool = False
    rates: Rates = Rates(0.0, 0.0, 0.0, 0.0, 0, 0, None)


def _sum(values: Sequence[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def devices_of(readings: Readings, host: str, count: int) -> tuple[DeviceView, ...]:
    """Return the devices of a host."""
    memory = (
        {}
        if readings.memory is None
        else {d.device: d for d in readings.memory.devices if d.host == host}
    )
    views = []
    for ordinal in range(count):
        device = memory.get(ordinal)
        busy = (
            None if readings.sample is None else readings.sample.busy.get((host, str(ordinal)), 0.0)
        )
        owners = (
            () if device is None else tuple((one.name, one.arrays_bytes) for one in device.owners)
        )
        views.append(
            DeviceView(
                ordinal,
                busy,
                None if device is None else device.arrays_bytes,
                0 if device is None else device.reserved_bytes + device.temporary_bytes,
                None if device is None else device.limit_bytes,
                0 if device is None else device.host_bytes or 0,
                0 if device is None else device.file_bytes or 0,
                owners,
            )
        )
    return tuple(views)


def snapshot(
    status: Status,
    readings: Readings,
    *,
    time_s: float,
    address: str,
    trouble: str = "",
    tenant: str = "",
) -> Snapshot:
    """Put the answers together, without the reader's own client."""
    used: defaultdict[str, list[int | None]] = defaultdict(list)
    limits: defaultdict[str, list[int | None]] = defaultdict(list)
    owned: Counter[int] = Counter()
    for device in () if readings.memory is None else readings.memory.devices:
        used[device.host].append(device.arrays_bytes)
        limits[device.host].append(device.limit_bytes)
        for owner in device.owners:
            owned[owner.client] += owner.arrays_bytes
    busy: defaultdict[str, float] = defaultdict(float)
    sample = readings.sample
    for (name, _), part in ({} if sample is None else sample.busy).items():
        busy[name] += part

    def host_view(host: HostInfo) -> HostView:
        return HostView(
            host.name,
            host.state,
            host.pid,
            host.devices,
            host.endpoint,
            host.python,
            None if sample is None else min(1.0, busy[host.name] / max(1, host.devices)),
            _sum(used[host.name]),
            _sum(limits[host.name]),
            1.0 if host.slow is None else host.slow.factor,
            sum(one.state == "suspect" for one in host.sick),
            sum(one.state == "failed" for one in host.sick),
        )

    islands = []
    for island in status.islands:
        hosts = tuple(map(host_view, island.hosts))
        islands.append(
            IslandView(
                island.name,
                island.state,
                island.platform,
                island.kind,
                island.expected_hosts,
                island.missing,
                island.formed,
                island.slices,
                island.queued,
                island.launched,
                island.device_s,
                island.devices,
                _mean([host.use for host in hosts]),
                _sum([host.used_bytes for host in hosts]),
                _sum([host.limit_bytes for host in hosts]),
                hosts,
            )
        )
    devices = sum(island.devices for island in islands)

    def part_of_all(device_s: float) -> float | None:
        return None if sample is None else device_s / max(1e-9, sample.length_s * max(1, devices))

    clients = tuple(
        ClientView(
            client.number,
            client.name,
            client.tenant,
            client.share,
            client.priority,
            client.arrays,
            client.programs,
            client.slices,
            client.runs,
            client.use.queued,
            client.use.waiting_s,
            client.use.waited_s,
            client.use.launches,
            client.use.device_s,
            owned[client.number],
            part_of_all(0.0 if sample is None else sample.clients.get(client.number, 0.0)),
            client.awaited_hosts,
            client.silent_s,
        )
        for client in status.clients
        if not client.is_me
    )
    shares = {client.tenant: client.tenant_share for client in status.clients}
    return Snapshot(
        time_s,
        trouble,
        address,
        status.pw_version,
        status.jax_version,
        status.policy,
        tenant,
        tuple(islands),
        tuple(map(host_view, status.other_hosts)),
        _tenants(clients, shares),
        clients,
        status.hidden_clients,
        status.hidden_runs,
        tuple(RunView(*msgspec.structs.astuple(run)) for run in status.runs),
        readings.transfers,
        tuple(SlowView(one.host, one.words) for one in slow_hosts(status.islands)),
        readings.happenings,
        readings.lines,
        readings.rates,
        readings.samples,
        readings.sampled_s,
        readings.has_events,
        () if readings.memory is None else readings.memory.silent,
        dict(readings.counters),
        readings.recoveries,
    )


def _tenants(clients: Sequence[ClientView], shares: Mapping[str, float]) -> tuple[TenantView, ...]:
    grouped: defaultdict[str, list[ClientView]] = defaultdict(list)
    for client in clients:
        grouped[client.tenant].append(client)
    return tuple(
        TenantView(
            name,
            shares.get(name, 1.0),
            len(ones),
            sum(one.runs for one in ones),
            sum(one.queued for one in ones),
            max(one.waiting_s for one in ones),
            sum(one.arrays for one in ones),
            sum(one.arrays_bytes for one in ones),
            sum(one.launches for one in ones),
            sum(one.waited_s for one in ones),
            sum(one.device_s for one in ones),
            None if any(one.use is None for one in ones) else sum(one.use or 0.0 for one in ones),
        )
        for name, ones in sorted(grouped.items())
    )
