"""`pw.status()`: what the cluster is and what it is at, as an object, as tables, and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pw.client.connection import current
from pw.client.show.tables import Table, html, plain, renderable
from pw.core.ids import client_of, run_name
from pw.core.messages import Status

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["ClientInfo", "ClusterStatus", "HostInfo", "IslandInfo", "RunInfo", "status"]

STATUS_S = 10.0


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One host."""

    name: str
    island: str
    """Its island; of a host without a place in one, that which it waits for, empty for any."""
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
    """Hosts that have a place in it and are not here."""
    formed: int
    """How often it was formed; each time after the first, because hosts had been lost or changed."""
    slices: int
    queued: int
    """Pieces of work that wait for their launch."""
    launched: int
    """Pieces of work that are launched and have not ended."""

    @property
    def devices(self) -> int:
        """Devices of the hosts that are here."""
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
    """It is the session that asked."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A call in flight, one of the oldest ones of its client."""

    run: str
    """What `pw cancel` takes."""
    client: int
    function: str
    islands: tuple[str, ...]
    age_s: float


@dataclass(frozen=True, slots=True, repr=False)
class ClusterStatus:
    """A cluster as its controller saw it when it was asked; prints as tables."""

    address: str | None
    """Of the controller, for PW_ADDRESS and other processes; None if it is in this process alone."""
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
        """What the controller has told the client with number `me`."""
        return cls(
            address,
            told.pw_version,
            told.jax_version,
            told.policy,
            tuple(
                IslandInfo(
                    island.island,
                    island.state,
                    island.platform,
                    island.kind,
                    tuple(
                        HostInfo(
                            host.node,
                            island.island,
                            "ready" if host.joined else "joining",
                            host.process,
                            host.devices,
                            host.endpoint,
                        )
                        for host in island.hosts
                    ),
                    island.expected_hosts,
                    island.missing,
                    island.epoch,
                    island.slices,
                    island.queued,
                    island.launched,
                )
                for island in told.islands
            ),
            tuple(
                HostInfo(
                    host.node, host.island, host.state, host.process, host.devices, host.endpoint
                )
                for host in told.waiting
            ),
            tuple(
                ClientInfo(
                    client.client,
                    client.name,
                    client.share,
                    client.priority,
                    client.arrays,
                    client.programs,
                    client.slices,
                    client.runs_in_flight,
                    client.client == me,
                )
                for client in told.clients
            ),
            tuple(
                RunInfo(run_name(run.run), client_of(run.run), run.program, run.islands, run.age_s)
                for run in told.runs
            ),
        )

    @property
    def hosts(self) -> tuple[HostInfo, ...]:
        """All hosts that are here."""
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
        """What is shown, in order."""
        islands = Table(
            "Islands",
            (
                "island",
                "state",
                "platform",
                "hosts",
                "devices",
                "slices",
                "queued",
                "launched",
                "formed",
            ),
            tuple(
                (
                    island.name,
                    island.state,
                    island.platform,
                    f"{len(island.hosts)}/{island.expected_hosts}",
                    island.devices,
                    island.slices,
                    island.queued,
                    island.launched,
                    island.formed,
                )
                for island in self.islands
            ),
        )
        hosts = Table(
            "Hosts",
            ("island", "host", "state", "pid", "devices", "endpoint"),
            tuple(
                (
                    host.island or "any",
                    host.name,
                    host.state,
                    host.pid,
                    host.devices,
                    host.endpoint,
                )
                for host in self.hosts
            ),
        )
        clients = Table(
            "Clients",
            ("client", "name", "share", "priority", "arrays", "programs", "slices", "runs"),
            tuple(
                (
                    client.number,
                    client.name + (" (this one)" if client.is_me else ""),
                    client.share,
                    client.priority,
                    client.arrays,
                    client.programs,
                    client.slices,
                    client.runs,
                )
                for client in self.clients
            ),
        )
        runs = Table(
            "Runs",
            ("run", "function", "islands", "seconds"),
            tuple(
                (run.run, run.function, ", ".join(run.islands), f"{run.age_s:.1f}")
                for run in self.runs
            ),
        )
        return islands, hosts, clients, runs

    def __repr__(self) -> str:
        return plain(self.head, self.tables())

    def __rich__(self) -> Group:
        return renderable(self.head, self.tables())

    def _repr_html_(self) -> str:
        return html(self.head, self.tables())


def status(timeout_s: float = STATUS_S) -> ClusterStatus:
    """The cluster that this process is connected to: islands, hosts, clients, and what runs.

    In a terminal the result prints as tables, in a notebook it shows as such; a script reads its attributes,
    as in `sum(island.devices for island in pw.status().islands)`.

    Args:
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    session = current.runtime()
    return ClusterStatus.of(session.ask.status(timeout_s), session.endpoint, session.client)
