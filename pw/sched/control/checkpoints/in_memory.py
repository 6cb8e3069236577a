"""Checkpoints in host memory that are under way.

A checkpoint has every box of its arrays copied to host memory, on the host that has it and on
another one, which is offered the box as soon as it is copied (`Copied`). It is answered when each of
those hosts has said that it keeps its part (`Holdings`). It does not wait for hosts that are lost or
refuse, and then its answer is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import (
    ArrayDeleted,
    ErrorReport,
    HostLost,
    NotOwner,
    PlacementError,
    QuotaExceeded,
)
from pw.core.ids import Address, client_of, scheduler_of
from pw.core.rights import Resource
from pw.core.sharding import ArraySpec, Box, DeviceAddress, box_shape, dtype_of
from pw.sched.control.checkpoints.replicas import OFFER_S, ReplicaTable
from pw.sched.control.clients import Client
from pw.sched.control.islands import Islands
from pw.sched.control.sessions import ControlPart, handles_host


@dataclass(slots=True, eq=False)
class _Copying:
    """A checkpoint under way: the boxes that hosts have not confirmed."""

    client: Client
    request: int
    missing: dict[int, set[tuple[str, Box]]] = field(default_factory=dict)
    """Hosts and the boxes that they have still to keep, by array."""
    holders: dict[tuple[int, Box], str] = field(default_factory=dict)
    """Name of the host that has a box on a device, and gives it to the other hosts, by array and box."""
    islands: dict[str, str] = field(default_factory=dict)
    """Islands of the holders, by the holder's name."""
    incomplete: set[int] = field(default_factory=set)
    """Arrays without a replica yet: their lineage is still needed."""
    error: ErrorReport | None = None

    def without(self, node: str, array: int) -> bool:
        """Do not wait for a host with an array; return whether it was to keep or give some."""
        missing = self.missing[array]
        left = {
            (keeper, box)
            for keeper, box in missing
            if node not in (keeper, self.holders[array, box])
        }
        self.missing[array] = left
        if left != missing:
            self.incomplete.add(array)
        return left != missing


