"""Copies of arrays in the memory of hosts: who has which, who shall have them, and what still waits for them.

A checkpoint has every box of an array copied to host memory, on the host that has it and on another one
(`COPIES`), and is answered when the last of those hosts says that it holds its part (`Holdings`). Copies
outlive the process of a host, and the controller, so a host tells of them whenever it joins. Where a host with
copies is lost or drained, others are asked to take some.

What hosts have of clients that a controller does not know yet, because they have still to come back to it, is
unclaimed, and kept until it is certain that they will not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pw.core.actor import Env
from pw.core.errors import ArrayDeleted, ErrorReport, HostLost, NotOwner
from pw.core.ids import client_of, scheduler_of, store_of
from pw.core.messages import (
    Answered,
    Checkpoint,
    Copy,
    CopyArrays,
    Directory,
    DropReplicas,
    Holding,
    Holdings,
    OfferReplica,
)
from pw.core.sharding import ArraySpec, Box
from pw.core.ticker import Ticker
from pw.sched.control.clients import Array, Client
from pw.sched.control.ledger import Ledger
from pw.sched.control.recovery.plan import sources_of

OFFER_S = 5.0
"""How long a host may take to fetch a copy before it is told of it once more."""
PAUSE_DOUBLINGS = 5
"""How often the time is doubled after which a host is asked again that could not take a copy."""
COPIES = 2
"""Hosts that shall have a copy of whatever was checkpointed."""


@dataclass(frozen=True, slots=True)
class OfferAgain:
    """Note to the controller: offers of copies may have been lost with a link, or be accepted by now."""


@dataclass(slots=True)
class _Copying:
    """A checkpoint under way: the boxes that hosts have not confirmed."""

    client: Client
    request: int
    missing: dict[int, set[tuple[str, Box]]]
    """By array: who is to keep which box."""
    givers: dict[tuple[int, Box], str] = field(default_factory=dict)
    """Who has it on a device, and gives it to the others."""
    islands: dict[str, str] = field(default_factory=dict)
    """Where those are."""
    too_few: set[int] = field(default_factory=set)
    """Arrays of which a copy has not been made: how they were made must not be forgotten."""
    error: ErrorReport | None = None

    def without(self, node: str, array: int) -> bool:
        """A host will neither keep nor give copies of an array; whether it was to."""
        missing = self.missing[array]
        left = {
            (keeper, box)
            for keeper, box in missing
            if node not in (keeper, self.givers[array, box])
        }
        self.missing[array] = left
        if left != missing:
            self.too_few.add(array)
        return left != missing


class Copies:
    """The controller's part that has copies made and knows where they are; see the module.

    Args:
        env: of the controller.
        ledger: what the controller knows.
        recovery_s: how long a lost host is waited for.
        is_known: whether a client of this number has been here.
    """

    def __init__(
        self, env: Env, ledger: Ledger, recovery_s: float, is_known: Callable[[int], bool]
    ) -> None:
        self._env = env
        self._ledger = ledger
        self._recovery_s = recovery_s
        self._is_known = is_known
        self._copies: dict[int, dict[str, frozenset[Box]]] = {}
        """Boxes in host memory, by array and host."""
        self._checkpoints: list[_Copying] = []
        self._offers = Ticker(env, OFFER_S, OfferAgain())
        self._offered: dict[tuple[int, str], set[Box]] = {}
        """What hosts were asked to take, by array and host."""
        self._refusals: Counter[tuple[int, str]] = Counter()
        """How often they could not."""
        self._paused: dict[tuple[int, str], float] = {}
        """When those that could not are asked again."""
        self._hosts: tuple[str, ...] = ()
        self._expected: dict[str, float] = {}
        """Hosts that had copies and may be back with them, and until when."""
        self.draining: set[str] = set()
        """Hosts that shall not keep anything."""
        self._unclaimed: dict[int, list[tuple[str, Holding]]] = {}
        """What hosts have of clients that have not come back to this controller, by client."""

    def of(self, client: Client) -> dict[int, dict[str, frozenset[Box]]]:
        """The copies of a client's arrays on hosts that can be asked for them, by array and host."""
        hosts = set(self._hosts)
        return {
            array: {host: boxes for host, boxes in copies.items() if host in hosts}
            for array, copies in self._copies.items()
            if client_of(array) == client.number
        }

    @property
    def may_come_back(self) -> bool:
        """Whether a host that had copies is still expected."""
        now_s = self._env.now_s()
        self._expected = {host: end_s for host, end_s in self._expected.items() if now_s < end_s}
        return bool(self._expected)

    # --- checkpoints -----------------------------------------------------------------------------------

    def checkpoint(self, client: Client, message: Checkpoint) -> None:
        """Have arrays copied to host memory, after the client's earlier work."""
        copying = _Copying(client, message.request, {})
        by_island: dict[str, list[tuple[str, Copy]]] = {}
        for number in dict.fromkeys(message.arrays):
            array = client.arrays.get(number)
            error = objection(client, number, array)
            origin = client.lineage.origins.get(number)
            if array is None and origin is not None:  # asked once more, of another controller
                sources = sources_of(origin.spec, self._copies.get(number, {}))
                if sources is not None:
                    client.lineage.copied(number)
                    continue
            if error is not None:
                copying.error = error
                continue
            assert array is not None
            devices = self._ledger.located(array.spec)
            chosen: dict[str, list[int]] = {}
            for _, positions in array.spec.distinct_boxes():
                chosen.setdefault(devices[positions[0]].host, []).append(positions[0])
            missing = copying.missing.setdefault(number, set())
            for host, at in chosen.items():
                targets = self._targets(number, host, array.hosts)
                copying.islands[host] = array.island
                copy = Copy(number, array.spec, devices, tuple(at), targets)
                by_island.setdefault(array.island, []).append((host, copy))
                for position in at:
                    box = array.spec.box(position)
                    copying.givers[number, box] = host
                    missing |= {(keeper, box) for keeper in (host, *targets)}
        for island, copies in by_island.items():
            self._env.send(scheduler_of(island), CopyArrays(client.number, tuple(copies)))
        self._offers.start()
        self._checkpoints.append(copying)
        client.unanswered[Checkpoint] += 1
        self._check(copying)

    def offer_again(self) -> None:
        """Tell those that were to keep copies where they are: they may not have heard of it."""
        for copying in self._checkpoints:
            for array, missing in copying.missing.items():
                origin = copying.client.lineage.origins.get(array)
                if origin is None:
                    continue
                for keeper, box in sorted(missing):
                    giver = copying.givers[array, box]
                    if keeper != giver and box in self._copies.get(array, {}).get(giver, ()):
                        offer = OfferReplica(array, origin.spec.dtype, (box,), giver)
                        self._env.send(store_of(keeper), offer)
        self._ask_again()
        self._offers.ticked(more=bool(self._checkpoints or self._paused))

    def _check(self, copying: _Copying) -> None:
        """Note the arrays of a checkpoint of which all copies are there, and answer when all are."""
        for array in [array for array, missing in copying.missing.items() if not missing]:
            del copying.missing[array]
            origin = copying.client.lineage.origins.get(array)
            if origin is None or array in copying.too_few:
                continue
            if sources_of(origin.spec, self._copies.get(array, {})):
                copying.client.lineage.copied(array)
        if not copying.missing and copying in self._checkpoints:
            self._checkpoints.remove(copying)
            copying.client.unanswered[Checkpoint] -= 1
            self._env.send(copying.client.address, Answered(copying.request, copying.error))

    # --- hosts -----------------------------------------------------------------------------------------

    def hosts_are(self, directory: Directory) -> None:
        """These hosts can keep copies."""
        before, self._hosts = self._hosts, tuple(peer.node for peer in directory.peers)
        gone = [host for host in before if host not in self._hosts]
        self._expect(gone)
        for copying in list(self._checkpoints):
            self._copy_without(copying, gone)
        for client in self._ledger.clients.values():
            if not client.recovering:
                self.top_up(client)

    def island_lost(self, island: str) -> None:
        """Checkpoints do not wait for hosts that have left this island; they may have been lost before it."""
        for copying in list(self._checkpoints):
            leave = [host for host, where in copying.islands.items() if where == island]
            self._copy_without(copying, leave)

    def host_lost(self, node: str) -> None:
        """What a host had in host memory is gone, unless its next incarnation says otherwise."""
        self._offered.clear()
        for number, holdings in list(self._unclaimed.items()):
            self._unclaimed[number] = [entry for entry in holdings if entry[0] != node]
        self._expect((node,))
        for array in [array for array, copies in self._copies.items() if node in copies]:
            del self._copies[array][node]
            client = self._ledger.clients.get(client_of(array))
            origin = client.lineage.origins.get(array) if client else None
            if client is None or origin is None:
                continue
            if origin.copied and sources_of(origin.spec, self._copies[array]) is None:
                client.lineage.copies_lost(array)
            if not self._copies[array]:
                del self._copies[array]
        for copying in list(self._checkpoints):
            self._copy_without(copying, (node,))

    def _expect(self, gone: Iterable[str]) -> None:
        """Copies outlive the process of a host: it is waited for as an island is."""
        until_s = self._env.now_s() + self._recovery_s
        for node in gone:
            if any(node in copies for copies in self._copies.values()):
                self._expected[node] = until_s

    def is_back(self, host: str) -> None:
        """A new incarnation has told what it has: what else its host had is gone for good."""
        self._expected.pop(host, None)

    def _copy_without(self, copying: _Copying, gone: Iterable[str]) -> None:
        """A checkpoint is not to wait for what these hosts were to give or to keep."""
        for node in gone:
            cut = [copying.without(node, array) for array in copying.missing]
            if any(cut):
                copying.error = ErrorReport.of(
                    HostLost(f"host {node} was lost while arrays were copied to or from it")
                )
        self._check(copying)

    def holds(self, host: str, message: Holdings) -> None:
        """A host has boxes in its memory."""
        useless = []
        for holding in message.holdings:
            self._confirm(host, holding)
            number = client_of(holding.array)
            client = self._ledger.clients.get(number)
            awaited = client is None and not self._is_known(number)
            if awaited or (client is not None and client.resuming is not None):
                self._unclaimed.setdefault(number, []).append((host, holding))
                continue
            if client is None or holding.array not in client.lineage.origins:
                useless.append(holding.array)
            elif holding.boxes:
                copies = self._copies.setdefault(holding.array, {})
                copies[host] = copies.get(host, frozenset()).union(holding.boxes)
                self._recall(client, holding.array, copies)
            elif holding.array in self._copies:
                self._refused(holding.array, host)
        if useless:
            self._env.send(store_of(host), DropReplicas(tuple(useless)))
        for copying in list(self._checkpoints):
            self._check(copying)

    def _confirm(self, host: str, holding: Holding) -> None:
        """A host has what it was to keep; without boxes: it will not have it, and says why."""
        for copying in self._checkpoints:
            missing = copying.missing.get(holding.array)
            if missing is not None and holding.boxes:
                missing -= {(host, box) for box in holding.boxes}
            elif missing is not None and copying.without(host, holding.array):
                array = copying.client.arrays.get(holding.array)
                known = None if array is None else array.error
                copying.error = copying.error or known or holding.error

    def _recall(self, client: Client, array: int, copies: dict[str, frozenset[Box]]) -> None:
        """What was checkpointed once, and is all there again, has lasting copies again."""
        origin = client.lineage.origins[array]
        if origin.lasting and not origin.copied and sources_of(origin.spec, copies) is not None:
            client.lineage.copied(array)

    # --- enough of them --------------------------------------------------------------------------------

    def top_up(self, client: Client) -> None:
        """Where a lost host had copies that a checkpoint asked for, have others make them."""
        for array, copies in self._copies.items():
            if client_of(array) != client.number:
                continue
            origin = client.lineage.origins.get(array)
            if origin is None or not origin.copied:
                continue
            for box, _ in origin.spec.distinct_boxes():
                there = [host for host, boxes in copies.items() if box in boxes]
                self._copy_more(array, origin.spec, box, there)

    def _refused(self, array: int, host: str) -> None:
        """A host could not take a copy: it is asked again after a while, and others are asked first."""
        if (array, host) not in self._paused:
            pause_s = OFFER_S * 2 ** min(self._refusals[array, host], PAUSE_DOUBLINGS)
            self._refusals[array, host] += 1
            self._paused[array, host] = self._env.now_s() + pause_s
            self._offers.start()

    def _ask_again(self) -> None:
        """Ask those that could not take a copy some time ago, where it is still wanted."""
        now_s = self._env.now_s()
        due = [key for key, again_s in self._paused.items() if again_s <= now_s]
        for key in due:
            del self._paused[key]
            self._offered.pop(key, None)
        for number in dict.fromkeys(client_of(array) for array, _ in due):
            client = self._ledger.clients.get(number)
            if client is not None and not client.recovering:
                self.top_up(client)

    def _copy_more(self, array: int, spec: ArraySpec, box: Box, there: list[str]) -> None:
        lasting = [host for host in there if host not in self.draining]
        if not there or len(lasting) >= COPIES:
            return
        for host in self._targets(array, there[0], tuple(there)):
            if host in there or box in self._offered.get((array, host), ()):
                continue
            self._offered.setdefault((array, host), set()).add(box)
            offer = OfferReplica(array, spec.dtype, (box,), there[0])
            self._env.send(store_of(host), offer)

    def _targets(self, array: int, host: str, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Who keeps copies of what is on `host`: rather one that has not the array itself, nor refused."""
        others = [other for other in self._hosts if other != host and other not in self.draining]
        if not others:
            return ()
        start = sum(host.encode())
        turned = others[start % len(others) :] + others[: start % len(others)]
        turned.sort(key=lambda other: (other in holders, self._refusals[array, other]))
        return tuple(turned[: COPIES - 1])

    def emptied(self, host: str) -> bool:
        """Whether nothing that is only on this host can still be needed; asks for copies elsewhere."""
        if any(client.recovering for client in self._ledger.clients.values()):
            return False
        arriving = [
            number
            for client in self._ledger.clients.values()
            for number, array in (*client.arrays.items(), *client.doomed.items())
            if array.uploading and array.restored
        ]
        if arriving:
            return False
        alone = False
        for array, copies in self._copies.items():
            client = self._ledger.clients.get(client_of(array))
            origin = client.lineage.origins.get(array) if client else None
            if origin is None:  # deleted in this turn, at the end of which its copies go
                continue
            for box in copies.get(host, ()):
                if not any(box in boxes for other, boxes in copies.items() if other != host):
                    alone = True
                    self._copy_more(array, origin.spec, box, [host])
        return not alone

    # --- what need not be kept -------------------------------------------------------------------------

    def arrived(self, client: Client, number: int) -> None:
        """An array is on its devices again: copies that were not asked for can go."""
        origin = client.lineage.origins.get(number)
        if origin is not None and not origin.copied:
            self._drop_copies([number])

    def forget(self, client: Client, arrays: Sequence[int]) -> None:
        """Nothing of this client can need these any more."""
        for copying in [copying for copying in self._checkpoints if copying.client is client]:
            for array in arrays:  # what is dropped while it is copied arrives nowhere
                copying.missing.pop(array, None)
            self._check(copying)
        if arrays and self._copies:
            self._drop_copies(arrays)

    def client_left(self, client: Client) -> None:
        """Hosts drop its copies themselves; nothing of it is waited for any more."""
        self._checkpoints = [c for c in self._checkpoints if c.client is not client]
        self._disclaim(client.number)
        self._drop_copies([n for n in self._copies if client_of(n) == client.number])
        if self._ledger.clients.keys() <= {client.number}:
            self._expected.clear()  # nothing waits for copies any more

    def _drop_copies(self, arrays: Iterable[int]) -> None:
        by_host: dict[str, list[int]] = {}
        for array in arrays:
            for host in self._copies.pop(array, ()):
                by_host.setdefault(host, []).append(array)
        for key in {*self._offered, *self._refusals}:
            if key[0] not in self._copies:
                self._offered.pop(key, None)
                self._refusals.pop(key, None)
                self._paused.pop(key, None)
        for host, dropped in by_host.items():
            self._env.send(store_of(host), DropReplicas(tuple(dropped)))

    # --- clients of an earlier controller ------------------------------------------------------------

    @property
    def unclaimed(self) -> set[int]:
        """Clients that have not come back, and of which hosts have something."""
        return set(self._unclaimed)

    def claim(self, client: Client) -> None:
        """A client has told all that it has: what hosts have of it is its own again."""
        for host, holding in self._unclaimed.pop(client.number, ()):
            self.holds(host, Holdings((holding,)))

    def disclaim(self) -> None:
        """Clients that have not come back by now will not: nobody needs what hosts have of them."""
        for number in self.unclaimed:
            if number not in self._ledger.clients:
                self._disclaim(number)

    def _disclaim(self, number: int) -> None:
        for host, holding in self._unclaimed.pop(number, ()):
            self._env.send(store_of(host), DropReplicas((holding.array,)))


def objection(client: Client, number: int, array: Array | None) -> ErrorReport | None:
    """Why an array cannot be checkpointed."""
    if client_of(number) != client.number:
        return ErrorReport.of(NotOwner("pw.checkpoint was given an array of another client"))
    if array is None:
        return ErrorReport.of(
            ArrayDeleted(
                "pw.checkpoint was given an array that was deleted, or donated to a computation, before"
            )
        )
    return array.error
