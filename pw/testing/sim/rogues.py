"""A worker with a certificate that asks hosts and the controller for what is not its business.

With the profile's `trespasses`, a host of one island sends by hand what hosts send for arrays that
they have: it asks for replicas, offers some, says that it has some, that arrays are lost, and that
uploads have come. The arrays lie on another island. The monitor `replicas` sees that hosts ask for
replicas only as the controller has told them, that the rogue gets none, and that the controller
neither believes it nor names it to others.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from pw.core import messages as msg
from pw.core.ids import CONTROL, Address, client_id, store_of
from pw.testing.sim.node import INTRUDER
from pw.testing.sim.world import Violation, World

if TYPE_CHECKING:
    from pw.testing.sim.cluster import SimCluster
    from pw.testing.sim.workload import SimClient

REQUESTS = 1 << 50
"""First number of a rogue's requests; hosts have none that are so large."""


class Rogues:
    """Forges messages of hosts, and judges what comes of them."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._world: World = cluster.world
        self._permitted: set[tuple[str, str, int]] = set()
        """Arrays that a host may get from another host, as the controllers have said."""
        self._keepers: set[tuple[str, int]] = set()
        """Hosts that have said truly, or were told, that they have replicas of an array."""
        self._asked = 0
        world = self._world
        world.watch_sent(msg.OfferReplica, self._offered)
        world.watch_sent(msg.Restore, self._restored)
        world.watch_sent(msg.Holdings, self._held)
        world.watch_sent(msg.Copied, self._copied)
        world.watch_sent(msg.FetchReplica, self._fetched)
        world.watch_sent(msg.ReplicaData, self._replica_sent)
        world.watch_handled(msg.ArraysLost, self._lost)
        world.watch_handled(msg.Uploaded, self._uploaded)

    def forge(self, random: Random, victim: SimClient) -> None:
        """Have a host ask for arrays of a client whose slices are on other islands."""
        at_work = {
            device.host for bound in victim.slices.values() for device in bound.devices
        } | self._hosts_of(victim)
        rogues = [
            host.node
            for host in self._cluster.hosts
            if host.node is not None and host.node.alive and host.name not in at_work
        ]
        if not rogues or victim.attached is None:
            return
        self._world.ledger.injected["rogue"] += 1
        rogue = random.choice(rogues)
        for to, message in self._messages(random, rogue.name, victim, sorted(at_work)):
            actor = INTRUDER if isinstance(message, msg.OfferReplica) else "store"
            rogue.network.send(to, Address(rogue.name, actor), message)
        rogue.request_turn()

    def _messages(
        self, random: Random, rogue: str, victim: SimClient, hosts: list[str]
    ) -> list[tuple[Address, object]]:
        assert victim.attached is not None
        coming = client_id(victim.attached.client, victim.serial + random.randrange(1, 100))
        messages: list[tuple[Address, object]] = [(CONTROL, msg.Uploaded(coming, None))]
        arrays = sorted(victim.arrays)
        for array in random.sample(arrays, min(4, len(arrays))):
            spec = victim.arrays[array]
            boxes = tuple(box for box, _ in spec.distinct_boxes())
            messages += [(CONTROL, msg.ArraysLost((array,))), (CONTROL, msg.Uploaded(array, None))]
            if (rogue, array) not in self._keepers:
                messages.append((CONTROL, msg.Holdings((msg.Holding(array, boxes),))))
            for host in hosts:
                self._asked += 1
                request, permit = REQUESTS + self._asked, random.randbytes(16)
                asked = msg.FetchReplica(request, array, spec.dtype, boxes, None, permit)
                offer = msg.OfferReplica(array, spec.dtype, boxes, rogue, permit, permit)
                messages += [(store_of(host), asked), (store_of(host), offer)]
        return messages

    # --- what holds ------------------------------------------------------------------------------

    def _offered(self, sender: Address, to: Address, message: msg.OfferReplica) -> None:
        self._name(to.node, message.host, message.array)
        self._keepers.add((to.node, message.array))

    def _restored(self, sender: Address, to: Address, message: msg.Restore) -> None:
        for source in message.sources:
            self._name(to.node, source.host, message.copied)

    def _name(self, importer: str, exporter: str, array: int) -> None:
        """The controller names a host that has replicas of an array to another one.

        A rogue that has been given a slice of the client since it lied is believed for the client's
        arrays, as it would be if it said so now.
        """
        self._permitted.add((importer, exporter, array))
        if (exporter, array) not in self._keepers and self._is_strange(exporter, array):
            raise Violation(
                "replicas", f"{importer} is to get {array:x} from {exporter}, which lied"
            )

    def _held(self, sender: Address, to: Address, message: msg.Holdings) -> None:
        self._keepers.update((sender.node, holding.array) for holding in message.holdings)

    def _copied(self, sender: Address, to: Address, message: msg.Copied) -> None:
        self._keepers.add((sender.node, message.array))

    def _fetched(self, sender: Address, to: Address, message: msg.FetchReplica) -> None:
        self._world.checked["replicas"] += 1
        if (sender.node, to.node, message.array) not in self._permitted:
            words = f"{sender.node} asks {to.node} for {message.array:x}, as no controller has said"
            raise Violation("replicas", words)

    def _replica_sent(self, sender: Address, to: Address, message: msg.ReplicaData) -> None:
        if message.request > REQUESTS:
            raise Violation("replicas", f"{sender.node} gave {to.node} what was not permitted")

    def _hosts_of(self, client: SimClient) -> set[str]:
        """Return the hosts that a client's slices are or were bound to, as its controller knows."""
        if client.attached is None or not self._cluster.node.alive:
            return set()
        session = self._cluster.controller.sessions.get(client.attached.client)
        return set() if session is None else set().union(*session.slices.hosts.values())

    def _lost(self, sender: Address, to: Address, message: msg.ArraysLost) -> Callable[[], None]:
        before = self._states(message.arrays)

        def check() -> None:
            if (
                self._is_strange(sender.node, message.arrays[0])
                and self._states(message.arrays) != before
            ):
                raise Violation(
                    "replicas", f"{sender.node} had arrays made again that it never had"
                )

        return check

    def _states(self, arrays: tuple[int, ...]) -> list[object]:
        control = self._cluster.controller
        owners = ((number, control.sessions.owner(number)) for number in arrays)
        theirs = [owner.arrays.find(number) for number, owner in owners if owner is not None]
        making = [
            (run.number, run.state)
            for run in control.runs.in_flight.values()
            if not set(arrays).isdisjoint(run.results)
        ]
        return [*[array and array.state for array in theirs], *making]

    def _uploaded(self, sender: Address, to: Address, message: msg.Uploaded) -> Callable[[], None]:
        def check() -> None:
            client = self._cluster.controller.sessions.owner(message.array)
            if client is None or not self._is_strange(sender.node, message.array):
                return
            if sender.node in client.arrays.unannounced.get(message.array, ()):
                words = f"{sender.node} told of an upload to a slice that it is not in"
                raise Violation("replicas", words)

        return check

    def _is_strange(self, host: str, array: int) -> bool:
        """Whether no slice of the client that has an array is or was bound to a host."""
        client = self._cluster.controller.sessions.owner(array)
        return client is not None and host not in set().union(*client.slices.hosts.values())
