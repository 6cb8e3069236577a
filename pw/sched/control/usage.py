"""The ledger: what each client has of each resource, and whether its tenant may have more.

Theory of operation. An amount is counted under the id of what it is for: devices under the number of their
slice, programs under their own, replicas under their array. So an amount that is counted twice, or given
back twice, changes nothing. What a tenant has is the sum over its clients, and what a client has is
forgotten when it leaves; only bytes on disk stay, in a table of their own
(`pw.sched.control.checkpoints.disk_table`). The parts of the controller `take` before they do what needs the
resource, and `give` when it is over. A part whose work waits for a resource has a `RoomQueue`, and tries
again after each `give`.

A bound is compared with what a tenant asks for, not with what it has: a tenant whose bound is lowered keeps
what it had. So does a client that comes back from an earlier controller (`keep`), but for its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pw.core.errors import QuotaExceeded
from pw.core.rights import NO_BOUNDS, Resource, TenantRights, in_words

_ADVICE = {
    Resource.CLIENTS: "close another session",
    Resource.DEVICES: "ask for fewer",
    Resource.PROGRAMS: "delete functions that are not called any more, or call them with fewer shapes",
    Resource.HOST_MEMORY: "delete arrays of earlier checkpoints, or write to disk (pw.checkpoint with a path)",
    Resource.NAMES: "take back names that are not needed",
}


@dataclass(slots=True, eq=False)
class ClientUsage:
    """What one client has."""

    tenant: str
    runs: int = 0
    """Number of the client's runs in flight that use a credit."""
    uploaded_bytes: int = 0
    """Bytes that the client has put on devices, and that its account does not have yet."""
    stored_bytes: int = 0
    """Bytes of its checkpoints on disk, which its account does not have yet."""
    moved_bytes: int = 0
    """Bytes that hosts have sent to each other for the client, and that its account does not have yet."""
    is_holder: bool = False
    """True if the client is no process, and holds what is published under a name."""
    amounts: dict[Resource, dict[int, int]] = field(default_factory=dict)
    """Amounts of each resource, by the id of what they are for."""

    def amount(self, resource: Resource) -> int:
        """Return how much the client has of a resource."""
        if resource is Resource.CLIENTS:
            return int(not self.is_holder)
        if resource is Resource.NAMES:
            return int(self.is_holder)
        return sum(self.amounts.get(resource, {}).values())


class Usage:
    """What all clients have.

    Args:
        rights: of all tenants.
    """

    def __init__(self, rights: TenantRights = NO_BOUNDS) -> None:
        self.rights = rights
        self.disk_bytes: Callable[[str], int] = lambda tenant: 0
        """Function that returns the bytes on disk of a tenant; the table of them sets it."""
        self._clients: dict[int, ClientUsage] = {}

    # --- clients ----------------------------------------------------------------------------------

    def attach(self, client: int, tenant: str, *, is_holder: bool = False) -> ClientUsage:
        """Count a client, or the holder of a name."""
        usage = self._clients[client] = ClientUsage(tenant, is_holder=is_holder)
        return usage

    def leave(self, client: int) -> None:
        """Forget all that a client had."""
        self._clients.pop(client, None)

    def of_tenant(self, tenant: str) -> Iterator[ClientUsage]:
        """Yield what each client of a tenant has."""
        return (usage for usage in self._clients.values() if usage.tenant == tenant)

    # --- amounts ----------------------------------------------------------------------------------

    def amount(self, tenant: str, resource: Resource) -> int:
        """Return how much a tenant has of a resource."""
        if resource is Resource.DISK:
            return self.disk_bytes(tenant)
        return sum(usage.amount(resource) for usage in self.of_tenant(tenant))

    def amounts(self, tenant: str) -> dict[str, int]:
        """Return how much a tenant has of each resource, by name, and its runs in flight."""
        runs = sum(usage.runs for usage in self.of_tenant(tenant))
        counted = {one.value: self.amount(tenant, one) for one in Resource}
        return {name: amount for name, amount in counted.items() if amount} | {"runs": runs}

    def can_ever_have(self, tenant: str, resource: Resource, amount: int) -> bool:
        """Whether a tenant that has nothing else may have so much of a resource."""
        bound = self.rights.of(tenant).bound(resource)
        return bound is None or amount <= bound

    def take(self, client: int, resource: Resource, amounts: Mapping[int, int]) -> None:
        """Count amounts, by the id of what they are for; what was counted for it before is replaced.

        Raises:
            QuotaExceeded: the tenant would have more than it may; nothing is counted.
        """
        usage = self._clients[client]
        before = usage.amounts.get(resource, {})
        more = sum(amount - before.get(key, 0) for key, amount in amounts.items())
        self.check(usage.tenant, resource, more)
        self.keep(client, resource, amounts)

    def keep(self, client: int, resource: Resource, amounts: Mapping[int, int]) -> None:
        """Count amounts that a client has already, whatever its tenant may have."""
        self._clients[client].amounts.setdefault(resource, {}).update(amounts)

    def give(self, client: int, resource: Resource, key: int) -> bool:
        """Count what is for `key` no more; return whether it was counted."""
        usage = self._clients.get(client)
        return usage is not None and usage.amounts.get(resource, {}).pop(key, None) is not None

    def check(self, tenant: str, resource: Resource, more: int) -> None:
        """Raise QuotaExceeded if a tenant may not have so much more of a resource."""
        bound = self.rights.of(tenant).bound(resource)
        if bound is not None and more > 0 and self.amount(tenant, resource) + more > bound:
            raise self.exceeded(tenant, resource, more)

    def exceeded(self, tenant: str, resource: Resource, more: int) -> QuotaExceeded:
        """Return the error of a tenant that may not have so much more of a resource."""
        bound = self.rights.of(tenant).bound(resource) or 0
        # Another one, who only looks, is not let in either.
        is_in = resource is not Resource.CLIENTS
        look = "; pw status --tenants shows what there is" if is_in else ""
        return QuotaExceeded(
            f"tenant {tenant!r} has {in_words(resource, self.amount(tenant, resource))} and may have "
            f"{in_words(resource, bound)}; {in_words(resource, more)} more cannot be had. "
            f"{_ADVICE[resource].capitalize()}, or have the operator raise {resource.value} in pw-controller "
            f"--tenants{look}"
        )


