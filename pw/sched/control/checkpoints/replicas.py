"""Replicas of arrays in the memory of hosts: which host has which, and which hosts shall have more.

Each box that a checkpoint has put into host memory shall be on `REPLICAS` hosts. Where a host with
replicas is lost or drained, other hosts are offered them (`OfferReplica`); they fetch them and say
so (`Holdings`). A host is believed only for arrays that lay on its devices, or that a controller
has offered it: it shows the proof of the offer, also to a later controller. Replicas outlive the
process of a host, and the controller, so a host tells of them whenever it joins.

Replicas of clients that the controller does not know yet, because they have still to come back to
it, are unclaimed. They are kept until it is certain that those clients do not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.actors.ticker import Ticker
from pw.core.ids import CONTROLLER, RESOURCES, Address, client_of, store_of
from pw.core.rights import Resource
from pw.core.sharding import ArraySpec, Box
from pw.sched.control.clients import Client
from pw.sched.control.lineage import Origin
from pw.sched.control.sessions import ControlPart, handles_host

OFFER_S = 5.0
"""Seconds that a host may take to fetch a replica before the replica is offered again."""
PAUSE_DOUBLINGS = 5
"""Number of times that the pause is doubled after which a host that refused is asked again."""
REPLICAS = 2
"""Number of hosts that shall have a replica of each box that was checkpointed."""
EMPTIED_S = 0.1
"""Seconds between two looks whether a drained host is empty."""
RESUME_S = 90.0
"""Seconds for which hosts keep the replicas of clients that have not come back to this controller."""

ReplicaMap = Mapping[int, Mapping[str, frozenset[Box]]]
"""Boxes of arrays in host memory, by array and host."""


def sources_of(
    spec: ArraySpec, replicas: Mapping[str, frozenset[Box]]
) -> tuple[msg.BoxSource, ...] | None:
    """Return which host has which box of an array in host memory; None if a box is missing."""
    sources = []
    for box, _ in spec.distinct_boxes():
        there = [msg.BoxSource(box, host) for host, boxes in replicas.items() if box in boxes]
        if not there:
            return None
        sources += there
    return tuple(sources)


@dataclass(eq=False)
class ReplicaTable(ControlPart):
    """Replicas of all arrays in host memory."""

    recovery_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._replicas: dict[int, dict[str, frozenset[Box]]] = {}
        self._hosts: tuple[str, ...] = ()
        self._draining: set[str] = set()
        """Names of hosts that shall keep no replicas."""
        self._expected: dict[str, float] = {}
        """Hosts that had replicas and may come back with them, with the time until which they may, in
        seconds."""
        self._reporters: set[str] = set()
        """Hosts that have told this controller all that they had, and were not lost since."""
        self._offered: dict[tuple[int, str], set[Box]] = {}
        """Boxes that were offered to a host, by array and host."""
        self._refusals: Counter[tuple[int, str]] = Counter()
        self._paused: dict[tuple[int, str], float] = {}
        """Time at which a host that refused an array is asked again, in seconds, by array and host."""
        self._unclaimed: dict[int, list[tuple[str, msg.Holding]]] = {}
        """Replicas of clients that have not come back yet, with their hosts, by client."""
        self._offers = Ticker(self._env, OFFER_S, self._offer_again)
        self._drains = Ticker(self._env, EMPTIED_S, self._look_at_drained)
        self._disclaimer = Ticker(self._env, RESUME_S, self._come_back_no_more)

    def of(self, client: Client) -> ReplicaMap:
        """Return the replicas of a client's arrays on hosts that can be asked for them."""
        hosts = set(self._hosts)
        return {
            array: {host: boxes for host, boxes in replicas.items() if host in hosts}
            for array, replicas in self._replicas.items()
            if client_of(array) == client.number
        }

    def are_complete(self, array: int, spec: ArraySpec) -> bool:
        """Return whether each box of an array is in host memory."""
        return sources_of(spec, self._replicas.get(array, {})) is not None

    def holders(self, array: int, box: Box) -> list[str]:
        """Return the hosts that have a box in their memory and can be asked for it."""
        replicas = self._replicas.get(array, {})
        return [host for host in self._hosts if box in replicas.get(host, ())]

    def has(self, host: str, array: int, box: Box) -> bool:
        """Return whether a host has a box in its memory."""
        return box in self._replicas.get(array, {}).get(host, ())

    @property
    def may_come_back(self) -> bool:
        """Whether a host that had replicas is still expected."""
        now_s = self._env.now_s()
        self._expected = {host: end_s for host, end_s in self._expected.items() if now_s < end_s}
        return bool(self._expected)

    def _origin(self, array: int) -> Origin | None:
        client = self.sessions.owner(array)
        return None if client is None else client.lineage.origins.get(array)

    # --- hosts ------------------------------------------------------------------------------------

    @handles(msg.Directory)
    def _hosts_are(self, sender: Address, directory: msg.Directory) -> None:
        before, self._hosts = self._hosts, tuple(peer.node for peer in directory.peers)
        self._expect(host for host in before if host not in self._hosts)
        for client in self.sessions.clients:
            if not client.recovering:
                self.top_up(client)

    def host_lost(self, node: str) -> None:
        """The replicas of a host are gone, unless its next incarnation says otherwise."""
        self._offered.clear()
        self._reporters.discard(node)
        for number, holdings in list(self._unclaimed.items()):
            self._unclaimed[number] = [entry for entry in holdings if entry[0] != node]
        self._expect((node,))
        for array in [array for array, replicas in self._replicas.items() if node in replicas]:
            del self._replicas[array][node]
            client = self.sessions.owner(array)
            origin = self._origin(array)
            if client is None or origin is None:
                continue
            if origin.replicated and not self.are_complete(array, origin.spec):
                client.lineage.replicas_lost(array)
            if not self._replicas[array]:
                del self._replicas[array]

    def _expect(self, gone: Iterable[str]) -> None:
        """Wait for lost hosts as for islands: replicas outlive the process of a host."""
        having = {node for replicas in self._replicas.values() for node in replicas}
        self._wait_for(having.intersection(gone))

    def _wait_for(self, hosts: Iterable[str]) -> None:
        until_s = self._env.now_s() + self.recovery_s
        self._expected.update(dict.fromkeys(hosts, until_s))

    @handles_host(msg.HoldsNoMore)
    def _is_back(self, host: str, message: msg.HoldsNoMore) -> None:
        """A new incarnation has told all that it has: its other replicas are gone for good."""
        self._reporters.add(host)
        self._expected.pop(host, None)

    @handles_host(msg.Holdings)
    def _holds(self, host: str, message: msg.Holdings) -> None:
        self._count(host, message.holdings)
        if self._unclaimed:
            self._disclaimer.start()

    def _count(self, host: str, holdings: Iterable[msg.Holding]) -> None:
        """A host has boxes in its memory, or refuses to take them."""
        useless = []
        for holding in holdings:
            array = holding.array
            number = client_of(array)
            client = self.sessions.get(number)
            is_awaited = client is None and not self.sessions.is_known(number)
            if is_awaited or (client is not None and client.resuming is not None):
                self._unclaimed.setdefault(number, []).append((host, holding))
                continue
            origin = self._origin(array)
            if client is None or origin is None:
                useless.append(array)
            elif holding.boxes and not self._may_hold(client, origin, host, holding):
                self._env.count("messages_refused")
                useless.append(array)
            elif holding.boxes:
                replicas = self._replicas.setdefault(array, {})
                replicas[host] = replicas.get(host, frozenset()).union(holding.boxes)
                if (
                    origin.lasting
                    and not origin.replicated
                    and self.are_complete(array, origin.spec)
                ):
                    client.lineage.replicated(array)  # all that a checkpoint made is there again
            elif array in self._replicas:
                self._refused(array, host)
        if useless:
            self._env.send(store_of(host), msg.DropReplicas(tuple(useless)))

    def _may_hold(self, client: Client, origin: Origin, host: str, holding: msg.Holding) -> bool:
        """Whether an array lay on a host, or a controller has offered it replicas."""
        if host in client.slices.hosts.get(origin.spec.placement.slice, ()):
            return True
        return self.sessions.claims.may_keep(holding.proof, holding.array, host)

    # --- enough of them ---------------------------------------------------------------------------

    def top_up(self, client: Client) -> None:
        """Offer what a client checkpointed to other hosts, where a lost host had it."""
        for array, replicas in self._replicas.items():
            if client_of(array) != client.number:
                continue
            origin = client.lineage.origins.get(array)
            if origin is None or not origin.replicated:
                continue
            for box, _ in origin.spec.distinct_boxes():
                there = [host for host, boxes in replicas.items() if box in boxes]
                self._offer(array, origin.spec, box, there)

    def _offer(self, array: int, spec: ArraySpec, box: Box, there: list[str]) -> None:
        staying = [host for host in there if host not in self._draining]
        if not there or len(staying) >= REPLICAS:
            return
        for host in self.targets(array, there[0], tuple(there)):
            if host in there or box in self._offered.get((array, host), ()):
                continue
            self._offered.setdefault((array, host), set()).add(box)
            self.offer(array, spec, (box,), there[0], host)

    def offer(
        self, array: int, spec: ArraySpec, boxes: tuple[Box, ...], holder: str, keeper: str
    ) -> None:
        """Have a host take boxes of an array from another one, and keep them."""
        claims = self.sessions.claims
        permit = claims.permit(array, holder, keeper)
        proof = claims.permit(array, CONTROLLER, keeper)
        offer = msg.OfferReplica(array, spec.dtype, boxes, holder, permit, proof)
        self._env.send(store_of(keeper), offer)

    def targets(self, array: int, host: str, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Return the hosts that shall keep replicas of the shards on `host`.

        Hosts that do not have the array, and have not refused it, come first.
        """
        candidates = [
            other for other in self._hosts if other != host and other not in self._draining
        ]
        if not candidates:
            return ()
        start = sum(host.encode())
        order = candidates[start % len(candidates) :] + candidates[: start % len(candidates)]
        order.sort(key=lambda other: (other in holders, self._refusals[array, other]))
        return tuple(order[: REPLICAS - 1])

    def _refused(self, array: int, host: str) -> None:
        """A host could not take a replica: ask it again after a pause, and other hosts first."""
        if (array, host) not in self._paused:
            pause_s = OFFER_S * 2 ** min(self._refusals[array, host], PAUSE_DOUBLINGS)
            self._refusals[array, host] += 1
            self._paused[array, host] = self._env.now_s() + pause_s
            self._offers.start()

    def _offer_again(self) -> bool:
        """Ask the hosts whose pause is over, where replicas are still missing."""
        now_s = self._env.now_s()
        due = [key for key, again_s in self._paused.items() if again_s <= now_s]
        for key in due:
            del self._paused[key]
            self._offered.pop(key, None)
        for number in dict.fromkeys(client_of(array) for array, _ in due):
            client = self.sessions.get(number)
            if client is not None and not client.recovering:
                self.top_up(client)
        return bool(self._paused)

    # --- drained hosts ----------------------------------------------------------------------------

    @handles(msg.Draining)
    def _drain(self, sender: Address, message: msg.Draining) -> None:
        self._draining = set(message.nodes)
        if message.nodes:
            self._drains.start()

    def _look_at_drained(self) -> bool:
        """Report the drained hosts that are empty, or that no host is there to empty."""
        for client in self.sessions.clients:
            is_rebuilt = client.rebuilds and client.away is None
            if is_rebuilt or any(one.restored for _, one in client.arrays.arriving()):
                return bool(self._draining)
        for node in sorted(self._draining):
            is_empty = self._is_empty(node)
            if is_empty or self._draining.issuperset(self._hosts):
                self._env.send(RESOURCES, msg.HostEmptied(node, not is_empty))
        return bool(self._draining)

    def _is_empty(self, host: str) -> bool:
        """Return whether no replica is on this host alone; offer such replicas elsewhere."""
        is_empty = True
        for array, replicas in self._replicas.items():
            origin = self._origin(array)
            if origin is None:  # deleted in this turn, at the end of which its replicas go
                continue
            for box in replicas.get(host, ()):
                elsewhere = (
                    boxes
                    for other, boxes in replicas.items()
                    if other != host and other not in self._draining
                )
                if not any(box in boxes for boxes in elsewhere):
                    is_empty = False
                    self._offer(array, origin.spec, box, [host])
        return is_empty

    # --- what need not be kept --------------------------------------------------------------------

    def arrived(self, client: Client, array: int) -> None:
        """An array is on its devices again: drop replicas that no checkpoint asked for."""
        origin = client.lineage.origins.get(array)
        if origin is not None and not origin.replicated:
            self.drop((array,))

    def client_left(self, client: Client) -> None:
        """Forget a client's replicas; hosts drop them themselves."""
        self._disclaim(client.number)
        self.drop([n for n in self._replicas if client_of(n) == client.number])
        if all(other is client for other in self.sessions.clients):
            self._expected.clear()  # nothing waits for replicas any more

    def write(self, client: Client) -> None:
        """Have hosts move their replicas of a client's arrays from memory to files."""
        by_host: dict[str, list[int]] = {}
        for array, replicas in self._replicas.items():
            if client_of(array) == client.number:
                for host in replicas:
                    by_host.setdefault(host, []).append(array)
        for host, arrays in by_host.items():
            self._env.send(store_of(host), msg.WriteReplicas(tuple(arrays)))

    def drop(self, arrays: Iterable[int]) -> None:
        """Have hosts drop their replicas of these arrays."""
        by_host: dict[str, list[int]] = {}
        for array in arrays:
            self.sessions.usage.give(client_of(array), Resource.HOST_MEMORY, array)
            for host in self._replicas.pop(array, ()):
                by_host.setdefault(host, []).append(array)
        for key in {*self._offered, *self._refusals}:
            if key[0] not in self._replicas:
                self._offered.pop(key, None)
                self._refusals.pop(key, None)
                self._paused.pop(key, None)
        for host, dropped in by_host.items():
            self._env.send(store_of(host), msg.DropReplicas(tuple(dropped)))

    # --- clients of an earlier controller ---------------------------------------------------------

    @property
    def unclaimed(self) -> set[int]:
        """Clients that have not come back, and of which hosts have replicas."""
        return set(self._unclaimed)

    def claim(self, client: Client) -> None:
        """A client has told all that it has: count the replicas that hosts have of it.

        Those of its hosts that have not come to this controller yet may have more.
        """
        self._wait_for(set[str]().union(*client.slices.hosts.values()) - self._reporters)
        for host, holding in self._unclaimed.pop(client.number, ()):
            self._count(host, (holding,))

    def _come_back_no_more(self) -> bool:
        """Drop the replicas of clients that have not come back to this controller."""
        for number in self.unclaimed:
            if self.sessions.get(number) is None:
                self._disclaim(number)
        return False

    def _disclaim(self, number: int) -> None:
        for host, holding in self._unclaimed.pop(number, ()):
            self._env.send(store_of(host), msg.DropReplicas((holding.array,)))
