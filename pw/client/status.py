"""`pw.status()`: the state of the cluster, as an object, as tables, and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pw.client.connection import current
from pw.client.show.tables import Table, html, plain, renderable
from pw.core.ids import client_of, run_name
from pw.core.messages import Status

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["ClientInfo", "ClusterStatus", "HostInfo", "IslandInfo", "RunInfo", "status"]

STATUS_S = 10.0

_COUNTS = ("devices", "slices", "queued", "launched", "formed")
_OWNED = ("share", "priority", "arrays", "programs", "slices", "runs")


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One host."""

    name: str
    island: str
    """Its island; of a spare, the island that it waits for, empty for any."""
    state: str
    """`ready`, `joining` its island, `spare` or `draining`."""
    pid: int
    """Of its runtime, on its machine."""
    devices: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class IslandInfo:
    """Hosts whose devices run computations together."""

    name: str
    state: str
    """`ready`, `forming`, or `waiting` for hosts."""
    platform: str
    kind: str
    hosts: tuple[HostInfo, ...]
    expected_hosts: int
    missing: tuple[str, ...]
    """Hosts with a place in it that are not connected."""
    formed: int
    """How often it was formed: once, and after each loss or change of hosts."""
    slices: int
    queued: int
    """Segments that wait for their launch."""
    launched: int
    """Launches in flight."""

    @property
    def devices(self) -> int:
        """Devices of the connected hosts."""
        return sum(host.devices for host in self.hosts)


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A process that is connected."""

    number: int
    name: str
    share: float
    """Its weight, where the policy is `share`."""
    priority: int
    """Its importance, where the policy is `priority`."""
    arrays: int
    programs: int
    slices: int
    runs: int
    """Calls in flight."""
    is_me: bool
    """It is the session that has asked."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A call in flight, one of the oldest of its client."""

    run: str
    """Its name, for `pw cancel`."""
    client: int
    function: str
    islands: tuple[str, ...]
    age_s: float


@dataclass(frozen=True, slots=True, repr=False)
class ClusterStatus:
    """The state of a cluster at the time of the question; prints as tables."""

    address: str | None
    """The controller's, for PW_ADDRESS; None if other processes cannot reach it."""
    pw_version: str
    jax_version: str
    policy: str
    islands: tuple[IslandInfo, ...]
    other_hosts: tuple[HostInfo, ...]
    """Hosts that have no place in an island: spare and draining ones."""
    clients: tuple[ClientInfo, ...]
    runs: tuple[RunInfo, ...]

    @classmethod
    def of(cls, told: Status, address: str | None, me: int) -> ClusterStatus:
        """Convert the controller's answer to the client with number `me`."""
        islands, others = [], []
        for one in told.islands:
            hosts = []
            for host in one.hosts:
                state = "ready" if host.joined else "joining"
                place = host.process, host.devices, host.endpoint
                hosts.append(HostInfo(host.node, one.island, state, *place))
            known = one.island, one.state, one.platform, one.kind, tuple(hosts), one.expected_hosts
            work = one.slices, one.queued, one.launched
            islands.append(IslandInfo(*known, one.missing, one.epoch, *work))
        for spare in told.waiting:
            place = spare.process, spare.devices, spare.endpoint
            others.append(HostInfo(spare.node, spare.island, spare.state, *place))
        clients = []
        for client in told.clients:
            counts = client.arrays, client.programs, client.slices, client.runs_in_flight
            rank = client.share, client.priority
            is_me = client.client == me
            clients.append(ClientInfo(client.client, client.name, *rank, *counts, is_me))
        runs = [
            RunInfo(run_name(run.run), client_of(run.run), run.program, run.islands, run.age_s)
            for run in told.runs
        ]
        return cls(
            address,
            told.pw_version,
            told.jax_version,
            told.policy,
            tuple(islands),
            tuple(others),
            tuple(clients),
            tuple(runs),
        )

    @property
    def hosts(self) -> tuple[HostInfo, ...]:
        """All connected hosts."""
        placed = tuple(host for island in self.islands for host in island.hosts)
        return (*placed, *self.other_hosts)

    @property
    def devices(self) -> int:
        """Devices of all islands."""
        return sum(island.devices for island in self.islands)

    @property
    def head(self) -> str:
        """One line about the controller."""
        where = f"controller {self.address}" if self.address else "controller in this process"
        return f"{where}, pw {self.pw_version} with jax {self.jax_version}, policy {self.policy}"

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of islands, hosts, clients and runs."""
        islands = [
            (i.name, i.state, i.platform, f"{len(i.hosts)}/{i.expected_hosts}", *_of(i, _COUNTS))
            for i in self.islands
        ]
        hosts = [
            (h.island or "any", h.name, h.state, h.pid, h.devices, h.endpoint) for h in self.hosts
        ]
        clients = [
            (c.number, c.name + (" (this one)" if c.is_me else ""), *_of(c, _OWNED))
            for c in self.clients
        ]
        runs = [(r.run, r.function, ", ".join(r.islands), f"{r.age_s:.1f}") for r in self.runs]
        return (
            Table("Islands", ("island", "state", "platform", "hosts", *_COUNTS), tuple(islands)),
            Table("Hosts", ("island", "host", "state", "pid", "devices", "endpoint"), tuple(hosts)),
            Table("Clients", ("client", "name", *_OWNED), tuple(clients)),
            Table("Runs", ("run", "function", "islands", "seconds"), tuple(runs)),
        )

    def __repr__(self) -> str:
        return plain(self.head, self.tables())

    def __rich__(self) -> Group:
        return renderable(self.head, self.tables())

    def _repr_html_(self) -> str:
        return html(self.head, self.tables())


def _of(info: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(info, name) for name in names)


def status(timeout_s: float = STATUS_S) -> ClusterStatus:
    """Return the state of the cluster: islands, hosts, clients, and runs in flight.

    In a terminal the result prints as tables, in a notebook it shows as such; a script reads its attributes,
    as in `sum(island.devices for island in pw.status().islands)`.

    Args:
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    session = current.runtime()
    return ClusterStatus.of(session.ask.status(timeout_s), session.endpoint, session.client)