class RoomRequest(NamedTuple):
    """What waits until its tenant may have an amount."""

    client: int
    tenant: str
    amount: int
    then: Callable[[], None]
    """Function that begins what waits; it asks for no room itself."""
    since_s: float
    """Time at which the request came, in seconds."""


class RoomQueue:
    """Requests that wait until their tenant may have more of one resource, the oldest of a tenant first.

    Args:
        usage: the ledger, in which a request is counted when it goes on.
        resource: what all requests are for.
        now_s: returns the time, in seconds.
    """

    def __init__(self, usage: Usage, resource: Resource, now_s: Callable[[], float]) -> None:
        self.usage = usage
        self._resource = resource
        self._now_s = now_s
        self._requests: dict[int, RoomRequest] = {}
        """Requests of all tenants, by the id of what they are for."""
        self._by_tenant: dict[str, dict[int, RoomRequest]] = {}

    @property
    def keys(self) -> KeysView[int]:
        """Ids of what waits."""
        return self._requests.keys()

    @property
    def tenants(self) -> Iterable[tuple[str, Mapping[int, RoomRequest]]]:
        """Tenants that wait, each with its requests, the oldest first."""
        return self._by_tenant.items()

    def of_tenant(self, tenant: str) -> Mapping[int, RoomRequest]:
        """Return the requests of a tenant, the oldest first."""
        return self._by_tenant.get(tenant, {})

    def ask(
        self, client: int, tenant: str, key: int, amount: int, then: Callable[[], None]
    ) -> bool:
        """Call `then` when the tenant may have an amount and no older request waits; return whether it did."""
        request = RoomRequest(client, tenant, amount, then, self._now_s())
        self._requests[key] = self._by_tenant.setdefault(tenant, {})[key] = request
        self.try_again(tenant)
        return key not in self._requests

    def drop(self, key: int) -> None:
        """Forget a request."""
        request = self._requests.pop(key, None)
        if request is not None:
            requests = self._by_tenant[request.tenant]
            del requests[key]
            if not requests:
                del self._by_tenant[request.tenant]

    def client_left(self, client: int, tenant: str) -> None:
        """Forget the requests of a client, and go on with those of its tenant."""
        for key in [key for key, one in self.of_tenant(tenant).items() if one.client == client]:
            self.drop(key)
        self.try_again(tenant)

    def try_again(self, tenant: str) -> None:
        """Go on with the requests of a tenant, the oldest first, while it may have what they ask for."""
        while requests := self.of_tenant(tenant):
            key, request = next(iter(requests.items()))
            try:
                self.usage.take(request.client, self._resource, {key: request.amount})
            except QuotaExceeded:
                return
            self.drop(key)
            request.then()
