"""The slices of clients: asks for them, knows how they are bound, and gives them back.

A slice whose island is lost is *unbound* until the resource manager binds it again, to the same
ranks of hosts that have come back or of spares. After `recovery_s` it is given up (`GiveUp`).

Recovery may need a slice that the client has given back. It *borrows* the slice: it asks for it as
the client did, and gives it back when nothing lies or arrives there any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import Error, ErrorReport, HostLost, InsufficientDevices, ProtocolError
from pw.core.ids import RESOURCES, Address, client_of, is_repeat
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

    island: str
    error: ErrorReport
    loss: int


@dataclass(eq=False)
class SliceRequests(ControlPart):
    """Asks the resource manager for the slices of clients."""

    recovery_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bindings = self._islands.bindings
        self._losses = 0

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
        if error is not None:
            self.sessions.tell(client, msg.SliceRefused(message.slice, ErrorReport.of(error)))
            return
        is_of_a_name = is_repeat(message.like) and self.sessions.owner(message.like) is None
        if client.resuming is not None and is_of_a_name:
            message = msgspec.structs.replace(message, like=0)  # its name has another holder here
        slices.owned.add(message.slice)
        slices.requests[message.slice] = msgspec.structs.replace(
            message, resumed=False, formerly="", former_hosts=()
        )
        slices.hosts[message.slice] = set(message.former_hosts)
        if client.resuming is not None:
            slices.unbound[message.slice] = client.resuming.loss
        self._env.send(RESOURCES, message)

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
        waiting = slices.owned - self._bindings.keys() - slices.unbound.keys()
        return sum(slices.requests[number].devices for number in waiting)

    # --- given back -------------------------------------------------------------------------------

    def release(self, client: Client, message: msg.ReleaseSlice) -> None:
        """A client gives a slice back, in its order."""
        if message.slice in client.slices.owned:
            client.slices.owned.discard(message.slice)
            self._unbind(client, message.slice)

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
            self._env.send(RESOURCES, msg.ReleaseSlice(number))

    # --- lost -------------------------------------------------------------------------------------

    @handles(msg.IslandLost)
    def _island_lost(self, sender: Address, message: msg.IslandLost) -> None:
        loss = self.new_loss()
        gone = [n for n, binding in self._bindings.items() if binding.island == message.island]
        for number in gone:
            del self._bindings[number]
            client = self.sessions.owner(number)
            assert client is not None, "the slices of a client leave with it"
            client.slices.unbound[number] = loss
            self.sessions.tell(client, msg.SliceLost(number, message.error))
        if gone:
            self.expect(loss, message.error, message.island)

    def new_loss(self) -> int:
        """Return a number for something that unbinds slices."""
        self._losses += 1
        return self._losses

    def expect(self, loss: int, error: ErrorReport, island: str = "") -> None:
        """Wait for the slices that a loss has unbound, for `recovery_s` at most."""
        self._env.call_later(self.recovery_s, GiveUp(island, error, loss))

    def borrow(self, client: Client, numbers: Iterable[int]) -> None:
        """Have slices bound again that a client gave back."""
        loss = self.new_loss()
        for number in sorted(numbers):
            client.slices.borrowed.add(number)
            client.slices.unbound[number] = loss
            self._env.send(RESOURCES, client.slices.requests[number])
        self.expect(loss, _NOT_BORROWED)

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
