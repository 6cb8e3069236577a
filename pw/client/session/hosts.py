"""Hosts: which hosts exist, where the client's slices lie, and which hosts know the client.

A host that comes back is another process, and does not know the client until the client has
identified itself again. So the client does so before the next message after any news of a new
process: its end, another endpoint, a slice that is bound again. An extra `Identify` does no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from weakref import WeakValueDictionary

from pw.client.session.thread_messages import Listen
from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import CONTROL, Address, store_of
from pw.core.sharding import ArraySpec, DeviceAddress

Devices = tuple[DeviceAddress, ...]


class Hosts(Part):
    """Maps virtual devices to the stores of hosts."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._endpoints: dict[str, str] = {}
        self.slices: dict[int, msg.SliceBound] = {}
        self._identity: msg.Identify | None = None
        self._identified: set[str] = set()
        self.names: tuple[str, ...] = ()
        """Hosts of formed islands."""
        self.bindings = 0
        """Number of bindings so far; when it grows, failed requests may succeed."""
        self.bounds: Counter[int] = Counter()
        """Number of bindings of each slice so far."""
        self.former: set[int] = set()
        """Slices that an earlier controller had bound."""
        self.are_paused = False
        """True while the controller takes the client's slices away: new values are not sent."""
        self.suspended_by = ""
        """Who has suspended the client, in words; empty if it is not suspended."""
        self._wants_output = False
        self._listening: set[int] = set()
        """Slices whose hosts send this client output of host functions, or calls of computations."""
        self.left: dict[int, msg.SliceBound] = {}
        """Bindings that slices had last: the hosts there have copies while the client is suspended."""
        self.given_back: WeakValueDictionary[int, msg.SliceBound] = WeakValueDictionary()
        """Released slices, as long as inputs that may still be on their way there refer to them."""

    def attached(self, message: msg.Attached, wants_output: bool) -> None:
        """Take the client's number, and the ticket that proves it to hosts."""
        self._wants_output = wants_output
        self.are_paused = False
        self._identity = msg.Identify(message.client, message.ticket, wants_output)

    def listed(self, peers: tuple[msg.Peer, ...]) -> None:
        """Take the list of hosts; one with a new endpoint is a new process."""
        endpoints = {peer.node: peer.endpoint for peer in peers}
        for node, endpoint in endpoints.items():
            if node != self._env.address.node:
                self._env.introduce(node, endpoint)
            if self._endpoints.get(node) != endpoint:
                self._identified.discard(node)
        self._identified.intersection_update(endpoints)
        self._endpoints = endpoints
        self.names = tuple(peer.node for peer in peers if peer.member)

    def lost(self, node: str) -> None:
        """The next process of this name does not know the client."""
        self._identified.discard(node)

    def forget_slices(self, kept: Set[int]) -> None:
        """Forget all bindings; another controller binds the slices in `kept` again."""
        self.former.update(self.slices)
        self.former &= kept
        self.slices.clear()
        self.left.clear()
        self.bounds.clear()

    def unbind_from(self, node: str) -> None:
        """Forget the bindings of slices with devices on this host."""
        for slice, bound in list(self.slices.items()):
            if any(device.host == node for device in bound.devices):
                self.former.add(slice)
                del self.slices[slice]

    def bind(self, message: msg.SliceBound) -> bool:
        """Take a binding. Returns whether the slice had one, which no `SliceLost` has ended."""
        moved = message.slice in self.slices or message.slice in self.former
        self.former.discard(message.slice)
        self.left.pop(message.slice, None)
        self.slices[message.slice] = message
        self._identified.difference_update(device.host for device in message.devices)
        self.bindings += 1
        self.bounds[message.slice] += 1
        if message.slice in self._listening:
            self._meet(message)
        return moved

    @handles(Listen)
    def _on_listen(self, sender: Address, note: Listen) -> None:
        """Identify the client to all hosts of these slices, so that they know where it is."""
        for slice in note.slices if self._wants_output or note.for_calls else ():
            self._listening.add(slice)
            if (bound := self.slices.get(slice)) is not None:
                self._meet(bound)

    def _meet(self, bound: msg.SliceBound) -> None:
        for host in dict.fromkeys(device.host for device in bound.devices):
            self.identify(host)

    @handles(msg.PauseUploads)
    def _on_pause(self, sender: Address, message: msg.PauseUploads) -> None:
        if message.suspended_by and not self.suspended_by:
            self._env.log("warning", "suspended until it is resumed", by=message.suspended_by)
        elif self.suspended_by and message.is_over and not message.suspended_by:
            self._env.log("warning", "resumed, and goes on when there are devices")
        self.are_paused, self.suspended_by = not message.is_over, message.suspended_by
        if self.are_paused:
            self._env.send(CONTROL, msg.UploadsPaused())

    @handles(msg.SliceLost)
    def _on_slice_lost(self, sender: Address, message: msg.SliceLost) -> None:
        if (bound := self.slices.pop(message.slice, None)) is not None:
            self.left[message.slice] = bound

    @handles(msg.ReleaseSlice)
    def _on_slice_released(self, sender: Address, message: msg.ReleaseSlice) -> None:
        """Forget a slice when the controller has heard of its release: it could be bound again before."""
        self.forget(message.slice)

    def forget(self, slice: int) -> None:
        """Forget a slice; inputs on their way there still find its hosts."""
        bound = self.slices.pop(slice, None)
        if bound is not None:
            self.given_back[slice] = bound
        self.former.discard(slice)
        self.left.pop(slice, None)
        self._listening.discard(slice)
        self.bounds.pop(slice, None)

    def devices(self, spec: ArraySpec) -> Devices | None:
        """Return the device of each shard of such an array; None while its slice is not bound."""
        bound = self.binding(spec)
        if bound is None:
            return None
        return tuple(bound.devices[index] for index in spec.placement.devices)

    def devices_of_copies(self, spec: ArraySpec) -> Devices | None:
        """Return the devices that had each shard when the client was suspended; None if it is not."""
        bound = self.left.get(spec.placement.slice) if self.suspended_by else None
        if bound is None:
            return None
        return tuple(bound.devices[index] for index in spec.placement.devices)

    def binding(self, spec: ArraySpec) -> msg.SliceBound | None:
        """Return the binding of such an array's slice; None while it has none."""
        slice = spec.placement.slice
        return self.slices.get(slice) or self.given_back.get(slice)

    def place(self, spec: ArraySpec) -> tuple[str, int]:
        """Return the island of such an array's slice, and the epoch in which the slice was bound to it."""
        bound = self.binding(spec)
        return ("", 0) if bound is None else (bound.island, bound.epoch)

    def bound(self, spec: ArraySpec) -> int:
        """Return how often such an array's slice has been bound; 0 while nothing new may be sent there."""
        slice = spec.placement.slice
        return self.bounds[slice] if slice in self.slices and not self.are_paused else 0

    def send(self, host: str, message: object) -> None:
        """Send to a host's store, after identifying the client if that is necessary."""
        self.identify(host)
        self._env.send(store_of(host), message)

    def identify(self, host: str) -> None:
        """Tell a host which client this is, if it may not know."""
        if host not in self._identified and self._identity is not None:
            self._identified.add(host)
            self._env.send(store_of(host), self._identity)

    def endpoint(self, host: str) -> str:
        """Where a host is reached; empty if that is unknown, or in this process."""
        return self._endpoints.get(host, "")

    def knows(self, node: str) -> bool:
        """Whether this node is a host."""
        return node in self._endpoints


def cover(spec: ArraySpec, devices: Devices) -> dict[str, list[int]]:
    """Return the mesh positions to fetch from each host, so that each distinct box comes exactly once."""
    chosen: dict[str, list[int]] = {}
    for _, positions in spec.distinct_boxes():
        chosen.setdefault(devices[positions[0]].host, []).append(positions[0])
    return chosen


def by_host(positions: Sequence[int], devices: Devices) -> dict[str, list[int]]:
    """Group mesh positions by the hosts of their devices."""
    chosen: dict[str, list[int]] = {}
    for position in positions:
        chosen.setdefault(devices[position].host, []).append(position)
    return chosen
