"""Moves arrays between the devices of an island, the memory of its hosts and their files, so that runs fit.

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

Hosts with `pw-worker --spill-files` write arrays from their memory to files: in the same order when others
must leave the devices and host memory has no room for them, and those that no run has read for `IDLE_S`. The
bytes in host memory are free when all hosts have answered. A run that reads such an array brings it back in the
same way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
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

IDLE_S = 150.0
"""Time, in seconds, after which an array in host memory that no run reads goes to files; at most twice that."""


@dataclass(slots=True)
class _Leaving:
    """An array that its hosts copy to their memory, or write from there to files."""

    buffer: Buffer
    missing: set[str]
    """Hosts that have not answered."""
    kept: bool = False
    """True if a host could not copy it."""


@dataclass(eq=False, repr=False)
class Residency(Part):
    """Decides which arrays of one island lie in host memory, and which in files."""

    env: Env
    members: Members
    admission: Admission
    queues: Queues
    leases: LeaseTable
    small_bytes: int = msg.SMALL_UPLOAD_BYTES
    """Size of a shard below which an upload goes to the devices at once."""
    idle_s: float = IDLE_S
    """Time between two looks for arrays in host memory that no run has read since, in seconds."""
    leaving: dict[int, _Leaving] = field(default_factory=dict, init=False)
    """Arrays on their way to host memory or to files, by number."""

    def __post_init__(self) -> None:
        self._idle = Ticker(self.env, IDLE_S, self._write_idle)

    @handles(msg.IslandFormed)
    def _formed(self, sender: Address, message: msg.IslandFormed) -> None:
        self.leaving.clear()
        if message.spill_bytes and message.device_memory_bytes is None:
            why = "the memory of its devices has no bound (pw-worker --device-memory)"
            self.env.log(
                "warning", "arrays never leave the devices", island=message.island, why=why
            )

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
        keeps = memory.tiers.have_room(more, {}) and not self._lent(more)
        if keeps:
            self._watch_idle(memory)
        return keeps

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
            if total in one.buffer.on.totals and one.buffer.tier is Tier.LEAVING:
                short[one.buffer.on.devices] -= one.buffer.shard_bytes
        if (short <= 0).all():
            return
        chosen: list[int] = []
        leaving: Counter[str] = Counter()
        for array, buffer in self.candidates(memory, read):
            if total not in buffer.on.totals or not (short[buffer.on.devices] > 0).any():
                continue
            more = host_bytes(buffer.on.addresses, buffer.shard_bytes)
            if not memory.tiers.can_take(more, leaving):
                continue
            if lent := self._lent(more):
                self._unlend(lent)
                continue
            chosen.append(array)
            leaving += more
            short[buffer.on.devices] -= buffer.shard_bytes
            if (short <= 0).all():
                self._leave(memory, chosen)
                return

    def _leave(self, memory: DeviceMemory, arrays: list[int]) -> None:
        """Have arrays leave the devices, and others go to files first where host memory is full."""
        going: list[int] = []
        leaving: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for array in arrays:
            buffer = memory.buffers[array]
            more = host_bytes(buffer.on.addresses, buffer.shard_bytes)
            if memory.tiers.have_room(more, leaving):
                going.append(array)
                leaving += more
            else:
                waiting += more
        self._spill(memory, going)
        if lacking := memory.tiers.lacking(waiting):
            chosen: list[int] = []
            for array, buffer in self.candidates_for_files(memory):
                frees = host_bytes(buffer.on.addresses, buffer.shard_bytes)
                if not lacking.keys().isdisjoint(frees):
                    chosen.append(array)
                    lacking -= frees
            self._write(memory, chosen)

    def candidates(self, memory: DeviceMemory, read: set[int]) -> list[tuple[int, Buffer]]:
        """Return the arrays that may leave the devices, in the order in which they do."""
        return self._ranked(memory, lambda array, buffer: buffer.may_leave and array not in read)

    def candidates_for_files(self, memory: DeviceMemory) -> list[tuple[int, Buffer]]:
        """Return the arrays that may leave host memory, in the order in which they do."""
        return self._ranked(memory, lambda _, buffer: buffer.tier is Tier.HOST)

    def _ranked(
        self, memory: DeviceMemory, may_go: Callable[[int, Buffer], bool]
    ) -> list[tuple[int, Buffer]]:
        next_use = self.next_uses()
        above = self._above_their_share(memory)
        ranked: list[tuple[tuple[int, bool, int], int, Buffer]] = []
        for array, buffer in memory.buffers.items():
            client = client_of(array)
            if may_go(array, buffer) and array not in memory.arriving:
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

    def _watch_idle(self, memory: DeviceMemory) -> None:
        """Look for idle arrays in a while."""
        if memory.tiers.has_files:
            self._idle.start(self.idle_s)

    def _write_idle(self) -> bool:
        """Have arrays go to files that no run has read since the last call."""
        memory = self.admission.memory
        if memory is None:
            return False
        queued = self.next_uses()
        idle: list[int] = []
        for array, buffer in self.candidates_for_files(memory):
            if buffer.rested == buffer.used and array not in queued:
                idle.append(array)
            buffer.rested = buffer.used
        self._write(memory, idle)
        if memory.tiers.off:
            self._watch_idle(memory)
        return False

    def _spill(self, memory: DeviceMemory, arrays: list[int]) -> None:
        for array in arrays:
            memory.tiers.spill(memory.buffers[array])
        self._move(memory, arrays, to_files=False)
        self.env.count("arrays_spilled", len(arrays))

    def _write(self, memory: DeviceMemory, arrays: list[int]) -> None:
        for array in arrays:
            memory.tiers.write(memory.buffers[array])
        self._move(memory, arrays, to_files=True)
        self.env.count("arrays_written_to_files", len(arrays))

    def _move(self, memory: DeviceMemory, arrays: list[int], *, to_files: bool) -> None:
        """Have hosts move arrays to the next tier."""
        of_hosts: defaultdict[str, list[int]] = defaultdict(list)
        for array in arrays:
            buffer = memory.buffers[array]
            hosts = {device.host for device in buffer.on.addresses}
            self.leaving[array] = _Leaving(buffer, hosts)
            for host in sorted(hosts):
                of_hosts[host].append(array)
        for host, own in of_hosts.items():
            number = self.members.next_number(host)
            order = msg.Spill(self.members.epoch, number, tuple(own), to_files)
            self.env.send(executor_of(host), order)

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
                if leaving.buffer.tier is Tier.WRITING:
                    memory.tiers.written(leaving.buffer, kept=leaving.kept)
                else:
                    memory.tiers.spilled(leaving.buffer, kept=leaving.kept)
                    self._watch_idle(memory)
