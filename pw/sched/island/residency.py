"""Moves arrays between the devices of an island and the memory of its hosts, so that runs fit.

Theory of operation. Hosts with `pw-worker --spill` have room for arrays that leave their devices. When a run
has no room on some devices, `make_room` chooses arrays that lie there, and `Spill` has their hosts copy them,
in launch order. The bytes are free when all hosts have said that the copy is complete (`Spilled`). The run
then fits. A run that reads such an array needs its bytes, too: they are reserved before the run is admitted
(G5), and the launch itself has hosts bring the array back, behind earlier computations. So the scheduler
decides alone what lies where, and hosts follow in one order; `Tier` has the states.

What is counted on the devices is never less than what lies there. Large uploads are not admitted, so they stay
in host memory until a run reads them. Under a lease they are counted on the devices at once: the client
launches what reads them.

Which arrays leave: none that a run in flight or an upload uses, or that shares its bytes. First those that no
queued run reads, and among them those of clients with more bytes for their share than the average; then the one
that is read last. Of equals the least recently used goes first. A lease ends before arrays leave its hosts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import Address, arrays_in, client_of, executor_of
from pw.sched.island.admission import Admission
from pw.sched.island.buffers import Buffer, Tier
from pw.sched.island.launch_states import SegmentTask
from pw.sched.island.lease_states import LaunchLease, LeaseState, LeaseTable
from pw.sched.island.members import Members
from pw.sched.island.memory import DeviceMemory
from pw.sched.island.memory_tiers import host_bytes
from pw.sched.island.memory_totals import Bytes, Total
from pw.sched.island.queues import Queues

NEVER = 1 << 30
"""Place in the queue of the next run that reads an array, if there is none."""


@dataclass(slots=True)
class _Leaving:
    """An array that its hosts copy to their memory."""

    buffer: Buffer
    missing: set[str]
    """Hosts that have not answered."""
    kept: bool = False
    """True if a host could not copy it."""


@dataclass(eq=False, repr=False)
class Residency(Part):
    """Decides which arrays of one island lie in host memory."""

    env: Env
    members: Members
    admission: Admission
    queues: Queues
    leases: LeaseTable
    small_bytes: int = msg.SMALL_UPLOAD_BYTES
    """Size of a shard below which an upload goes to the devices at once."""
    leaving: dict[int, _Leaving] = field(default_factory=dict, init=False)
    """Arrays on their way to host memory, by number."""

    @handles(msg.IslandFormed)
    def _formed(self, sender: Address, message: msg.IslandFormed) -> None:
        self.leaving.clear()

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        self.leaving.clear()

    def keeps_off(self, placed: msg.ArrayPlaced) -> bool:
        """Whether hosts keep an upload in their memory until a run reads it, and it is not counted before."""
        memory = self.admission.memory
        if (
            memory is None
            or not memory.tiers.spill_bytes
            or placed.shard_bytes < max(1, self.small_bytes)
        ):
            return False
        more = host_bytes(placed.devices, placed.shard_bytes)
        return memory.tiers.have_room(more, {}) and not self._lent(more)

    def _lent(self, hosts: Collection[str]) -> list[LaunchLease]:
        """Return the leases of these hosts, of which some launches may not be known."""
        numbered = self.leases.numbered.values()
        return [lease for lease in numbered if not set(hosts).isdisjoint(lease.hosts)]

    def make_room(self) -> bool:
        """Have arrays leave the devices on which runs have no room; return whether some are on their way."""
        memory = self.admission.memory
        if memory is None or not memory.tiers.spill_bytes:
            return False
        for reservation in self.admission.blocked():
            if reservation.spilled_at != memory.frees:
                reservation.spilled_at = memory.frees
                total = reservation.short or memory.total
                short = memory.shortage(total, reservation.program, reservation.args)
                self._make_room_for(memory, total, short, set(arrays_in(reservation.args)))
        for upload in self.admission.pending:
            if upload.spilled_at != memory.frees:
                upload.spilled_at = memory.frees
                short = memory.shortage_of_upload(upload.total, upload.buffer)
                self._make_room_for(memory, upload.total, short, {upload.array})
        leases = self.leases.numbered.values()
        is_closing = any(lease.state is LeaseState.CLOSING for lease in leases)
        return bool(self.leaving or self.leases.unwanted) or is_closing

    def _make_room_for(
        self, memory: DeviceMemory, total: Total, short: Bytes, read: set[int]
    ) -> None:
        """Have arrays leave until a total lacks no bytes; none of those that are read."""
        for one in self.leaving.values():
            if total in one.buffer.on.totals:
                short[one.buffer.on.devices] -= one.buffer.shard_bytes
        if (short <= 0).all():
            return
        chosen: list[int] = []
        leaving: Counter[str] = Counter()
        for array, buffer in self.candidates(memory, read):
            if total not in buffer.on.totals or not (short[buffer.on.devices] > 0).any():
                continue
            more = host_bytes(buffer.on.addresses, buffer.shard_bytes)
            if not memory.tiers.have_room(more, leaving):
                continue
            if lent := self._lent(more):
                self._unlend(lent)
                continue
            chosen.append(array)
            leaving += more
            short[buffer.on.devices] -= buffer.shard_bytes
            if (short <= 0).all():
                self._spill(memory, chosen)
                return

    def candidates(self, memory: DeviceMemory, read: set[int]) -> list[tuple[int, Buffer]]:
        """Return the arrays that may leave, in the order in which they do."""
        next_use = self.next_uses()
        above = self._above_their_share(memory)
        ranked: list[tuple[tuple[int, bool, int], int, Buffer]] = []
        for array, buffer in memory.buffers.items():
            client = client_of(array)
            if buffer.may_leave and array not in read and array not in memory.arriving:
                place = next_use.get(array, NEVER)
                ranked.append(((-place, client not in above, buffer.used), array, buffer))
        ranked.sort(key=lambda one: one[0])
        return [(array, buffer) for _, array, buffer in ranked]

    def _unlend(self, leases: Iterable[LaunchLease]) -> None:
        """Have leases end: their launches may read arrays, and are not known yet."""
        unwanted = self.leases.unwanted
        unwanted += [one for one in leases if one not in unwanted]

    def next_uses(self) -> dict[int, int]:
        """Return the place in its client's queue of the first run that reads each array."""
        places: dict[int, int] = {}
        for queue in self.queues.busy.values():
            for place, task in enumerate(queue.tasks):
                if isinstance(task, SegmentTask):
                    for array in arrays_in(task.here.arguments.args):
                        places[array] = min(place, places.get(array, place))
        return places

    def _above_their_share(self, memory: DeviceMemory) -> set[int]:
        """Return the clients whose arrays take more bytes for their share than the average."""
        bytes_of: defaultdict[int, float] = defaultdict(float)
        for array, buffer in memory.buffers.items():
            if buffer.tier is Tier.DEVICE:
                queue = self.queues.clients.get(client_of(array))
                share = 1.0 if queue is None else queue.stake.share
                bytes_of[client_of(array)] += buffer.shard_bytes * len(buffer.on.devices) / share
        mean = sum(bytes_of.values()) / max(1, len(bytes_of))
        return {client for client, size_bytes in bytes_of.items() if size_bytes > mean}

    def _spill(self, memory: DeviceMemory, arrays: list[int]) -> None:
        of_hosts: defaultdict[str, list[int]] = defaultdict(list)
        for array in arrays:
            buffer = memory.buffers[array]
            hosts = {device.host for device in buffer.on.addresses}
            self.leaving[array] = _Leaving(buffer, hosts)
            memory.tiers.spill(buffer)
            for host in sorted(hosts):
                of_hosts[host].append(array)
        for host, own in of_hosts.items():
            number = self.members.next_number(host)
            self.env.send(executor_of(host), msg.Spill(self.members.epoch, number, tuple(own)))
        self.env.count("arrays_spilled", len(arrays))

    @handles(msg.Spilled)
    def _spilled(self, sender: Address, message: msg.Spilled) -> None:
        memory = self.admission.memory
        if memory is None or not self.members.is_current(message.epoch, sender):
            return
        for array in (*message.arrays, *message.kept):
            leaving = self.leaving.get(array)
            if leaving is None or sender.node not in leaving.missing:
                self.env.count("messages_stale")
                continue
            leaving.kept |= array in message.kept
            leaving.missing.remove(sender.node)
            if not leaving.missing:
                del self.leaving[array]
                memory.tiers.spilled(leaving.buffer, kept=leaving.kept)
