"""Totals of the bytes on each device of an island: of all clients, of tenants, and of slices with a bound.

A total adds up buffers and the peaks of runs in flight. The temporaries of these runs count once, as much as
the run that needs most. What a client takes is added to the total of the slice on which it lies, to that of the
tenant and to that of the island, in the same way. So the bounds of slices and tenants are kept like the memory
of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pw.core.ids import client_of
from pw.core.programs.peak import IslandMemory, OutputMemory
from pw.core.sharding import DeviceAddress

Bytes = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Total:
    """Bytes on each device, of one slice, of one tenant or of all."""

    bound_bytes: int | None
    """Bytes that there may be on each device; None for no bound."""
    tenant: str = ""
    """Name of the tenant; empty if it is no tenant's."""
    slice: int = 0
    """Number of the slice; 0 if it is no slice's."""
    used: Bytes = field(default_factory=lambda: np.zeros(0, np.int64))
    """Bytes on each device, without what device sets have not settled."""
    temporaries: Bytes = field(default_factory=lambda: np.zeros(0, np.int64))
    """Bytes of `used` that are reserved for the temporaries of all runs in flight."""
    computing: set[Needs] = field(default_factory=set)
    """Programs that need temporaries and have runs in flight."""

    def grow(self, devices: int) -> None:
        """Count more devices, up to this number."""
        fresh = np.zeros(devices - len(self.used), np.int64)
        self.used = np.concatenate([self.used, fresh])
        self.temporaries = np.concatenate([self.temporaries, fresh])

    def with_temporaries(self, needs: Needs, peaks: Bytes) -> Bytes:
        """Return what a run adds to `used`: its peak, and temporaries beyond those reserved already."""
        if needs.temporaries is None or needs.runs:
            return peaks
        beyond = needs.temporaries - self.temporaries[needs.devices]
        more: Bytes = peaks + np.maximum(beyond, 0)
        return more

    def has_no_room(self, used: Bytes, more: Bytes) -> bool:
        """Whether devices would have too much: they have `used` with `more` bytes of a run."""
        return self.bound_bytes is not None and bool(((used > self.bound_bytes) & (more > 0)).any())

    def shortage(self, more: Bytes) -> Bytes:
        """Return the bytes that each device lacks to have so many more; none where it gets none."""
        if self.bound_bytes is None:
            return np.zeros_like(self.used)
        short: Bytes = np.where(more > 0, self.used + more - self.bound_bytes, 0)
        return short

    def reserve(self, needs: Needs, used: Bytes, temporaries: Bytes) -> None:
        """Count a run, with which the devices have so much; `temporaries` are those that it adds."""
        self.used[needs.devices] = used
        if needs.temporaries is not None and not needs.runs:
            self.computing.add(needs)
            self.temporaries[needs.devices] += temporaries

    def share_temporaries(self) -> None:
        """Reserve on each device the largest temporaries of the runs in flight."""
        largest = np.zeros_like(self.temporaries)
        for needs in self.computing:
            assert needs.temporaries is not None
            largest[needs.devices] = np.maximum(largest[needs.devices], needs.temporaries)
        self.used += largest - self.temporaries
        self.temporaries = largest


@dataclass(slots=True, eq=False)
class DeviceSet:
    """The devices that a buffer is on, and the totals that count it there."""

    addresses: tuple[DeviceAddress, ...]
    devices: npt.NDArray[np.intp]
    totals: tuple[Total, ...]
    unsettled_bytes: int = 0
    """Bytes on each of the devices that buffers have added or removed, and that no total counts yet."""

    def settle(self) -> None:
        """Add to the totals what buffers have added or removed."""
        if self.unsettled_bytes:
            for total in self.totals:
                total.used[self.devices] += self.unsettled_bytes
            self.unsettled_bytes = 0


