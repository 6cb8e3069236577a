"""The monitor of launch leases: who numbers the launches of a host, and that all hosts of a lease agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from pw.core import messages as msg
from pw.core.ids import CONTROLLER, Address, are_of, arrays_in
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost
from pw.testing.sim.world import Violation, World


class LeaseMonitor:
    """Watches what hosts take under leases, and beside them."""

    def __init__(self, cluster: SimCluster) -> None:
        self._world: World = cluster.world
        self._launches: dict[tuple[str, bytes, int, int, int], int] = {}
        """Run that a first host has taken, by island, controller, epoch, lease and index."""
        self._numbers: set[tuple[str, str, bytes, int, int]] = set()
        """Numbers of leased launches, by host, island, controller and epoch."""
        self._hosts: dict[str, SimHost] = {host.name: host for host in cluster.hosts}
        cluster.on_start["host"].append(self._watch)
        self._came: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        """Index behind the last launch that has come, by host, holder and lease."""
        cluster.world.watch_handled(msg.LeasedLaunch, self._arrived)
        self._room: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Bytes that the launches of a lease may still take, by host and lease."""
        self._widest: defaultdict[tuple[str, int], int] = defaultdict(int)
        cluster.world.watch_handled(msg.Lend, self._lent)
        cluster.world.watch_handled(msg.WidenLease, self._widened)
        cluster.world.watch_handled(msg.PeerLost, self._cut_off)

    def _watch(self, host: SimHost) -> None:
        executor: Any = host.executor
        for at in [at for at in self._came if at[0] == host.name]:
            del self._came[at]
        executor.leases.launch = partial(self._launch_on, host, executor.leases.launch)
        executor._do = partial(self._done, host, executor._do)

    def _launch_on(self, host: SimHost, launch: Any, message: msg.Launch) -> Any:
        """A host takes a step of a leased launch."""
        leases: Any = host.executor.leases
        lease = leases.current
        self._world.checked["leased"] += 1
        if lease is None:
            raise Violation("leases", f"{host.name} takes a leased launch without a lease")
        names = message.arguments or msg.Arguments((), ())
        if not are_of(lease.client, (message.run, *arrays_in(names.args), *names.results)):
            words = f"{host.name} takes a launch that names what its holder has not made"
            raise Violation("leases", words)
        index, step = divmod(-1 - message.sequence, msg.STEPS)
        if not step:
            self._take_room(host.name, lease, message)
        place: Any = host.executor.membership._place
        number = (host.name, place.island, place.tickets, message.epoch, message.sequence)
        if number in self._numbers:
            raise Violation("leases", f"{host.name} takes two launches with one number")
        self._numbers.add(number)
        key = (place.island, place.tickets, message.epoch, lease.number, index)
        run = self._launches.setdefault(key, message.run)
        if run != message.run:
            words = f"{host.name} takes run {message.run:x} as launch {index}, another host {run:x}"
            raise Violation("leases", words)
        return launch(message)

    def _done(self, host: SimHost, do: Any, message: msg.Launch) -> Any:
        """A host takes a launch of the scheduler."""
        leases: Any = host.executor.leases
        if leases.current is not None and message.segment != msg.CANCELLED:
            raise Violation("leases", f"{host.name} takes a launch of the scheduler under a lease")
        return do(message)

    def _arrived(
        self, sender: Address, to: Address, message: msg.LeasedLaunch
    ) -> Callable[[], None] | None:
        """A launch comes to a host: of the holder, or of a client that may change nothing for the holder."""
        if sender.node == CONTROLLER:
            return None
        at = (to.node, sender.node, message.lease)
        self._came[at] = max(self._came[at], message.index + 1)
        lease = self._lease(to.node)
        if lease is None or not lease.is_open or sender.node == lease.node:
            return partial(self._check_heard, to.node)
        index = lease.next_index

        def check() -> None:
            self._world.checked["foreign launches"] += 1
            if not lease.is_open or lease.next_index != index:
                words = f"{sender.node} has changed the lease of {lease.node} on {to.node}"
                raise Violation("leases", words)

        return check

    def _take_room(self, host: str, lease: Any, message: msg.Launch) -> None:
        room_bytes = lease.programs[message.program].room_bytes
        if room_bytes:
            self._world.checked["leased memory"] += 1
            self._room[host, lease.number] -= room_bytes
            if self._room[host, lease.number] < 0:
                raise Violation("memory", f"{host} takes a launch for which its lease has no room")

    def _lent(self, sender: Address, to: Address, message: msg.Lend) -> Callable[[], None]:
        at = to.node, message.lease  # another controller begins with the same numbers
        self._room[at] = self._widest[at] = message.room_bytes
        return partial(self._check_heard, to.node)

    def _widened(self, sender: Address, to: Address, message: msg.WidenLease) -> None:
        at = to.node, message.lease
        if message.room_bytes > self._widest[at]:
            self._room[at] += message.room_bytes - self._widest[at]
            self._widest[at] = message.room_bytes

    def _check_heard(self, host: str) -> None:
        """While a lease is open, its host has taken all that has come of its holder, or keeps it."""
        lease = self._lease(host)
        if lease is not None and lease.is_open:
            self._world.checked["heard"] += 1
            came = self._came[host, lease.node, lease.number]
            if came > lease.next_index + len(lease.behind):
                words = f"{host} has lost launch {came - 1} of {lease.node}, and its lease goes on"
                raise Violation("leases", words)

    def _cut_off(self, sender: Address, to: Address, message: msg.PeerLost) -> None:
        """Launches are lost with the link: both ends hear of that."""
        for at in [at for at in self._came if at[:2] == (to.node, message.node)]:
            del self._came[at]

    def _lease(self, host: str) -> Any:
        executor = self._hosts[host].executor
        # A broken gang takes nothing.
        return None if executor.order.is_broken else executor.leases.current
