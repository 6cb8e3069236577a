"""The slices of clients: asks for them, knows how they are bound, and gives them back.

A slice whose island is lost is *unbound* until the resource manager binds it again, to the same
ranks of hosts that have come back or of spares. After the client's `recovery_s`, or that of the cluster, it
is given up (`GiveUp`).

Recovery may need a slice that the client has given back. It *borrows* the slice: it asks for it as
the client did, and gives it back when nothing lies or arrives there any more.

A slice whose devices are more than its tenant may have waits until the tenant has given some back, behind
the slices of the tenant that wait longer. Borrowed slices do not count: recovery must not wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import (
    Error,
    ErrorReport,
    HostLost,
    InsufficientDevices,
    ProtocolError,
    PythonRefused,
    QuotaExceeded,
)
from pw.core.ids import RESOURCES, Address, client_of, is_repeat
from pw.core.rights import Resource
from pw.core.sharding import Binding
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_client

_NOT_BORROWED = ErrorReport.of(
    HostLost(
        "devices that were given back are needed again, to make again what was lost with a host"
    )
)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Timer: what was unbound by this loss should be bound again by now."""

    client: int
    island: str
    error: ErrorReport
    loss: int
    waited_s: float


@dataclass(eq=False)
class SliceRequests(ControlPart):
    """Asks the resource manager for the slices of clients."""

    recovery_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bindings = self._islands.bindings
        self._losses = 0
        self._waiting: dict[int, msg.AllocateSlice] = {}
        """Requests that wait until their tenant has given devices back, by slice, the oldest first."""

    # --- asked for and bound ----------------------------------------------------------------------

    @handles_client(msg.AllocateSlice)
    def _allocate(self, client: Client, message: msg.AllocateSlice) -> None:
        slices = client.slices
        error: Error | None = None
        if (
            client_of(message.slice) != client.number
            or message.slice in slices.requests
            or client.lineage.touches(message.slice)  # arrays were told of before their slice
        ):
            error = ProtocolError("bad slice number")
        elif message.hosts and not _divides(message):
            error = ProtocolError("bad hosts of a slice")
        elif message.devices < 1:
            error = InsufficientDevices(f"a slice has at least 1 device, not {message.devices}")
        else:
            error = self._never(client, message)
        if error is not None:
            self.sessions.tell(client, msg.SliceRefused(message.slice, ErrorReport.of(error)))
            return
        python = self.sessions.usage.rights.of(client.tenant).python
        only = python if isinstance(python, tuple) else ()
        message = msgspec.structs.replace(message, python_hosts=only)
        is_of_a_name = is_repeat(message.like) and self.sessions.owner(message.like) is None
        if client.resuming is not None and is_of_a_name:
            message = msgspec.structs.replace(message, like=0)  # its name has another holder here
        slices.owned.add(message.slice)
        slices.requests[message.slice] = msgspec.structs.replace(
            message, resumed=False, formerly="", former_hosts=()
        )
        slices.hosts[message.slice] = set(message.former_hosts)
        if client.resuming is not None and message.formerly:
            amounts = {message.slice: message.devices}
            self.sessions.usage.keep(client.number, Resource.DEVICES, amounts)
            self._env.send(RESOURCES, message)
        else:
            self._waiting[message.slice] = message
            self.try_again(client.tenant)
        if client.resuming is not None and message.slice not in self._waiting:
            slices.unbound[message.slice] = client.resuming.loss

    def _never(self, client: Client, message: msg.AllocateSlice) -> Error | None:
        """Return why a tenant can never have a slice."""
        usage, tenant = self.sessions.usage, client.tenant
        if message.python and not usage.rights.of(tenant).python:
            words = usage.rights.of(tenant).python_in_words()
            return PythonRefused(
                f"tenant {tenant!r} asks for hosts that run its Python functions; {words}"
            )
        is_back = client.resuming is not None and message.formerly
        if is_back or usage.can_ever_have(tenant, Resource.DEVICES, message.devices):
            return None
        return usage.exceeded(tenant, Resource.DEVICES, message.devices)

    def try_again(self, tenant: str) -> None:
        """Ask for the slices of a tenant that wait, the oldest first, while it may have their devices."""
        usage = self.sessions.usage
        for number, message in list(self._waiting.items()):
            client = self.sessions.owner(number)
            if client is None or client.tenant != tenant:
                continue
            if not usage.can_ever_have(tenant, Resource.DEVICES, message.devices):
                error = usage.exceeded(tenant, Resource.DEVICES, message.devices)
                refused = msg.SliceRefused(number, ErrorReport.of(error))
                self._refused(RESOURCES, refused)  # which tries the others again
                return
            try:
                usage.take(client.number, Resource.DEVICES, {number: message.devices})
            except QuotaExceeded:
                return
            del self._waiting[number]
            self._env.send(RESOURCES, message)

    def _give(self, client: Client, number: int) -> None:
        """The devices of a slice count no more."""
        self._waiting.pop(number, None)
        self.sessions.usage.give(client.number, Resource.DEVICES, number)
        self.try_again(client.tenant)

    @property
    def waiting(self) -> Set[int]:
        """Slices that wait until their tenant has given devices back."""
        return self._waiting.keys()

    def over_quota(self, client: Client) -> int:
        """Return how many devices a client waits for that its tenant has to give back first."""
        waiting = (one for number, one in self._waiting.items() if client.owns(number))
        return sum(message.devices for message in waiting)

    @handles(msg.SliceBound)
    def _bound(self, sender: Address, message: msg.SliceBound) -> None:
        number = message.slice
        client = self.sessions.owner(number)
        if client is None or number not in client.slices:
            self._env.send(RESOURCES, msg.ReleaseSlice(number))
            return
        self._bindings[number] = Binding.of(
            number, message.island, message.devices, message.platform, message.machine
        )
        self.sessions.tell(client, message)
        client.slices.hosts[number].update(device.host for device in message.devices)
        times_bound = client.slices.times_bound
        times_bound[number] = times_bound.get(number, 0) + 1
        client.slices.unbound.pop(number, None)

    @handles(msg.SliceRefused)
    def _refused(self, sender: Address, message: msg.SliceRefused) -> None:
        client = self.sessions.owner(message.slice)
        if client is not None:
            client.slices.owned.discard(message.slice)
            client.slices.borrowed.discard(message.slice)
            client.slices.requests.pop(message.slice, None)
            client.slices.hosts.pop(message.slice, None)
            client.slices.times_bound.pop(message.slice, None)
            self._bindings.pop(message.slice, None)
            self.sessions.tell(client, message)
            self._give(client, message.slice)

    def awaited_hosts(self, client: Client, islands: Iterable[msg.IslandInfo]) -> tuple[str, ...]:
        """Return the hosts that a client's slices name, and without which they are not bound.

        Those that have no place in an island; all of them if each has one, but in another island.

        Args:
            client: the client.
            islands: the state of all islands.
        """
        slices = client.slices
        waiting = sorted((slices.owned | slices.borrowed) - self._bindings.keys())
        named = dict.fromkeys(host for number in waiting for host in slices.requests[number].hosts)
        if not named:
            return ()
        ready = (island for island in islands if island.state == "ready")
        here = {host.name for island in ready for host in island.hosts}
        return tuple(host for host in named if host not in here) or tuple(named)

    def unplaced(self, client: Client) -> int:
        """Return how many devices a client has asked for and not got yet."""
        slices = client.slices
        waiting = (
            slices.owned - self._bindings.keys() - slices.unbound.keys() - self._waiting.keys()
        )
        return sum(slices.requests[number].devices for number in waiting)

    # --- given back -------------------------------------------------------------------------------

    def release(self, client: Client, message: msg.ReleaseSlice) -> None:
        """A client gives a slice back, in its order."""
        if message.slice in client.slices.owned:
            client.slices.owned.discard(message.slice)
            self._unbind(client, message.slice)
            self._give(client, message.slice)

    def return_borrowed(self, client: Client) -> None:
        """Give back the borrowed slices on which nothing lies or arrives any more."""
        used = {array.spec.placement.slice for _, array in client.arrays.all()}
        for number in sorted(client.slices.borrowed - used):
            client.slices.borrowed.discard(number)
            self._unbind(client, number)

    def _unbind(self, client: Client, number: int) -> None:
        client.slices.unbound.pop(number, None)
        client.slices.times_bound.pop(number, None)
        self.forget_request(client, number)
        self._bindings.pop(number, None)
        self._env.send(RESOURCES, msg.ReleaseSlice(number))
        self.sessions.tell(client, msg.ReleaseSlice(number))

    def forget_request(self, client: Client, number: int) -> None:
        """Forget how a slice was asked for, unless it is in use or a replay may need it."""
        if number not in client.slices and not client.lineage.touches(number):
            client.slices.requests.pop(number, None)
            client.slices.hosts.pop(number, None)

    def client_left(self, client: Client) -> None:
        """Give back all slices of a client."""
        for number in client.slices.owned | client.slices.borrowed:
            self._bindings.pop(number, None)
            self._waiting.pop(number, None)
            self._env.send(RESOURCES, msg.ReleaseSlice(number))
        self.try_again(client.tenant)

    # --- lost -------------------------------------------------------------------------------------

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        loss = self.new_loss()
        gone = [n for n, binding in self._bindings.items() if binding.island == message.island]
        waiting: dict[int, Client] = {}
        for number in gone:
            del self._bindings[number]
            client = self.sessions.owner(number)
            assert client is not None, "the slices of a client leave with it"
            client.slices.unbound[number] = loss
            waiting[client.number] = client
            self.sessions.tell(client, msg.SliceLost(number, message.error))
        for client in waiting.values():
            self.expect(client, loss, message.error, message.island)

    def new_loss(self) -> int:
        """Return a number for something that unbinds slices."""
        self._losses += 1
        return self._losses

    def expect(self, client: Client, loss: int, error: ErrorReport, island: str = "") -> None:
        """Wait for the slices that a loss has unbound, for as long as the client says.

        Where no `island` was lost, hosts may have to find this controller first, which takes its time.
        """
        wait_s = self.recovery_s if client.recovery_s is None else client.recovery_s
        if not island:
            wait_s = max(wait_s, self.recovery_s)
        if wait_s < math.inf:
            self._env.call_later(wait_s, GiveUp(client.number, island, error, loss, wait_s))

    def borrow(self, client: Client, numbers: Iterable[int]) -> None:
        """Have slices bound again that a client gave back."""
        loss = self.new_loss()
        for number in sorted(numbers):
            client.slices.borrowed.add(number)
            client.slices.unbound[number] = loss
            self._env.send(RESOURCES, client.slices.requests[number])
        self.expect(client, loss, _NOT_BORROWED)

    def allocate_like(self, client: Client, model: int, devices: int, *, resumed: bool) -> int:
        """Ask for a slice for a client on the devices of another one's slice; return its number.

        Args:
            client: the owner of the new slice.
            model: number of the other slice.
            devices: number of its devices.
            resumed: true if that slice may be bound only later, by this controller.
        """
        number = client.new_id()
        request = msg.AllocateSlice(number, devices, None, None, None, like=model)
        client.slices.owned.add(number)
        client.slices.requests[number] = request
        client.slices.hosts[number] = set()
        self._env.send(RESOURCES, msgspec.structs.replace(request, resumed=resumed))
        return number

    def give_up(self, client: Client, numbers: Iterable[int]) -> None:
        """Do not wait any more until these slices are bound."""
        for number in numbers:
            client.slices.unbound.pop(number, None)


def _divides(request: msg.AllocateSlice) -> bool:
    """Whether a slice names different hosts, and has as many devices on each as on the others."""
    count = len(request.hosts)
    return len(set(request.hosts)) == count and request.devices % count == 0
