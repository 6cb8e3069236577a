"""What a client knows of hosts: which there are, where its slices lie now, and who has met the client.

A host that comes back is another process: it knows no client until that has identified itself again, so
whatever tells of a new process (its end, another endpoint, a slice that is bound anew) makes the client
do so before the next message. Saying it once too often does no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from weakref import WeakValueDictionary

from pw.core.actor import Env
from pw.core.ids import store_of
from pw.core.messages import Attached, Identify, Peer, SliceBound
from pw.core.sharding import ArraySpec, DeviceAddress

Devices = tuple[DeviceAddress, ...]


class Hosts:
    """The way from virtual devices to object stores."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._endpoints: dict[str, str] = {}
        self._slices: dict[int, SliceBound] = {}
        self._identity: Identify | None = None
        self._identified: set[str] = set()
        self._members: tuple[str, ...] = ()
        self.bindings = 0
        """Grows whenever a slice is bound: what could not be had before may be there now."""
        self.bounds: Counter[int] = Counter()
        """How often each slice was bound."""
        self._former: set[int] = set()
        """Slices that an earlier controller had bound."""
        self._wants_output = False
        self._listening: set[int] = set()
        """Slices of whose hosts this client wants to hear what its programs write there."""
        self._given_back: WeakValueDictionary[int, SliceBound] = WeakValueDictionary()
        """Slices that are no more, as long as inputs hold on to them that may still be on their way there."""

    @property
    def names(self) -> tuple[str, ...]:
        """Hosts of formed islands."""
        return self._members

    def attached(self, message: Attached, wants_output: bool) -> None:
        """From now on the client has a number, and a ticket that proves it."""
        self._wants_output = wants_output
        self._identity = Identify(message.client, message.ticket, wants_output)

    def listed(self, peers: tuple[Peer, ...]) -> None:
        """These hosts exist now; one that has moved is a new process."""
        endpoints = {peer.node: peer.endpoint for peer in peers}
        for node, endpoint in endpoints.items():
            if node != self._env.address.node:
                self._env.introduce(node, endpoint)
            if self._endpoints.get(node) != endpoint:
                self._identified.discard(node)
        self._identified.intersection_update(endpoints)
        self._endpoints = endpoints
        self._members = tuple(peer.node for peer in peers if peer.member)

    def lost(self, node: str) -> None:
        """Whoever answers to this name next is a new process."""
        self._identified.discard(node)

    def forget_slices(self, kept: Set[int]) -> None:
        """Another controller binds them anew, if it hears of them."""
        self._former.update(self._slices)
        self._former &= kept
        self._slices.clear()
        self.bounds.clear()

    def unbind_from(self, node: str) -> None:
        """Slices with devices on this host lie nowhere until they are bound again."""
        for slice, bound in list(self._slices.items()):
            if any(device.host == node for device in bound.devices):
                self._former.add(slice)
                del self._slices[slice]

    def bind(self, message: SliceBound) -> bool:
        """The slice lies there now; whether it has been bound before, and not been lost since."""
        moved = message.slice in self._slices or message.slice in self._former
        self._former.discard(message.slice)
        self._slices[message.slice] = message
        self._identified.difference_update(device.host for device in message.devices)
        self.bindings += 1
        self.bounds[message.slice] += 1
        if message.slice in self._listening:
            self._meet(message)
        return moved

    def listen(self, slice: int) -> None:
        """Have all hosts of a slice know this client before it asks them for something."""
        if self._wants_output:
            self._listening.add(slice)
            if (bound := self._slices.get(slice)) is not None:
                self._meet(bound)

    def _meet(self, bound: SliceBound) -> None:
        for host in dict.fromkeys(device.host for device in bound.devices):
            self._identify(host)

    def unbind(self, slice: int) -> None:
        """The slice lies nowhere until it is bound again."""
        self._slices.pop(slice, None)

    def forget(self, slice: int) -> None:
        """The slice is no more."""
        bound = self._slices.pop(slice, None)
        if bound is not None:
            self._given_back[slice] = bound
        self._former.discard(slice)
        self._listening.discard(slice)
        self.bounds.pop(slice, None)

    def devices(self, spec: ArraySpec) -> Devices | None:
        """Where each shard of such an array is; None while its slice is not bound."""
        bound = self.binding(spec)
        if bound is None:
            return None
        return tuple(bound.devices[index] for index in spec.placement.devices)

    def binding(self, spec: ArraySpec) -> SliceBound | None:
        """How the slice of such an array is bound; None while it is not."""
        slice = spec.placement.slice
        return self._slices.get(slice) or self._given_back.get(slice)

    def bound(self, spec: ArraySpec) -> int:
        """How often the slice of such an array has been bound; 0 while it is not."""
        slice = spec.placement.slice
        return self.bounds[slice] if slice in self._slices else 0

    def send(self, host: str, message: object) -> None:
        """Send to a host's object store, which knows from then on who this is."""
        self._identify(host)
        self._env.send(store_of(host), message)

    def _identify(self, host: str) -> None:
        if host not in self._identified and self._identity is not None:
            self._identified.add(host)
            self._env.send(store_of(host), self._identity)

    def knows(self, node: str) -> bool:
        """Whether that is a host."""
        return node in self._endpoints
