"""The monitor of launch leases: who numbers the launches of a host, and that all hosts of a lease agree."""

from __future__ import annotations

from functools import partial
from typing import Any

from pw.core import messages as msg
from pw.core.ids import client_of
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost
from pw.testing.sim.world import Violation, World


class LeaseMonitor:
    """Watches what hosts take under leases, and beside them."""

    def __init__(self, cluster: SimCluster) -> None:
        self._world: World = cluster.world
        self._launches: dict[tuple[str, bytes, int, int, int], int] = {}
        """By island, controller, epoch, lease and index, the run that a first host has taken."""
        self._numbers: set[tuple[str, str, bytes, int, int]] = set()
        """By host, island, controller and epoch, the numbers of leased launches."""
        cluster.on_start["host"].append(self._watch)

    def _watch(self, host: SimHost) -> None:
        executor: Any = host.executor
        executor.leases.launch = partial(self._taken, host, executor.leases.launch)
        executor._do = partial(self._done, host, executor._do)

    def _taken(self, host: SimHost, launch: Any, message: msg.Launch) -> None:
        """A host takes a step of a leased launch."""
        leases: Any = host.executor.leases
        lease = leases.current
        self._world.checked["leased"] += 1
        if lease is None:
            raise Violation("leases", f"{host.name} takes a leased launch without a lease")
        if client_of(message.run) != lease.client:
            raise Violation("leases", f"{host.name} takes a launch that is not of the holder")
        index = (-1 - message.sequence) // msg.STEPS
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
        launch(message)

    def _done(self, host: SimHost, do: Any, message: msg.Launch) -> None:
        """A host takes a launch of the scheduler."""
        leases: Any = host.executor.leases
        if leases.current is not None and message.segment != msg.CANCELLED:
            raise Violation("leases", f"{host.name} takes a launch of the scheduler under a lease")
        do(message)