@dataclass(eq=False)
class Checkpoints(ControlPart):
    """Checkpoints in host memory that are not complete."""

    replicas: ReplicaTable

    def __post_init__(self) -> None:
        super().__post_init__()
        self._under_way: list[_Copying] = []
        self._offers = Ticker(self._env, OFFER_S, self._offer_again)
        self._hosts: tuple[str, ...] = ()

    def count(self, client: Client) -> int:
        """Return how many checkpoints of a client are under way."""
        return sum(copying.client is client for copying in self._under_way)

    def left(self, client: Client) -> int:
        """Return how many replicas its checkpoints still wait for."""
        theirs = (copying for copying in self._under_way if copying.client is client)
        return sum(len(missing) for copying in theirs for missing in copying.missing.values())

    def begin(self, client: Client, message: msg.Checkpoint) -> None:
        """Have arrays copied to host memory, after the client's earlier work."""
        copying = _Copying(client, message.request)
        by_island: dict[str, list[tuple[str, msg.ArrayCopy]]] = {}
        amounts: dict[int, int] = {}
        for number in dict.fromkeys(message.arrays):
            array = client.arrays.get(number)
            origin = client.lineage.origins.get(number)
            if (
                array is None
                and origin is not None  # an earlier controller was asked the same
                and self.replicas.are_complete(number, origin.spec)
            ):
                client.lineage.replicated(number)
                continue
            error = objection(client, number, self._islands)
            if array is None or error is not None:
                copying.error = error
                continue
            devices = self._islands.located(array.spec)
            missing = copying.missing.setdefault(number, set())
            for host, at in box_holders(array.spec, devices).items():
                targets = self.replicas.targets(number, host, array.hosts)
                copying.islands[host] = array.island
                copy = msg.ArrayCopy(number, array.spec, devices, at)
                by_island.setdefault(array.island, []).append((host, copy))
                for position in at:
                    box = array.spec.box(position)
                    copying.holders[number, box] = host
                    missing |= {(keeper, box) for keeper in (host, *targets)}
            itemsize = dtype_of(array.spec.dtype).itemsize
            amounts[number] = sum(math.prod(box_shape(box)) * itemsize for _, box in missing)
        try:
            self.sessions.usage.take(client.number, Resource.HOST_MEMORY, amounts)
        except QuotaExceeded as error:
            self.sessions.tell(client, msg.Answered(message.request, ErrorReport.of(error)))
            if client.is_holder:
                self._env.log("warning", "no replicas", of=client.name, why=str(error))
            return
        for island, copies in by_island.items():
            self._env.send(scheduler_of(island), msg.CopyArrays(client.number, tuple(copies)))
        self._offers.start()
        self._under_way.append(copying)
        self._check(copying)

    def _offer_again(self) -> bool:
        """Offer boxes to hosts again, because the first offer may have been lost."""
        for copying in self._under_way:
            for array, missing in copying.missing.items():
                for _, box in sorted(missing):
                    holder = copying.holders[array, box]
                    if self.replicas.has(holder, array, box):
                        self._offer(copying, array, holder, {box})
        return bool(self._under_way)

    @handles_host(msg.Copied)
    def _copied(self, host: str, message: msg.Copied) -> None:
        for copying in self._under_way:
            self._offer(copying, message.array, host, frozenset(message.boxes))

    def _offer(self, copying: _Copying, array: int, holder: str, boxes: Collection[Box]) -> None:
        """Offer boxes to the hosts that shall keep them, if this host gives them."""
        origin = copying.client.lineage.origins.get(array)
        missing: dict[str, list[Box]] = {}
        for keeper, box in sorted(copying.missing.get(array, ())):
            if keeper != holder and box in boxes and copying.holders[array, box] == holder:
                missing.setdefault(keeper, []).append(box)
        for keeper, theirs in missing.items():
            if origin is not None:
                self.replicas.offer(array, origin.spec, tuple(theirs), holder, keeper)

    @handles_host(msg.Holdings)
    def _holds(self, host: str, message: msg.Holdings) -> None:
        """Note the boxes that a host keeps, or its reason to refuse them."""
        for copying in list(self._under_way):
            for holding in message.holdings:
                missing = copying.missing.get(holding.array)
                if missing is not None and holding.boxes:
                    missing -= {(host, box) for box in holding.boxes}
                elif missing is not None and copying.without(host, holding.array):
                    array = copying.client.arrays.get(holding.array)
                    cause = None if array is None else array.error
                    copying.error = copying.error or cause or holding.error
            self._check(copying)

    @handles(msg.Directory)
    def _hosts_are(self, sender: Address, directory: msg.Directory) -> None:
        before, self._hosts = self._hosts, tuple(peer.node for peer in directory.peers)
        gone = [host for host in before if host not in self._hosts]
        for copying in list(self._under_way):
            self._go_on_without(copying, gone)

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        for copying in list(self._under_way):
            leave = [host for host, island in copying.islands.items() if island == message.island]
            self._go_on_without(copying, leave)

    def host_lost(self, node: str) -> None:
        """No checkpoint waits for a host that is lost."""
        for copying in list(self._under_way):
            self._go_on_without(copying, (node,))

    def _go_on_without(self, copying: _Copying, gone: Iterable[str]) -> None:
        for node in gone:
            cut = [copying.without(node, array) for array in copying.missing]
            if any(cut):
                copying.error = ErrorReport.of(
                    HostLost(f"host {node} was lost while arrays were copied to or from it")
                )
        self._check(copying)

    def forget(self, client: Client, arrays: Sequence[int]) -> None:
        """Do not wait for arrays that nothing needs any more: dropped boxes arrive nowhere."""
        for copying in [copying for copying in self._under_way if copying.client is client]:
            for array in arrays:
                copying.missing.pop(array, None)
            self._check(copying)

    def client_left(self, client: Client) -> None:
        """Forget the checkpoints of a client."""
        self._under_way = [copying for copying in self._under_way if copying.client is not client]

    def _check(self, copying: _Copying) -> None:
        """Note the arrays that have all their replicas, and answer when all have."""
        lineage = copying.client.lineage
        for array in [array for array, missing in copying.missing.items() if not missing]:
            del copying.missing[array]
            origin = lineage.origins.get(array)
            if origin is None or array in copying.incomplete:
                continue
            if self.replicas.are_complete(array, origin.spec):
                lineage.replicated(array)
        if not copying.missing and copying in self._under_way:
            self._under_way.remove(copying)
            self.sessions.tell(copying.client, msg.Answered(copying.request, copying.error))


def box_holders(spec: ArraySpec, devices: Sequence[DeviceAddress]) -> dict[str, tuple[int, ...]]:
    """Return the positions whose boxes each host copies, so that each box is copied once."""
    chosen: dict[str, list[int]] = {}
    for _, positions in spec.distinct_boxes():
        chosen.setdefault(devices[positions[0]].host, []).append(positions[0])
    return {host: tuple(positions) for host, positions in chosen.items()}


def objection(client: Client, number: int, islands: Islands) -> ErrorReport | None:
    """Return why an array cannot be checkpointed."""
    if client_of(number) != client.number:
        return ErrorReport.of(NotOwner("pw.checkpoint was given an array of another client"))
    array = client.arrays.get(number)
    if array is None:
        return ErrorReport.of(
            ArrayDeleted(
                "pw.checkpoint was given an array that was deleted, or donated to a computation"
            )
        )
    if array.error is None and not islands.is_bound(array.spec):
        return ErrorReport.of(
            PlacementError(
                "pw.checkpoint was given an array on a slice that was released; make checkpoints before "
                "slices are released"
            )
        )
    return array.error
