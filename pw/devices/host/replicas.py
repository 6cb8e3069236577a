"""Moves replicas between hosts.

A *replica* is the bytes of one box of an array in host memory, or in a file of the host
(`pw.devices.host.replica_memory`).
It outlives the epoch. Replicas come from the last incarnation of this host, from a checkpoint that
copied this host's own shards, and from other hosts, which offer theirs so that one lost host loses
nothing. They stay until the controller drops them or their client leaves.

Boxes are *gathered* to restore an array, or to hold an offered replica: those that are here at
once, the others from hosts that are said to have them. If a host refuses or is lost, the next one
with the same box is asked. If there is none, the whole gathering fails.

A host keeps a replica only if the controller offers it, and gives one only to a host that shows the
controller's permit for the array (`pw.core.tenants`). The key to check permits comes with the
directory of hosts. A request may overtake the first directory on another link, and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import AccessRefused, ArrayLost, Error, ErrorReport, HostLost, ProtocolError
from pw.core.ids import CONTROL, CONTROLLER, Address, client_of, store_of
from pw.core.landing import Bulk, Bytes
from pw.core.packing import flat_bytes, pack
from pw.core.sharding import Box, box_bytes, packed_offsets
from pw.core.tenants import is_valid_permit
from pw.devices.host.backend import Read, relative
from pw.devices.host.replica_memory import Keeping, Replica, ReplicaMemory
from pw.devices.host.spill_files import SpillFiles
from pw.devices.host.value import Value

Gathered = Callable[[dict[Box, Bytes] | ErrorReport], None]

EARLY_KEPT = 1000
"""Requests before the first directory that are kept; more are refused."""


@dataclass(slots=True, eq=False)
class Gathering:
    """The boxes of one array on their way into this host's memory."""

    array: int
    dtype: str
    gathered: Gathered
    permits: Mapping[str, bytes]
    contents: dict[Box, Bytes] = field(default_factory=dict)
    """Bytes of the boxes that are here."""
    missing: dict[Box, list[str]] = field(default_factory=dict)
    """Hosts that have not been asked for each missing box, the next one last."""
    why: str = "no host is said to have it"
    """Reason why the last host that was asked did not send the box."""
    over: bool = False
    """True if the gathering has succeeded, failed, or been cancelled."""


@dataclass(slots=True)
class _Fetch:
    """A request to one host."""

    gathering: Gathering
    host: str
    boxes: tuple[Box, ...]
    transfer: int | None = None


