"""`pw.status()`: the state of the cluster, as an object, as tables, and in a notebook."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from pw.client.connection import current
from pw.client.display.tables import Shown, Table
from pw.client.keywords import checks_keywords
from pw.core.coordinates import times
from pw.core.messages import (
    ClientInfo,
    HostInfo,
    IslandInfo,
    RunInfo,
    SickState,
    Status,
    TenantInfo,
    slow_hosts,
)
from pw.core.rights import DEVICE_MEMORY, Resource
from pw.core.sizes import size_in_words
from pw.core.waits import LOOKING_S

__all__ = [
    "ClientInfo",
    "ClusterStatus",
    "HostInfo",
    "IslandInfo",
    "RunInfo",
    "TenantInfo",
    "status",
]


_COUNTS = ("devices", "slices", "queued", "launched", "formed")
_PLACE = ("name", "state", "pid", "devices")
BLOCKS = 4
"""Number of forms of free blocks that are shown of an island."""
_OWNED = ("share", "priority", "arrays", "programs", "slices", "runs")


@dataclass(frozen=True, slots=True, repr=False)
class ClusterStatus(Shown):
    """The state of a cluster at the time of the question; prints as tables."""

    address: str | None
    """Address of the controller, for PW_ADDRESS; None if other processes cannot reach it."""
    pw_version: str
    jax_version: str
    policy: str
    islands: tuple[IslandInfo, ...]
    other_hosts: tuple[HostInfo, ...]
    """Hosts that have no place in an island: spare and draining ones."""
    clients: tuple[ClientInfo, ...]
    runs: tuple[RunInfo, ...]
    hidden_clients: int = 0
    """Number of clients of other tenants, which this one may not see."""
    hidden_runs: int = 0
    """Number of runs in flight of clients of other tenants."""
    awaited_islands: int = 0
    """Number of islands that a starting cluster waits for."""
    tenants: tuple[TenantInfo, ...] = ()
    """Tenants that this client may see: what each has, may have, and has used."""

    @classmethod
    def of(cls, reply: Status, address: str | None) -> ClusterStatus:
        """Complete the controller's answer with its address."""
        return cls(address, *(getattr(reply, field.name) for field in fields(cls)[1:]))

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
        line = f"{where}, pw {self.pw_version} with jax {self.jax_version}, policy {self.policy}"
        if self.awaited_islands:
            are = "is" if self.awaited_islands == 1 else "are"
            line += f"; {self.awaited_islands} of its islands {are} still to come"
        if self.hidden_clients:
            clients = "1 client" if self.hidden_clients == 1 else f"{self.hidden_clients} clients"
            runs = "1 run" if self.hidden_runs == 1 else f"{self.hidden_runs} runs"
            line += f"; not shown: {clients} of other tenants, with {runs}"
        return line

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of islands, hosts, clients and runs."""
        has_bounds = any(island.slice_memory_bytes for island in self.islands)
        islands = [
            (
                i.name,
                i.state,
                i.platform,
                f"{len(i.hosts)}/{i.expected_hosts}",
                *_of(i, _COUNTS),
                _grid(i),
                _free_blocks(i),
                *((size_in_words(i.slice_memory_bytes),) * has_bounds),
            )
            for i in self.islands
        ]
        has_sick = any(host.sick for host in self.hosts)
        sick = ("sick devices",) * has_sick
        has_notice = any(host.notice is not None for host in self.hosts)
        notice = ("when told to end",) * has_notice
        hosts = [
            (
                h.island or "any",
                *_of(h, _PLACE),
                "yes" if h.python else "no",
                h.endpoint,
                *(_sick(h),) * has_sick,
                *(_notice(h),) * has_notice,
            )
            for h in self.hosts
        ]
        by_tenant = bool(self.hidden_clients) or len({c.tenant for c in self.clients}) > 1
        tenant = ("tenant",) * by_tenant
        clients = [
            (
                c.number,
                c.name + _note(c),
                *_of(c, tenant),
                *_of(c, _OWNED),
                ", ".join(c.awaited_hosts),
            )
            for c in self.clients
        ]
        runs = [(r.run, r.function, ", ".join(r.islands), f"{r.age_s:.1f}") for r in self.runs]
        return (
            Table(
                "Islands",
                (
                    *("island", "state", "platform", "hosts", *_COUNTS, "grid", "free blocks"),
                    *(("slices may have",) * has_bounds),
                ),
                tuple(islands),
            ),
            Table(
                "Hosts",
                ("island", "host", "state", "pid", "devices", "python", "endpoint", *sick, *notice),
                tuple(hosts),
            ),
            Table("Clients", ("client", "name", *tenant, *_OWNED, "waits for"), tuple(clients)),
            Table("Runs", ("run", "function", "islands", "seconds"), tuple(runs)),
        )

    @property
    def by_tenant(self) -> TenantsStatus:
        """What tenants have, may have and have used; prints as a table."""
        return TenantsStatus(self)

    def foot(self) -> tuple[str, ...]:
        """Name the slow hosts."""
        return tuple(one.words for one in slow_hosts(self.islands))


@dataclass(frozen=True, slots=True, repr=False)
class TenantsStatus(Shown):
    """The tenants of a cluster; prints as a table."""

    status: ClusterStatus
    """State of the whole cluster."""

    @property
    def head(self) -> str:
        """One line about the controller."""
        return self.status.head

    @property
    def tenants(self) -> tuple[TenantInfo, ...]:
        """Tenants that this client may see."""
        return self.status.tenants

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of what tenants have and may have, and of what they have used."""
        kinds = [*(resource.value for resource in Resource), DEVICE_MEMORY]
        has = [
            (one.name, one.share, *(_of_bound(one, kind) for kind in kinds), one.amounts["runs"])
            for one in self.tenants
        ]
        used = [
            (
                one.name,
                round(one.spent["device_s"], 3),
                int(one.spent["launches"]),
                round(one.spent["compile_s"], 3),
                f"{one.spent['memory_byte_s'] / (3600 << 30):.3f} GiB h",
                *(
                    size_in_words(int(one.spent[kind]))
                    for kind in ("uploaded_bytes", "stored_bytes", "moved_bytes")
                ),
            )
            for one in self.tenants
        ]
        return (
            Table("Tenants", ("tenant", "share", *kinds, "runs"), tuple(has)),
            Table(
                "Used",
                (
                    *("tenant", "device s", "launches", "compile s", "memory", "uploaded"),
                    *("stored", "between hosts"),
                ),
                tuple(used),
            ),
        )