@dataclass(slots=True, eq=False)
class Needs:
    """The memory that a run of a program needs."""

    name: str
    memory: IslandMemory
    devices: npt.NDArray[np.intp]
    group: npt.NDArray[np.intp]
    outputs: list[tuple[OutputMemory, DeviceSet]]
    peaks: Bytes
    """Bytes that are reserved for the run itself on each device."""
    totals: tuple[Total, ...]
    """Totals that count the runs: that of the tenant, if it is counted, and that of the island; or that of a
    slice."""
    slices: tuple[Needs, ...] = ()
    """Part of a run on each of its slices that have a bound."""
    host_values: dict[int, Bytes] = field(default_factory=dict)
    """Bytes that a run needs more on each device if an input is a small host value, by input."""
    temporary_bytes: tuple[int, ...] = ()
    temporaries: Bytes | None = None
    """Bytes that the temporaries of the program add on each device; None if there are none."""
    runs: int = 0
    """Number of runs of the program that hold a reservation."""

    @property
    def largest_bytes(self) -> int:
        """Bytes that a run with any arguments needs on a device, at most."""
        needs = (sum(part.host_values.values(), part.peaks) for part in self.parts)
        return max(int(bytes_.max(initial=0)) for bytes_ in needs)

    @property
    def parts(self) -> tuple[Needs, ...]:
        """What is counted for a run: its part on each slice that has a bound, and all of it."""
        return (*self.slices, self)

    def of(self, total: Total) -> Needs:
        """Return the part of a run that a total counts."""
        return next((part for part in self.slices if total in part.totals), self)

    def let_compute(self) -> None:
        """Reserve the temporaries of the program, as for a run in flight."""
        for part in self.slices:
            part.let_compute()
        self.runs += 1
        if self.runs == 1 and self.temporaries is not None:
            self._share()

    def let_compute_no_more(self) -> None:
        """A run has ended, or `let_compute`."""
        for part in self.slices:
            part.let_compute_no_more()
        self.runs -= 1
        if not self.runs and self.temporaries is not None:
            self._share()

    def need_temporaries(self, peaks: Bytes) -> None:
        """Count the temporaries of a program, with which a run needs these `peaks`."""
        self.temporaries = peaks - self.peaks
        if self.runs:
            self._share()

    def _share(self) -> None:
        for total in self.totals:
            if self.runs:
                total.computing.add(self)
            else:
                total.computing.discard(self)
            total.share_temporaries()


@dataclass(slots=True)
class TenantBounds:
    """What each tenant may have on a device, and which tenant each client has; epochs do not change it."""

    tenants: dict[int, str] = field(default_factory=dict)
    """Tenants of the clients that are here, by number."""
    bounds_bytes: dict[str, int | None] = field(default_factory=dict)
    """Bytes that each tenant may have on a device; None for no bound."""

    def remove(self, client: int) -> None:
        """Forget a client, and its tenant with the last one."""
        tenant = self.tenants.pop(client, None)
        if tenant is not None and tenant not in self.tenants.values():
            del self.bounds_bytes[tenant]


class IslandTotals:
    """The totals of one island, and which of them count what a client takes.

    Args:
        capacity_bytes: memory of each device; None for no limit.
        tenants: the tenants that are counted.
    """

    def __init__(self, capacity_bytes: int | None, tenants: TenantBounds) -> None:
        self.island = Total(capacity_bytes)
        """Bytes of all clients; its bound is the memory of a device."""
        self.by_tenant: dict[str, Total] = {}
        """Bytes of each tenant that is counted, by name."""
        self.by_slice: dict[int, Total] = {}
        """Bytes on each slice that has a bound, by number."""
        self._tenants = tenants
        self._devices = 0

    def __iter__(self) -> Iterator[Total]:
        return iter((self.island, *self.by_tenant.values(), *self.by_slice.values()))

    def of(self, client: int, slice: int = 0) -> tuple[Total, ...]:
        """Return the totals that count what a client takes, on a slice or elsewhere; the island is last."""
        totals = self._of_client(client)
        if (own := self.by_slice.get(slice)) is not None:
            return own, *totals
        return totals

    def _of_client(self, client: int) -> tuple[Total, ...]:
        tenant = self._tenants.tenants.get(client)
        if tenant is None:
            return (self.island,)
        total = self.by_tenant.get(tenant)
        if total is None:
            total = Total(self._tenants.bounds_bytes.get(tenant), tenant)
            total.grow(self._devices)
            self.by_tenant[tenant] = total
        return total, self.island

    def count(self, total: Total, clients: Iterable[int]) -> bool:
        """Whether a total counts anything that one of these clients takes."""
        if total.slice:
            return client_of(total.slice) in clients
        return any(total in self._of_client(client) for client in clients)

    def bound_tenant(self, tenant: str, bound_bytes: int | None) -> bool:
        """Change what a tenant may have on each device; return whether that is something else."""
        total = self.by_tenant.get(tenant)
        is_other = total is not None and total.bound_bytes != bound_bytes
        if total is not None:
            total.bound_bytes = bound_bytes
        return is_other

    def bound_slice(self, slice: int, bound_bytes: int) -> None:
        """Count what lies on a slice, which may have so much of each device; count it no more if that is 0."""
        total = self.by_slice.get(slice)
        if not bound_bytes:
            if total is not None:
                total.bound_bytes = None  # arrays may lie there still, and runs be in flight
                del self.by_slice[slice]
        elif total is not None:
            total.bound_bytes = bound_bytes
        else:
            total = self.by_slice[slice] = Total(bound_bytes, slice=slice)
            total.grow(self._devices)

    def grow(self, devices: int) -> None:
        """Count more devices, up to this number."""
        self._devices = devices
        for total in self:
            total.grow(devices)
