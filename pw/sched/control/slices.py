"""The slices of clients: asks for them, knows how they are bound, and gives them back.

A slice whose island is lost is *unbound* until the resource manager binds it again, to the same
ranks of hosts that have come back or of spares. After the client's `recovery_s`, or that of the cluster, it
is given up (`GiveUp`).

Recovery may need a slice that the client has given back. It *borrows* the slice: it asks for it as
the client did, and gives it back when nothing lies or arrives there any more.

A slice whose devices are more than its tenant may have waits until the tenant has given some back, behind
the slices of the tenant that wait longer. So does one that a client had at an earlier controller: the client's
word for it is no reason to exceed a bound. What lies on it waits as for a lost island, and no longer.
Borrowed slices do not count: recovery must not wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import (
    Error,
    ErrorReport,
    HostLost,
    InsufficientDevices,
    NotOwner,
    ProtocolError,
    PythonRefused,
)
from pw.core.ids import RESOURCES, Address, client_of, is_repeat
from pw.core.rights import Resource, in_words
from pw.core.sharding import Binding, DeviceAddress
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.usage import RoomQueue

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
    lends: Callable[[Client, Client], bool] = lambda owner, reader: False
    """Function that says whether a client lends its devices to another one, of another tenant."""
    may_wait: Callable[[Client, msg.AllocateSlice], bool] = lambda client, request: False
    """Function that says whether a slice for which there are no devices waits until others leave some."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bindings = self._islands.bindings
        self._losses = 0
        self.queue = RoomQueue(self.sessions.usage, Resource.DEVICES, self._env.now_s)
        """Slices that wait until their tenant has given devices back."""

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
        elif not _divides(message):
            error = ProtocolError("bad hosts of a slice")
        elif message.devices < 1:
            error = InsufficientDevices(f"a slice has at least 1 device, not {message.devices}")
        else:
            error = self._why_never(client, message)
        if error is not None:
            self.sessions.tell(client, msg.SliceRefused(message.slice, ErrorReport.of(error)))
            return
        python = self.sessions.usage.rights.of(client.tenant).python
        only = python if isinstance(python, tuple) else ()
        message = msgspec.structs.replace(message, python_hosts=only, waits=False)
        is_of_a_name = is_repeat(message.like) and self.sessions.owner(message.like) is None
        if client.resuming is not None and (
            is_of_a_name or not self._may_share(client, message.like)
        ):
            message = msgspec.structs.replace(message, like=0)  # its name has another holder here
        if message.like and self.sessions.owner(message.like) is None:
            slices.unproven.add(message.slice)
        slices.owned.add(message.slice)
        slices.requests[message.slice] = msgspec.structs.replace(
            message, resumed=False, formerly="", former_hosts=(), former_devices=()
        )
        slices.hosts[message.slice] = set(message.former_hosts)
        slices.waits_since_s[message.slice] = self._env.now_s()
        then = partial(self._env.send, RESOURCES, message)
        if client.is_suspended:
            slices.unbound[message.slice] = self.new_loss()
            slices.down[message.slice] = message.former_devices if message.resumed else None
            return
        is_lent = is_of_a_name if client.resuming is not None else self._is_lent(message.like)
        amount = 0 if is_lent else message.devices
        is_asked = self.queue.ask(client.number, client.tenant, message.slice, amount, then)
        if client.resuming is not None and is_asked:
            slices.unbound[message.slice] = client.resuming.loss
        elif client.resuming is not None and message.formerly:
            slices.unbound[message.slice] = loss = self.new_loss()
            usage = self.sessions.usage
            error = usage.exceeded(client.tenant, Resource.DEVICES, message.devices)
            self.expect(client, loss, ErrorReport.of(error))

    def _why_never(self, client: Client, message: msg.AllocateSlice) -> Error | None:
        """Return why a tenant can never have a slice."""
        usage, tenant = self.sessions.usage, client.tenant
        if message.python and not usage.rights.of(tenant).python:
            words = usage.rights.of(tenant).python_in_words()
            return PythonRefused(
                f"tenant {tenant!r} asks for hosts that run its Python functions; {words}"
            )
        if client.resuming is None and not self._may_share(client, message.like):
            return NotOwner(
                "the devices that a slice is to share are of another tenant, and nothing on them is "
                "published to this one; look the name up again (pw.lookup)"
            )
        is_back = client.resuming is not None and bool(message.formerly)
        if is_back or self._is_lent(message.like):
            return None
        if usage.can_ever_have(tenant, Resource.DEVICES, message.devices):
            return None
        return usage.exceeded(tenant, Resource.DEVICES, message.devices)

    def _may_share(self, client: Client, model: int) -> bool:
        """Whether a client may have a slice on the devices of another slice, if that is there."""
        owner = self.sessions.owner(model)
        return owner is None or client.may_touch(owner) or self.lends(owner, client)

    def _is_lent(self, model: int) -> bool:
        """Whether a slice is that of a name: who reads there takes no devices of its own tenant."""
        owner = self.sessions.owner(model)
        return owner is not None and owner.is_holder

    def rights_changed(self, tenant: str) -> None:
        """Refuse slices that a tenant can never have any more, and ask for those that it may have now."""
        usage = self.sessions.usage
        for number, request in list(self.queue.of_tenant(tenant).items()):
            client = self.sessions.owner(number)
            is_back = client is not None and number in client.slices.unbound
            if not is_back and not usage.can_ever_have(tenant, Resource.DEVICES, request.amount):
                error = usage.exceeded(tenant, Resource.DEVICES, request.amount)
                self._refuse(msg.SliceRefused(number, ErrorReport.of(error)))
        self.queue.try_again(tenant)

    def _give(self, client: Client, number: int) -> None:
        """The devices of a slice count no more."""
        self.queue.drop(number)
        self.sessions.usage.give(client.number, Resource.DEVICES, number)
        self.queue.try_again(client.tenant)

    def over_quota(self, client: Client) -> int:
        """Return how many devices a client waits for that its tenant has to give back first."""
        requests = self.queue.of_tenant(client.tenant).values()
        return sum(request.amount for request in requests if request.client == client.number)

    @handles(msg.SliceBound)
    def _bound(self, sender: Address, message: msg.SliceBound) -> None:
        number = message.slice
        client = self.sessions.owner(number)
        if client is None or number not in client.slices:
            self._env.send(RESOURCES, msg.ReleaseSlice(number))
            return
        request = client.slices.requests[number]
        if client.is_suspended or message.attempt != request.attempt:
            return  # it was given back meanwhile
        if number in client.slices.unproven:
            client.slices.unproven.discard(number)
            if not self._may_share(client, request.like):
                alone = client.slices.requests[number] = msgspec.structs.replace(request, like=0)
                self._env.send(RESOURCES, msg.ReleaseSlice(number))
                self._env.send(RESOURCES, msgspec.structs.replace(alone, resumed=True))
                return
        binding = Binding.of(
            number, message.island, message.devices, message.platform, message.machine
        )
        is_owned = number in client.slices.owned  # one that recovery borrows has no bound
        self._islands.bind(binding, client.slices.requests[number].memory_bytes * is_owned)
        self.sessions.tell(client, message)
        client.slices.hosts[number].update(device.host for device in message.devices)
        times_bound = client.slices.times_bound
        times_bound[number] = times_bound.get(number, 0) + 1
        client.slices.unbound.pop(number, None)
        client.slices.waits_since_s.pop(number, None)
        if not client.slices.unbound:
            client.left_for = ""

    @handles(msg.SliceRefused)
    def _refused(self, sender: Address, message: msg.SliceRefused) -> None:
        owner, request = self.sessions.owner(message.slice), None
        if owner is not None and message.slice not in owner.slices.unbound:
            request = owner.slices.requests.get(message.slice)
        if owner is not None and request is not None and self.may_wait(owner, request):
            self._env.send(RESOURCES, msgspec.structs.replace(request, waits=True))
            return
        client = self._refuse(message)
        if client is not None:
            self._give(client, message.slice)

    def _refuse(self, message: msg.SliceRefused) -> Client | None:
        """Tell the owner of a slice that it cannot have the slice; return the owner."""
        client = self.sessions.owner(message.slice)
        self.queue.drop(message.slice)
        if client is not None:
            client.slices.owned.discard(message.slice)
            client.slices.borrowed.discard(message.slice)
            client.slices.unproven.discard(message.slice)
            client.slices.requests.pop(message.slice, None)
            client.slices.hosts.pop(message.slice, None)
            client.slices.times_bound.pop(message.slice, None)
            client.slices.waits_since_s.pop(message.slice, None)
            self._islands.unbind(message.slice)
            self.sessions.tell(client, message)
        return client

    def awaited_hosts(self, client: Client, islands: Iterable[msg.IslandInfo]) -> tuple[str, ...]:
        """Return the hosts that a client's slices name, and without which they are not bound.

        Those that have no place in an island; all of them if each has one, but in another island.

        Args:
            client: the client.
            islands: the state of all islands.
        """
        slices = client.slices
        waiting = sorted(slices.all - self._bindings.keys())
        named = dict.fromkeys(host for number in waiting for host in slices.requests[number].hosts)
        if not named:
            return ()
        ready = (island for island in islands if island.state == "ready")
        here = {host.name for island in ready for host in island.hosts}
        return tuple(host for host in named if host not in here) or tuple(named)

    def wanted_in_words(self, client: Client) -> str:
        """Return which devices a client waits for that has left its own."""
        requests = [client.slices.requests[number] for number in sorted(client.slices.unbound)]
        count = sum(request.devices for request in requests)
        islands = sorted({request.island for request in requests if request.island})
        where = f" on island {' and '.join(islands)}" if islands else ""
        alone = " (exclusive)" if any(one.exclusive for one in requests) else ""
        return f"{in_words(Resource.DEVICES, count)}{where}{alone}; {client.left_for}"

    def unplaced(self, client: Client) -> int:
        """Return how many devices a client has asked for and not got yet."""
        slices = client.slices
        waiting = slices.owned - self._bindings.keys() - slices.unbound.keys() - self.queue.keys
        return sum(slices.requests[number].devices for number in waiting)

    # --- given back -------------------------------------------------------------------------------

    def release(self, client: Client, message: msg.ReleaseSlice) -> None:
        """A client gives a slice back, in its order."""
        client.slices.refused.pop(message.slice, None)
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
        client.slices.unproven.discard(number)
        client.slices.times_bound.pop(number, None)
        client.slices.waits_since_s.pop(number, None)
        self.forget_request(client, number)
        self._islands.unbind(number)
        self._env.send(RESOURCES, msg.ReleaseSlice(number))
        self.sessions.tell(client, msg.ReleaseSlice(number))

    def forget_request(self, client: Client, number: int) -> None:
        """Forget how a slice was asked for, unless it is in use or a replay may need it."""
        if number not in client.slices and not client.lineage.touches(number):
            client.slices.requests.pop(number, None)
            client.slices.hosts.pop(number, None)

    def client_left(self, client: Client) -> None:
        """Give back all slices of a client."""
        for number in client.slices.all:
            self._islands.unbind(number)
            self._env.send(RESOURCES, msg.ReleaseSlice(number))
        self.queue.client_left(client.number, client.tenant)

    # --- suspended --------------------------------------------------------------------------------

    def set_down(self, client: Client, slices: Collection[int], error: ErrorReport) -> None:
        """Take the devices of a client's slices; the slices are asked for again by `take_up`."""
        loss = self.new_loss()
        for number in sorted(number for number in slices if number in client.slices):
            had = client.slices.hosts.get(number)
            devices: tuple[DeviceAddress, ...] | None = () if had else None
            if number in self.queue.keys:
                self.queue.drop(number)
            elif number in self._bindings:
                devices = self._bindings[number].devices
                self._islands.unbind(number)
                self.sessions.tell(client, msg.SliceLost(number, error))
            self._env.send(RESOURCES, msg.ReleaseSlice(number))
            client.slices.unbound[number] = loss
            client.slices.down[number] = devices
            client.slices.waits_since_s[number] = self._env.now_s()
            self.sessions.usage.give(client.number, Resource.DEVICES, number)
        self.queue.try_again(client.tenant)

    def take_up(
        self,
        client: Client,
        slices: Collection[int],
        island: str,
        devices: Mapping[int, tuple[DeviceAddress, ...]],
    ) -> None:
        """Ask for slices of a client that was suspended, and for those that it has asked for since.

        Those that it had wait for devices however long, until there is room for all, if possible their former
        ones; for those of an `island` a while, if one is named, and there for their `devices`, if those are
        free.
        """
        down, client.slices.down = client.slices.down, {}
        for number in sorted(number for number in down if number in client.slices):
            had = down[number]
            asked, moves = client.slices.requests[number], bool(island) and number in slices
            at = (island if asked.island else None) if moves else asked.island
            asked = msgspec.structs.replace(asked, island=at, attempt=asked.attempt + 1)
            client.slices.requests[number] = asked
            request = msgspec.structs.replace(
                asked,
                formerly=island if moves else asked.formerly,
                former_devices=devices.get(number, ()) if moves else had or (),
                waits=had is not None,
                together=True,
            )
            if request.like not in self._bindings:
                request = msgspec.structs.replace(request, like=0)
            then = partial(self._env.send, RESOURCES, request)
            is_free = number in client.slices.borrowed or self._is_lent(request.like)
            amount = 0 if is_free else request.devices
            client.slices.waits_since_s[number] = self._env.now_s()
            self.queue.ask(client.number, client.tenant, number, amount, then)

    # --- lost -------------------------------------------------------------------------------------

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        loss = self.new_loss()
        gone = [n for n, binding in self._bindings.items() if binding.island == message.island]
        waiting: dict[int, Client] = {}
        for number in gone:
            self._islands.lose(number)
            client = self.sessions.owner(number)
            assert client is not None, "the slices of a client leave with it"
            client.slices.unbound[number] = loss
            client.slices.waits_since_s[number] = self._env.now_s()
            waiting[client.number] = client
            error = self.sessions.error_for(client, message)
            self.sessions.tell(client, msg.SliceLost(number, error))
        for client in waiting.values():
            error = self.sessions.error_for(client, message)
            self.expect(client, loss, error, message.island)

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
            client.slices.waits_since_s[number] = self._env.now_s()
            # What is made again may share: others may have the devices of an exclusive slice, or the memory.
            request = msgspec.structs.replace(
                client.slices.requests[number], exclusive=False, memory_bytes=0
            )
            self._env.send(RESOURCES, request)
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
        client.slices.waits_since_s[number] = self._env.now_s()
        self._env.send(RESOURCES, msgspec.structs.replace(request, resumed=resumed))
        return number

    def keep_refusal(self, client: Client, number: int, error: ErrorReport) -> None:
        """Keep why a slice that had devices cannot have others: what is to go there later raises it."""
        client.slices.refused[number] = error

    def give_up(self, client: Client, numbers: Iterable[int]) -> None:
        """Do not wait any more until these slices are bound."""
        for number in numbers:
            client.slices.unbound.pop(number, None)


def _divides(request: msg.AllocateSlice) -> bool:
    """Whether a slice names different hosts, and has as many devices on each as on the others."""
    count = len(request.hosts) or request.host_count
    return not count or (
        len(set(request.hosts)) == len(request.hosts)
        and request.devices % count == 0
        and request.topology is None
    )