class Replicas(Part):
    """Makes, fetches and gives away replicas.

    Args:
        env: the store's.
        bulk: moves boxes that are too large for a message.
        inherited: the replicas that the last incarnation of this host left.
        keep: puts replicas where the next incarnation finds them.
        gone_clients: clients that have left.
        early_kept: how many requests may wait for the first directory.
        files: where replicas go that leave memory; None if they stay there.
        spill_bytes: bytes of replicas that may stay in memory; 0 for any number.
    """

    def __init__(
        self,
        env: Env,
        bulk: Bulk,
        inherited: Iterable[Replica],
        keep: Keeping | None,
        gone_clients: set[int],
        early_kept: int = EARLY_KEPT,
        files: SpillFiles | None = None,
        spill_bytes: int = 0,
    ) -> None:
        self.early_kept = early_kept
        """How many requests may wait for the first directory."""
        self._env = env
        self._bulk = bulk
        self._host = env.address.node
        self._gone_clients = gone_clients
        self._offers: list[Gathering] = []
        """Replicas that this host gathers to hold them."""
        self._fetches: dict[int, _Fetch] = {}
        self._last_request = 0
        self.hosts: frozenset[str] = frozenset()
        self.key = b""
        """The key of this host; empty before the first directory."""
        self.early: list[tuple[Address, msg.FetchReplica]] = []
        """Requests that wait for the first directory."""
        self.memory = ReplicaMemory(env, inherited, keep, files, spill_bytes)

    # --- what is held --------------------------------------------------------------------------------

    def copy(self, copy: msg.ArrayCopy, value: Value | None) -> Read | None:
        """Return the op that copies shards of an array to host memory."""
        if value is None:
            gone = ArrayLost(f"the array {copy.spec.short} is not on this host any more")
            self.memory.skip(copy.array, ErrorReport.of(gone, self._host))
            return None
        boxes = [copy.spec.box(position) for position in copy.positions]
        wanted = [(at, relative(box)) for at, box in zip(copy.positions, boxes, strict=True)]

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                self.memory.skip(copy.array, views)
                return
            if client_of(copy.array) in self._gone_clients:
                return
            copied = dict(zip(boxes, map(flat_bytes, views), strict=True))
            self.memory.hold(copy.array, copied, to_files=copy.to_files)
            self._env.send(CONTROL, msg.Copied(copy.array, tuple(boxes)))

        return Read(value, wanted, copy.spec, copy.devices, read)

    @handles(msg.DropReplicas)
    def _drop(self, sender: Address, message: msg.DropReplicas) -> None:
        if sender.node != CONTROLLER:
            self._env.count("messages_refused")
            return
        self._forget(frozenset(message.arrays).__contains__)

    @handles(msg.WriteReplicas)
    def _write(self, sender: Address, message: msg.WriteReplicas) -> None:
        if sender.node != CONTROLLER:
            self._env.count("messages_refused")
            return
        self.memory.write(message.arrays)

    def drop_client(self, client: int) -> None:
        """Forget the replicas of a client that has left."""
        self._forget(lambda array: client_of(array) == client)

    def _forget(self, meant: Callable[[int], bool]) -> None:
        self.memory.forget(meant)
        for gathering in self._offers:
            if meant(gathering.array):
                self.cancel(gathering)
        self._offers = [gathering for gathering in self._offers if not gathering.over]

    def census(self) -> dict[str, int]:
        """Count the replicas here, and the requests to other hosts."""
        return {
            "replica_arrays": len(self.memory),
            "replica_bytes": self.memory.memory_bytes,
            "replica_file_bytes": self.memory.file_bytes,
            "replicas_fetched": len(self._fetches),
        }

    # --- gathering -----------------------------------------------------------------------------------

    def gather(
        self,
        array: int,
        dtype: str,
        sources: Mapping[Box, Sequence[str]],
        permits: Mapping[str, bytes],
        gathered: Gathered,
    ) -> Gathering:
        """Gather boxes of an array; `gathered` is called once, perhaps before this returns.

        Args:
            array: whose boxes they are.
            dtype: dtype of the array.
            sources: the boxes, each with the hosts to ask if it is not here, in this order.
            permits: permits for these hosts.
            gathered: called with all boxes, or with the error of one of them.
        """
        gathering = Gathering(array, dtype, gathered, permits)
        held = self.memory.of(array)
        for box, hosts in sources.items():
            here = held.get(box)
            if here is not None and here.nbytes == box_bytes(box, dtype):
                gathering.contents[box] = here
            else:
                gathering.missing[box] = [host for host in reversed(hosts) if host != self._host]
        self._ask(gathering, tuple(gathering.missing))
        return gathering

    def cancel(self, gathering: Gathering) -> None:
        """Stop a gathering; its `gathered` is not called."""
        gathering.over = True
        for request in [n for n, fetch in self._fetches.items() if fetch.gathering is gathering]:
            self._give_up(request)

    def _give_up(self, request: int) -> _Fetch:
        fetch = self._fetches.pop(request)
        if fetch.transfer is not None:
            self._bulk.cancel(fetch.transfer)
        return fetch

    def _end(self, gathering: Gathering, result: dict[Box, Bytes] | ErrorReport) -> None:
        self.cancel(gathering)
        gathering.gathered(result)

    def _ask(self, gathering: Gathering, boxes: tuple[Box, ...]) -> None:
        """Ask the next host for each of these boxes; end if all are here, or one has no host left."""
        asked: dict[str, list[Box]] = {}
        for box in boxes:
            hosts = gathering.missing[box]
            while hosts and hosts[-1] not in self.hosts:
                gathering.why = f"host {hosts.pop()} has gone"
            if not hosts:
                part = ", ".join(f"{start}:{stop}" for start, stop in box)
                words = f"no host has a replica of its part [{part}] any more: {gathering.why}"
                # Only the replicas are lost: another host may have some, or the array itself.
                lost = HostLost(words)
                self._end(gathering, ErrorReport.of(lost, self._host))
                return
            asked.setdefault(hosts.pop(), []).append(box)
        for host, wanted in asked.items():
            try:
                self._fetch(gathering, host, tuple(wanted))
            except Error as error:  # this host has no room
                self._end(gathering, ErrorReport.of(error, self._host))
                return
        if not gathering.missing:
            self._end(gathering, gathering.contents)

    def _fetch(self, gathering: Gathering, host: str, boxes: tuple[Box, ...]) -> None:
        self._last_request += 1
        request, fetch = self._last_request, _Fetch(gathering, host, boxes)
        _, total = packed_offsets([box_bytes(box, gathering.dtype) for box in boxes])
        landing = None
        if total > msg.INLINE_BYTES:
            landing = self._bulk.land(total, partial(self._take, request))
            fetch.transfer = landing.transfer
        self._fetches[request] = fetch
        permit = gathering.permits.get(host, b"")
        question = msg.FetchReplica(
            request, gathering.array, gathering.dtype, boxes, landing, permit
        )
        self._env.send(store_of(host), question)

    def _take(self, request: int, buffer: bytes | Bytes) -> None:
        fetch = self._fetches.pop(request, None)
        if fetch is None:
            return
        gathering = fetch.gathering
        sizes = [box_bytes(box, gathering.dtype) for box in fetch.boxes]
        offsets, total = packed_offsets(sizes)
        if len(buffer) != total:
            gathering.why = f"host {fetch.host} sent {len(buffer)} bytes instead of {total}"
            self._ask(gathering, fetch.boxes)
            return
        for box, offset, size in zip(fetch.boxes, offsets, sizes, strict=True):
            gathering.contents[box] = np.frombuffer(buffer, np.uint8, size, offset)
            del gathering.missing[box]
        if not gathering.missing:
            self._end(gathering, gathering.contents)

    @handles(msg.ReplicaData)
    def _data(self, sender: Address, message: msg.ReplicaData) -> None:
        fetch = self._fetches.get(message.request)
        if fetch is not None and fetch.host == sender.node and fetch.transfer is None:
            self._take(message.request, message.data)

    @handles(msg.ReplicaRefused)
    def _refused(self, sender: Address, message: msg.ReplicaRefused) -> None:
        fetch = self._fetches.get(message.request)
        if fetch is not None and fetch.host == sender.node:
            self._next(message.request, message.error.message)

    def _next(self, request: int, why: str) -> None:
        """Ask the next hosts for the boxes that a host has not sent."""
        fetch = self._give_up(request)
        fetch.gathering.why = f"host {fetch.host}: {why}"
        self._ask(fetch.gathering, fetch.boxes)

    # --- answering other hosts -----------------------------------------------------------------------

    @handles(msg.FetchReplica)
    def _serve(self, sender: Address, message: msg.FetchReplica) -> None:
        if not self.key:
            if len(self.early) < self.early_kept:
                self.early.append((sender, message))
            else:
                full = ProtocolError("too many ask before it knows its cluster")
                self._refuse(sender, message, ErrorReport.of(full, self._host))
            return
        if not is_valid_permit(message.permit, self.key, message.array, sender.node):
            unproven = AccessRefused("the controller has not permitted it to have the replica")
            self._env.count("messages_refused")
            self._refuse(sender, message, ErrorReport.of(unproven, self._host))
            return
        held = self.memory.of(message.array)
        sizes = [box_bytes(box, message.dtype) for box in message.boxes]
        data = [held[box] for box in message.boxes if box in held]
        offsets, total = packed_offsets(sizes)
        if [part.nbytes for part in data] != sizes:
            lost = ArrayLost("this host does not have the replica")
            self._refuse(sender, message, ErrorReport.of(lost, self._host))
        elif message.landing is None and total <= msg.INLINE_BYTES:
            self._env.send(sender, msg.ReplicaData(message.request, pack(data)))
        elif message.landing is None or message.landing.size_bytes < total:
            small = ProtocolError("its landing is too small for these boxes")
            self._refuse(sender, message, ErrorReport.of(small, self._host))
        else:

            def pushed(error: Exception | None) -> None:
                if error is not None:
                    self._refuse(sender, message, ErrorReport.of(error, self._host))

            self._bulk.push(message.landing, list(zip(offsets, data, strict=True)), pushed)

    def _refuse(self, sender: Address, message: msg.FetchReplica, error: ErrorReport) -> None:
        self._env.count("replicas_refused")
        self._env.send(sender, msg.ReplicaRefused(message.request, error))

    @handles(msg.OfferReplica)
    def _offered(self, sender: Address, message: msg.OfferReplica) -> None:
        if client_of(message.array) in self._gone_clients:
            return

        def gathered(result: dict[Box, Bytes] | ErrorReport) -> None:
            self._offers = [gathering for gathering in self._offers if not gathering.over]
            if isinstance(result, ErrorReport):
                self._env.log("warning", "cannot take a replica", sender=sender, why=result.message)
                self.memory.skip(message.array, result)
            else:
                self.memory.hold(message.array, result, message.proof)

        sources = dict.fromkeys(message.boxes, (message.host,))
        permits = {message.host: message.permit}
        gathering = self.gather(message.array, message.dtype, sources, permits, gathered)
        if not gathering.over:
            self._offers.append(gathering)

    # --- hosts come and go ---------------------------------------------------------------------------

    def hosts_are(self, nodes: frozenset[str]) -> None:
        """Take the controller's list of hosts."""
        gone, self.hosts = self.hosts - nodes, nodes
        self.memory.has_others = bool(nodes - {self._host})
        for node in sorted(gone):
            self._lose(node, "it has gone")

    def registered(self, key: bytes) -> None:
        """Take the key of this host, and answer those that have asked before."""
        self.key = key
        early, self.early = self.early, []
        for sender, message in early:
            self._serve(sender, message)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        # Its next incarnation may have been announced already, so it is asked as before.
        self._lose(message.node, message.words)

    def _lose(self, node: str, reason: str) -> None:
        self.early = [parked for parked in self.early if parked[0].node != node]
        for request in [n for n, fetch in self._fetches.items() if fetch.host == node]:
            if request in self._fetches:  # one that failed may have ended others
                self._next(request, reason)
