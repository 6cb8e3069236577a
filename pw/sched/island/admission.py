"""Admits runs to the device memory of an island (G5).

Theory of operation. A run is admitted before its first segment is launched: its peak is reserved
beside the memory of live arrays and admitted runs. From then on it never waits for memory. A run
that is picked and does not fit waits. Others that fit may pass it, but only `PATIENCE` times: after
that no other run is admitted before it, so the island drains until it fits. There are three ends.
The run fits. Or it would not even fit alone, and is refused at once. Or nothing in flight on the
island can free memory any more, and the run is refused with the names of those that hold it. (A run
that has the island to itself, arrays included, either fits or never will.) An upload also counts as
in flight: its array may have been deleted meanwhile, and runs that wait for it may free others.
Uploads that begin later do not count, or a client that uploads all the time could keep a run from
its end. A refused run stays at the head of its client's queue until the controller cancels it, so
that later runs that need its results stay behind it.

Runs on several islands. If a run were launched on one island while it waits for memory on another,
two runs could each hold the memory that the other waits for. So such a run is admitted on all of
its islands before it is launched on any, in two rounds. First, each island tells the run's first
island (by name) when the run is at the head of its client's queue there and all its uploads have
ended. Then the islands reserve one after the other, in the order of their names; the last one tells
all others that the run is admitted. An island without a memory limit takes part and lets everything
pass. So runs cannot wait for each other in a circle: docs/internals/memory.md has the proof.

Tenants and slices. Where the rights of tenants come from a file, memory is counted for each tenant, also on
devices without a limit. So is that of each slice with a bound. A run that would take its tenant, or a slice,
beyond what it may have on a device waits in the same way, but holds only runs of that tenant, or on that
slice, back. It is refused when nothing of the tenant, or of the slice's client, can free memory. So is an
upload (`pending_uploads`). While work waits for memory of its tenant or its slice, none is lent to the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, Address, client_of, scheduler_of
from pw.sched.island.memory import Claim, DeviceMemory
from pw.sched.island.memory_report import NoRoom, counted, never_fits, no_room, no_room_for_upload
from pw.sched.island.memory_totals import TenantBounds, Total
from pw.sched.island.pending_uploads import PendingUpload, PendingUploads

PATIENCE = 32
"""Number of admissions that may pass a run that does not fit."""


@dataclass(slots=True, eq=False)
class Reservation:
    """One run's way to admission on this island."""

    run: int
    program: int
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]
    islands: tuple[str, ...]
    segments_left: int
    """Number of segments of the run here that have not ended."""
    heads_missing: int
    """Number of islands on which the run is not at the head of its queue; counted on the first island."""
    has_told: bool = False
    """True if this island has told the first island that the run is at the head of its queue."""
    has_turn: bool = False
    """True if it is this island's turn to reserve for a run on several islands."""
    is_admitted: bool = False
    was_launched: bool = False
    claim: Claim | None = None
    passed: int = 0
    """Number of runs that were admitted while this one waited for memory."""
    tried_at: int = -1
    """Value of `DeviceMemory.frees` when the run last did not fit."""
    spilled_at: int = -1
    """Value of `DeviceMemory.frees` when arrays were last looked for that could leave for it."""
    short: Total | None = None
    """Total in which the run did not fit then: that of a slice, that of its tenant, or that of the island."""
    hopes: frozenset[int] | None = None
    """Uploads in flight when nothing else could free memory for the first time."""


Waiting = TypeVar("Waiting", bound="Reservation | PendingUpload")