def _of_bound(tenant: TenantInfo, kind: str) -> str:
    """Return what a tenant has of a kind, and of how much, if that is bounded."""
    words = size_in_words if kind in (Resource.HOST_MEMORY, Resource.DISK, DEVICE_MEMORY) else str
    amount = words(tenant.amounts.get(kind, 0))
    return f"{amount} of {words(tenant.bounds[kind])}" if kind in tenant.bounds else amount


def _grid(island: IslandInfo) -> str:
    """Return the sizes of an island's grid; an axis that wraps around has an `o` behind it."""
    return "x".join(
        f"{size}{'o' * bool(wrap)}" for size, wrap in zip(island.grid, island.wraps, strict=True)
    )


def _free_blocks(island: IslandInfo) -> str:
    """Return the blocks of an island's devices without a slice, the largest first."""
    blocks = Counter(map(times, island.free_blocks))
    words = [f"{count} of {form}" if count > 1 else form for form, count in blocks.items()]
    return ", ".join(words[:BLOCKS]) + ", ..." * (len(words) > BLOCKS)


def _sick(host: HostInfo) -> str:
    """Return the devices of a host that are suspect, or have failed and get no slice in its island."""
    is_out = ", left out" * (host.state in ("ready", "joining"))
    words = {SickState.SUSPECT: "suspect", SickState.FAILED: f"failed{is_out}"}
    return "; ".join(f"{one.device} {words[one.state]}: {one.words}" for one in host.sick)


def _notice(host: HostInfo) -> str:
    """Return what it takes to empty a host that is told to end, and how long it has for that."""
    notice = host.notice
    if notice is None:
        return "ends at once"
    words = f"{size_in_words(notice.size_bytes)} in {notice.needs_s:.1f} of {notice.grace_s:g} s"
    return words + ": too short" * notice.is_too_short


def _note(client: ClientInfo) -> str:
    notes = ["this one"] if client.is_me else []
    if client.suspended:
        notes.append(client.suspended)
    elif client.silent_s and not client.is_me:
        notes.append(f"silent for {client.silent_s:.0f} s")
    return f" ({'; '.join(notes)})" if notes else ""


def _of(info: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(info, name) for name in names)


@checks_keywords
def status(timeout_s: float = LOOKING_S) -> ClusterStatus:
    """Return the state of the cluster: islands, hosts, clients, and runs in flight.

    In a terminal the result prints as tables, in a notebook it shows as such; a script reads its attributes,
    as in `sum(island.devices for island in pw.status().islands)`.

    Args:
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    session = current.runtime()
    return ClusterStatus.of(session.ask.status(timeout_s), session.endpoint)
