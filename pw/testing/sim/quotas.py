"""Tenants that reach their bounds, and the promise that none has more and that nothing stays counted.

With the profile's `quotas`, users are of two tenants, whose bounds the seed chooses, and changes at times.
A user whose slice waits for devices of its tenant gives up after a while, in the hope of a smaller one. The
monitor compares the ledger with what clients have (`ledger`), and what the resource manager is asked for with
the bound (`quotas`). What waits for room does so only while there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from random import Random
from typing import Any

from pw.core import messages as msg
from pw.core.ids import CONTROL, RESOURCES, Address, is_repeat
from pw.core.rights import NewRights, Resource, Rights, Size, TenantRights
from pw.testing.sim.world import Violation

CHANGES = 2
"""Number of times that the operator changes the bounds."""
INJECTED = "quotas"
"""Name of what excuses the errors of users that exceed a bound."""


def random_rights(random: Random) -> TenantRights:
    """Return bounds of the two tenants; none is so low that a tenant can do nothing."""
    named = {
        tenant: Rights(
            clients=random.choice((1, 2, None)),
            devices=random.choice((1, 3, 6, 12)),
            programs=random.choice((1, 3, 6, None)),
            host_memory=random.choice((Size(0), Size(1 << 12), Size(1 << 16), None)),
            device_memory=random.choice((Size(1 << 14), Size(1 << 16), Size(1 << 18), None)),
        )
        for tenant in ("tenant-0", "tenant-1")
    }
    return TenantRights(named=named, have_file=True)


def counted_for_nothing(client: Any) -> bool:
    """Whether a client that has deleted all has an amount of what does not exist any more.

    Replicas stay while another client may need what is made of them.
    """
    amounts = client.usage.amounts
    replicas = amounts.get(Resource.HOST_MEMORY, {}).keys()
    return bool(amounts.get(Resource.PROGRAMS)) or not replicas <= client.lineage.origins.keys()


def change_rights(cluster: Any, random: Random) -> None:
    """Have the operator change the bounds at some moments, as by SIGHUP."""

    def change() -> None:
        cluster.rights = random_rights(random)
        cluster.world.checked["rights changed"] += 1
        if cluster.node.alive:
            cluster.node.post("controller", NewRights(cluster.rights))

    for _ in range(CHANGES):
        cluster.world.at(random.uniform(0.5, cluster.world.profile.span_s), change)


class QuotaMonitor:
    """Watches the ledger of each controller."""

    def __init__(self, cluster: Any) -> None:
        if not cluster.world.profile.quotas:
            return
        self._cluster = cluster
        self._world = world = cluster.world
        change_rights(cluster, world.streams("changes of rights"))
        self._bound: dict[int, int] = {}
        """Devices of each slice that the resource manager was asked for and has not got back."""
        self._past: set[int] = set()
        """Slices that were given back; recovery may borrow them, which counts for no tenant."""
        cluster.on_start["controller"].append(self._started)
        world.watch_sent(msg.AllocateSlice, self._asked_for)
        world.watch_sent(msg.ReleaseSlice, self._given_back)
        world.watch_sent(msg.SliceRefused, self._refused)
        world.watch_sent(msg.InstallProgram, self._installed)
        for kind in (
            *(msg.RegisterProgram, msg.ReleaseProgram, msg.AllocateSlice, msg.ReleaseSlice),
            *(msg.SliceRefused, msg.PeerLost, msg.Resumed, msg.Checkpoint, NewRights),
        ):
            world.watch_handled(kind, self._handling)

    def _started(self, controller: Any) -> None:
        self._bound.clear()
        self._past.clear()

    # --- as the resource manager and schedulers see it --------------------------------------------

    def _asked_for(self, sender: Address, to: Address, message: msg.AllocateSlice) -> None:
        if to != RESOURCES or message.slice in self._past:
            return
        control = self._cluster.controller
        client = control.sessions.owner(message.slice)
        assert client is not None, "slices are asked for by clients"
        self._bound[message.slice] = message.devices
        self._world.checked["quotas"] += 1
        rights = control.usage.rights.of(client.tenant)
        total = sum(
            devices
            for number, devices in self._bound.items()
            if (owner := control.sessions.owner(number)) is not None
            and owner.tenant == client.tenant
        )
        if rights.devices is not None and total > rights.devices:
            words = f"{client.tenant} gets {total} devices and may have {rights.devices}"
            raise Violation("quotas", words)

    def _given_back(self, sender: Address, to: Address, message: msg.ReleaseSlice) -> None:
        if to == RESOURCES and self._bound.pop(message.slice, None) is not None:
            self._past.add(message.slice)

    def _refused(self, sender: Address, to: Address, message: msg.SliceRefused) -> None:
        if sender == RESOURCES:
            self._bound.pop(message.slice, None)

    def _installed(self, sender: Address, to: Address, message: msg.InstallProgram) -> None:
        """Each program that hosts compile is counted, but for those of the controller, and for replays."""
        client = self._cluster.controller.sessions.owner(message.program)
        if sender != CONTROL or client is None or is_repeat(message.program):
            return
        self._world.checked["quotas"] += 1
        counted = client.usage.amounts.get(Resource.PROGRAMS, {})
        if message.program in client.programs and message.program not in counted:
            what = f"a program of {client.name} is installed and not counted"
            raise Violation("ledger", what)

    # --- the ledger -------------------------------------------------------------------------------

    def _handling(self, sender: Address, to: Address, message: Any) -> Callable[[], None] | None:
        if to != CONTROL:
            return None
        control = self._cluster.controller
        before = self._totals()
        client = control.sessions.at(sender.node)
        is_back = client is not None and client.resuming is not None

        def check() -> None:
            self._check(before, is_back=is_back)

        return check

    def _totals(self) -> Counter[tuple[str, Resource]]:
        """Return what tenants have, as the clients' tables have it."""
        control = self._cluster.controller
        waiting, programs = control.slices.queue.keys, control.registry.queue.keys
        totals: Counter[tuple[str, Resource]] = Counter()
        for client in control.sessions.clients:
            slices, tenant = client.slices, client.tenant
            totals[tenant, Resource.CLIENTS] += 1
            totals[tenant, Resource.DEVICES] += sum(
                slices.requests[number].devices for number in slices.owned - waiting
            )
            totals[tenant, Resource.PROGRAMS] += sum(
                not (is_repeat(number) or number in programs or not program.body.name)
                for number, program in client.programs.items()
            )
        return totals

    def _check(self, before: Counter[tuple[str, Resource]], *, is_back: bool) -> None:
        usage = self._cluster.controller.usage
        for (tenant, resource), total in self._totals().items():
            self._world.checked["ledger"] += 1
            counted, bound = usage.amount(tenant, resource), usage.rights.of(tenant).bound(resource)
            if counted != total:
                words = f"{tenant} has {total} {resource}, and {counted} are counted"
                raise Violation("ledger", words)
            is_kept = is_back and resource is not Resource.DEVICES
            is_more = total > before[tenant, resource] and not is_kept
            if is_more and bound is not None and total > bound:
                raise Violation("quotas", f"{tenant} has {total} {resource} and may have {bound}")
            wanted = self._wanted(tenant, resource)
            if bound is not None and wanted and total + wanted <= bound:
                words = f"{tenant} waits for {wanted} {resource} and has {total} of {bound}"
                raise Violation("quotas", words)

    def _wanted(self, tenant: str, resource: Resource) -> int:
        """Return how much the oldest of a tenant's work wants that waits for a resource; 0 if none does."""
        control = self._cluster.controller
        waiting: Set[int] = frozenset()
        if resource in (Resource.DEVICES, Resource.PROGRAMS):
            part = control.slices if resource is Resource.DEVICES else control.registry
            waiting = part.queue.keys
        for number in waiting:
            owner = control.sessions.owner(number)
            if owner is not None and owner.tenant == tenant:
                is_slice = resource is Resource.DEVICES
                return int(owner.slices.requests[number].devices) if is_slice else 1
        return 0