@dataclass(eq=False, repr=False)
class Admission(Part):
    """Admits runs to the memory of one island."""

    env: Env
    island: str
    counts_tenants: bool = False
    """True to count what each tenant has, also where devices have no limit."""
    memory: DeviceMemory | None = field(default=None, init=False)
    """Memory of the devices; None where nothing limits it."""
    has_bounds: bool = field(default=False, init=False)
    """True if tenants are counted, or a slice has a bound."""
    _counts_all: bool = field(default=False, init=False)
    """False if devices have no limit, no tenants are counted, and only what lies on slices with a bound is."""
    _spill: tuple[int, bool] = field(default=(0, False), init=False)
    """Bytes in each host for arrays that leave the devices, and whether hosts have files for more."""
    _tenants: TenantBounds = field(default_factory=TenantBounds, init=False)
    pending: PendingUploads = field(default_factory=PendingUploads, init=False)
    """Uploads that wait for room of their tenants and slices."""
    keeps_off: Callable[[msg.ArrayPlaced], bool] = field(default=lambda _: False, init=False)
    """Test of whether an upload stays in host memory (`pw.sched.island.residency`)."""
    _gathering: dict[int, Reservation] = field(default_factory=dict, init=False)
    """Reservations of runs on several islands that have not ended here, by run."""
    _blocked: dict[int, Reservation] = field(default_factory=dict, init=False)
    """Reservations of runs that were picked and did not fit, the oldest first, by run."""
    _refused: set[int] = field(default_factory=set, init=False)
    """Runs that the controller has been asked to cancel."""

    @handles(msg.IslandFormed)
    def _formed(self, sender: Address, message: msg.IslandFormed) -> None:
        self._reset()
        self._spill = message.spill_bytes, message.spill_files
        self._counts_all = message.device_memory_bytes is not None or self.counts_tenants
        if self._counts_all:
            self._count(message.device_memory_bytes)

    def _count(self, limit_bytes: int | None) -> DeviceMemory:
        """Count memory from now on."""
        memory = DeviceMemory(self.island, limit_bytes, self._tenants, *self._spill)
        self.memory = memory
        return memory

    @handles(msg.BoundMemory)
    def _slice_bounded(self, sender: Address, message: msg.BoundMemory) -> None:
        """A slice has a bound: nothing lies there yet; or has it no more."""
        memory = self.memory or (self._count(None) if message.memory_bytes else None)
        if memory is not None:
            memory.bound_slice(message.slice, message.memory_bytes)
            self._note_bounds(memory)

    def _note_bounds(self, memory: DeviceMemory) -> None:
        self.has_bounds = self.counts_tenants or bool(memory.totals.by_slice or self.pending)

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        self._reset()

    def _reset(self) -> None:
        self.memory = None
        self.has_bounds = self.counts_tenants
        self._gathering.clear()
        self._blocked.clear()
        self._refused.clear()
        self.pending.clear()

    @handles(msg.AddClient)
    def _client_added(self, sender: Address, message: msg.AddClient) -> None:
        if self.counts_tenants:
            self._tenants.tenants[message.client] = message.tenant
            self._tenants.bounds_bytes[message.tenant] = message.device_memory_bytes
            if self.memory is not None:
                self.memory.bound(message.tenant, message.device_memory_bytes)

    @handles(msg.ArrayPlaced)
    def _array_placed(self, sender: Address, message: msg.ArrayPlaced) -> None:
        memory = self.memory
        if memory is None or not (self._counts_all or message.slice in memory.totals.by_slice):
            return
        if self.keeps_off(message):
            totals = memory.totals.of(client_of(message.array), message.slice)
            memory.place(message.array, message.devices, message.shard_bytes, totals, off=True)
            return
        if (upload := self.pending.place(memory, message)) is None:
            return
        if message.shard_bytes > (upload.total.bound_bytes or 0):
            self._refuse_upload(memory, upload)

    @handles(msg.UploadEnded)
    def _upload_ended(self, sender: Address, message: msg.UploadEnded) -> None:
        if self.memory is not None:
            self.memory.arrived(message.array)

    @handles(msg.RemoveClient)
    def _client_removed(self, sender: Address, message: msg.RemoveClient) -> None:
        if self.memory is not None:
            self.memory.forget(message.client)
            self._note_bounds(self.memory)
        self._tenants.remove(message.client)

    @handles(msg.MeasureIsland)
    def _measure(self, sender: Address, message: msg.MeasureIsland) -> None:
        memory = self.memory
        limit_bytes = None if memory is None else memory.total.bound_bytes
        devices = () if memory is None else counted(memory)
        self.env.send(
            sender, msg.IslandMeasured(message.request, self.island, limit_bytes, devices)
        )

    def reservation(self, submit: msg.Submit) -> Reservation | None:
        """Return a run's way to admission; None if memory limits it nowhere."""
        if self.memory is None and not submit.islands:
            return None
        reservation = Reservation(
            submit.run,
            submit.program,
            submit.args,
            submit.results,
            submit.islands,
            len(submit.segments),
            len(submit.islands),
        )
        if submit.islands:
            self._gathering[submit.run] = reservation
        return reservation

    def may_be_chosen(self, reservation: Reservation) -> bool:
        """Whether the policy may pick this run, which is at the head of its queue.

        A run on several islands may be picked when all of them have admitted it.
        """
        if not reservation.islands:
            return reservation.run not in self._refused
        if not reservation.has_told:
            reservation.has_told = True
            first = reservation.islands[0]
            if first == self.island:
                self._is_at_head(reservation)
            else:
                self.env.send(scheduler_of(first), msg.RunAtHead(reservation.run))
        return reservation.is_admitted or (reservation.has_turn and self.admit(reservation))

    @handles(msg.RunAtHead)
    def _at_head_elsewhere(self, sender: Address, message: msg.RunAtHead) -> None:
        if (reservation := self._reservation_of(message.run)) is not None:
            self._is_at_head(reservation)

    def _is_at_head(self, reservation: Reservation) -> None:
        """A run is at the head of its queue on one more island."""
        reservation.heads_missing -= 1
        reservation.has_turn = not reservation.heads_missing

    @handles(msg.ReserveRun)
    def _turn_to_reserve(self, sender: Address, message: msg.ReserveRun) -> None:
        if (reservation := self._reservation_of(message.run)) is not None:
            reservation.has_turn = True

    @handles(msg.RunAdmitted)
    def _admitted_elsewhere(self, sender: Address, message: msg.RunAdmitted) -> None:
        if (reservation := self._reservation_of(message.run)) is not None:
            reservation.is_admitted = True

    def _reservation_of(self, run: int) -> Reservation | None:
        reservation = self._gathering.get(run)
        if reservation is None:
            self.env.count("messages_stale")
        return reservation

    def admit(self, reservation: Reservation) -> bool:
        """Reserve a run's memory if it fits now. Return whether the run may be launched."""
        if self.memory is not None and not self._reserve(self.memory, reservation):
            return False
        reservation.has_turn = False
        at = reservation.islands.index(self.island) if reservation.islands else -1
        reservation.is_admitted = at == len(reservation.islands) - 1
        if not reservation.is_admitted:
            self.env.send(
                scheduler_of(reservation.islands[at + 1]), msg.ReserveRun(reservation.run)
            )
            return False
        for island in reservation.islands[:-1]:
            self.env.send(scheduler_of(island), msg.RunAdmitted(reservation.run))
        return True

    def launched_itself(self, reservation: Reservation, claim: Claim) -> None:
        """A client has launched a run under a lease; its memory is reserved."""
        reservation.claim = claim
        reservation.is_admitted = reservation.was_launched = True

    def blocked(self) -> Iterable[Reservation]:
        """Return the runs that were picked and do not fit, the oldest first."""
        return self._blocked.values()

    def _is_behind(self, memory: DeviceMemory, reservation: Reservation) -> bool:
        """Whether a run waits for an upload, or for work of the same total that was passed too often."""
        needs = memory.programs.get(reservation.program)
        slices = () if needs is None else needs.slices
        totals = {*memory.totals.of(client_of(reservation.run))}
        totals.update(total for part in slices for total in part.totals)
        if self.pending and (
            self.pending.are_read(reservation.args) or any(map(self._is_held_for_upload, totals))
        ):
            return True
        for other in self._blocked.values():
            if other.passed >= PATIENCE and other.short in totals:
                return other is not reservation
        return False

    def _is_held_for_upload(self, total: Total) -> bool:
        return any(upload.passed >= PATIENCE for upload in self.pending.of(total))

    def _reserve(self, memory: DeviceMemory, reservation: Reservation) -> bool:
        if reservation.run in self._refused or reservation.tried_at == memory.frees:
            return False
        if (self._blocked or self.has_bounds) and self._is_behind(memory, reservation):
            return False
        claim = memory.reserve(reservation.program, reservation.args, reservation.results)
        reservation.claim = claim
        if claim is None:
            reservation.tried_at = memory.frees
            why = never_fits(memory, reservation.program, reservation.args)
            if why is not None:
                self._refuse(reservation, why)
            else:
                reservation.short = memory.without_room(reservation.program, reservation.args)
                self._blocked.setdefault(reservation.run, reservation)
            return False
        self._blocked.pop(reservation.run, None)
        if self._blocked or (self.has_bounds and self.pending):
            totals = {total for part in claim.parts for total in part.totals}
            for other in self._blocked.values():
                other.passed += other.short in totals
            self.pending.passed_by(claim.client, totals)
        return True

    # --- work that never fits ------------------------------------------------------------------------

    def refuse_if_stuck(self) -> None:
        """Refuse one run if nothing can be launched and nothing in flight can free memory.

        Only one, because its client then drops arrays, and others may wait for that memory.
        """
        memory = self.memory
        if memory is None or not self._blocked or self._refused or memory.claims:
            return
        blocked = [one for one in self._blocked.values() if one.short is memory.total]
        if blocked and not self._has_hope(memory, longest := _longest(blocked)):
            self._refuse(longest, self._no_room(memory, memory.total, longest))

    @property
    def are_bounds_short(self) -> bool:
        """Whether work waits for memory of its tenant, or of its slice."""
        return self.has_bounds and (bool(self.pending) or any(self._short()))

    def is_short(self, client: int) -> bool:
        """Whether work waits for memory of a client's tenant, or of a client's slice."""
        memory = self.memory
        return memory is not None and any(
            memory.totals.count(total, (client,))
            for total in (*self._short(), *self.pending.totals())
        )

    def _short(self) -> Iterator[Total]:
        """Yield the totals of tenants and slices in which a run has no room."""
        memory = self.memory
        shorts = (one.short for one in self._blocked.values())
        return (one for one in shorts if memory and one is not None and one is not memory.total)

    def go_on(self, able: Callable[[], Collection[int]]) -> bool:
        """Go on with work that waits for memory of its tenant or slice; return whether an upload waits no more.

        Refuse what waits where nothing can be freed: one run or upload of each tenant and slice.

        Args:
            able: returns the clients with work that may be launched some time.
        """
        memory = self.memory
        if memory is None or self.pending.try_again(memory):
            return memory is not None
        clients = able()
        refused = [client_of(run) for run in self._refused]
        for total in dict.fromkeys((*self.pending.totals(), *self._short())):
            blocked = [one for one in self._blocked.values() if one.short is total]
            uploads = list(self.pending.of(total))
            waiting: list[Reservation | PendingUpload] = [*uploads, *blocked]
            is_held = any(one.passed >= PATIENCE for one in waiting)
            if memory.totals.count(total, clients) and not is_held:
                continue
            if memory.totals.count(total, refused):
                continue
            if memory.has_claims(total):
                continue
            longest = _longest(waiting)
            if isinstance(longest, Reservation) and longest.tried_at != memory.frees:
                continue  # it may fit now, and has not been tried: the window is closed
            if self._has_hope(memory, longest):
                continue
            if isinstance(longest, PendingUpload):
                self._refuse_upload(memory, longest)
            else:
                self._refuse(longest, self._no_room(memory, total, longest))
        return False

    def may_go(self, reservation: Reservation | None) -> bool:
        """Whether a run at the head of its queue may be admitted, as far as is known."""
        return reservation is None or (
            reservation.is_admitted
            or not (
                reservation.run in self._blocked
                or reservation.run in self._refused
                or self.pending.are_read(reservation.args)
                or (reservation.islands and not reservation.has_turn)
            )
        )

    @staticmethod
    def _has_hope(memory: DeviceMemory, waiting: Reservation | PendingUpload) -> bool:
        """Whether uploads have not ended that were in flight when all else had.

        Where arrays leave the devices, each upload that has ended may leave, however late it began.
        """
        if waiting.hopes is None or memory.tiers.spill_bytes:
            waiting.hopes = frozenset(memory.arriving)
        return not memory.arriving.isdisjoint(waiting.hopes)

    @staticmethod
    def _no_room(memory: DeviceMemory, total: Total, reservation: Reservation) -> NoRoom:
        client = client_of(reservation.run)
        return no_room(memory, total, reservation.program, reservation.args, client)

    def _refuse(self, reservation: Reservation, why: NoRoom) -> None:
        self._blocked.pop(reservation.run, None)
        self._refused.add(reservation.run)
        self.env.count("runs_refused")
        error = ErrorReport.of(why.error)
        self.env.send(CONTROL, msg.RunRefused(reservation.run, error, holders=why.holders))

    def _refuse_upload(self, memory: DeviceMemory, upload: PendingUpload) -> None:
        why = no_room_for_upload(memory, upload)
        self.pending.drop(upload.array)
        upload.count(memory)  # its hosts have it until they have dropped it
        self.env.count("uploads_without_room")
        error = ErrorReport.of(why.error)
        self.env.send(CONTROL, msg.UploadRefused(upload.array, error, why.holders))

    # --- the end of runs -----------------------------------------------------------------------------

    def segments_ended(self, reservation: Reservation, count: int = 1) -> None:
        """Count segments of a run that have ended here, or were cancelled."""
        reservation.segments_left -= count
        if reservation.segments_left:
            return
        self._gathering.pop(reservation.run, None)
        if self.memory is None or reservation.claim is None:
            return
        claim, reservation.claim = reservation.claim, None
        if reservation.was_launched:
            self.memory.end(claim)
        else:
            self.memory.withdraw(claim)

    def withdraw(self, reservation: Reservation, segments: int) -> None:
        """The last segments of a run here were cancelled before they were launched."""
        self._blocked.pop(reservation.run, None)
        self._refused.discard(reservation.run)
        self.segments_ended(reservation, segments)


def _longest(waiting: Sequence[Waiting]) -> Waiting:
    """Return what was passed too often, or else what waits longest."""
    return next((one for one in waiting if one.passed >= PATIENCE), waiting[0])
