"""The controller: what clients, hosts and schedulers tell it, and the order in which that is dealt with.

Each concern has a part of its own, which this actor owns and calls: who is let in (`sessions`), programs
(`registry`), runs (`runs`, `cancelling`), arrays (`uploads`, `saves`), what was lost with a host
(`rebuild`, `copies`), why it does not go on (`why`). What the parts know together is in the `ledger`.

It forwards a run to every island the run touches at once, without waiting for anything but the first
compilation of a program and never for data: the control plane runs ahead of the data plane. It holds no
buffers and opens no bulk channel; one entry stands for a logical array, whatever its shards.

What a client sends is handled in order. While a program is being installed, runs of it, and all that
the client sent after them, wait in the client's backlog, so that compile errors poison a run on all
its hosts alike and deletes never overtake runs. The stream is held in the same way while something that the
client had on a lost host, or under an earlier controller (`pw.sched.control.recovery.resume`), is being rebuilt
(`pw.sched.control.recovery.rebuild`), and before a checkpoint that comes while earlier ones have not ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pw.core.actor import Actor, Env, handles
from pw.core.errors import (
    ArrayDeleted,
    Error,
    ErrorReport,
    InsufficientDevices,
    ProtocolError,
)
from pw.core.ids import CONTROLLER, RESOURCES, Address, client_of, scheduler_of
from pw.core.messages import (
    AllocateSlice,
    Answered,
    ArraysLost,
    Attach,
    Cancel,
    CancelRuns,
    Checkpoint,
    CreateArray,
    Delete,
    Directory,
    DrainHost,
    Draining,
    Evicted,
    Explain,
    FilesCommitted,
    FileWritten,
    GetStats,
    GetStatus,
    Holdings,
    HoldsNoMore,
    HostEmptied,
    HostReport,
    InputGone,
    Inquire,
    IslandFormed,
    IslandLost,
    IslandReport,
    IslandStatus,
    LinkLost,
    PeerLost,
    ProgramInstalled,
    RegisterProgram,
    ReleaseProgram,
    ReleaseSlice,
    Resumed,
    Run,
    RunRefused,
    RunStarted,
    SaveArrays,
    SegmentDone,
    SliceBound,
    SliceRefused,
    Stalled,
    Stats,
    Status,
    Uploaded,
    WaitingHost,
)
from pw.core.sharding import Binding
from pw.core.ticker import Ticker
from pw.sched.control.cancelling import LookAtDeadlines, RunEnder
from pw.sched.control.checkpoints.replicas import Copies, OfferAgain
from pw.sched.control.checkpoints.saves import Saves
from pw.sched.control.clients import Client, Held
from pw.sched.control.explain.why import Explainer, Overdue
from pw.sched.control.ledger import Ledger, drop
from pw.sched.control.recovery.rebuild import GiveUp, LookForCopies, Proceed, Rebuilder
from pw.sched.control.recovery.resume import Resumption
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.runs import CREDITS_AT_ONCE, GiveBack, Runs
from pw.sched.control.sessions import Sessions
from pw.sched.control.uploads import Uploads

RECOVERY_S = 60.0
"""How long what needs a lost island waits for it, before it fails."""

EMPTIED_S = 0.1
"""How often to look whether a drained host is empty."""

RESUME_S = 90.0
"""How long hosts keep what they have of clients of an earlier controller that have not come back."""


@dataclass(frozen=True, slots=True)
class _Disclaim:
    """Note to oneself: clients of an earlier controller have come back by now."""


@dataclass(frozen=True, slots=True)
class _LookAtDrained:
    """Note to oneself: drained hosts may be empty by now."""


@dataclass(slots=True)
class ControllerVersions:
    """What this process runs, for status reports."""

    pw: str
    jax: str


class Controller(Actor):
    """Admits clients and turns their runs into gangs on islands."""

    def __init__(
        self,
        env: Env,
        secret: bytes,
        versions: ControllerVersions,
        policy: str,
        spawn_scheduler: Callable[[str], None],
        island_status: Callable[[], tuple[IslandStatus, ...]],
        counters: Callable[[], dict[str, int]],
        recovery_s: float = RECOVERY_S,
        heard_s: Callable[[str], float | None] = lambda node: None,
        first_client: int = 1,
        waiting_hosts: Callable[[], tuple[WaitingHost, ...]] = tuple,
        credits_at_once: int = CREDITS_AT_ONCE,
    ) -> None:
        super().__init__(env)
        self._versions = versions
        self._policy = policy
        self._spawn_scheduler = spawn_scheduler
        self._island_status = island_status
        self._waiting_hosts = waiting_hosts
        self._counters = counters
        ledger = self.ledger = Ledger()
        self._clients = ledger.clients
        self._bindings = ledger.bindings
        sessions = self._sessions = Sessions(env, ledger, secret, first_client)
        self._programs = ProgramRegistry(env, ledger)
        self._runs = Runs(env, ledger, credits_at_once)
        self._copies = Copies(env, ledger, recovery_s, sessions.is_known)
        self._rebuilder = Rebuilder(
            env,
            ledger,
            recovery_s,
            self._programs.lower,
            self._runs.credit,
            self._go_on,
            self._copies,
        )
        self._explainer = Explainer(env, ledger, island_status, heard_s)
        self._ender = RunEnder(
            env, ledger, self._rebuilder, self._runs.refuse, self._explainer.explain_run
        )
        self._uploads = Uploads(
            env,
            ledger,
            self._rebuilder,
            self._copies,
            self._ender,
            self._go_on,
            sessions.is_known,
        )
        self._saves = Saves(env, ledger)
        self._disclaimer = Ticker(env, RESUME_S, _Disclaim())
        self._drains = Ticker(env, EMPTIED_S, _LookAtDrained())

    # --- clients come and go -------------------------------------------------------------------------

    @handles(Attach)
    def _attach(self, sender: Address, message: Attach) -> None:
        if not 0 < message.share < math.inf:
            self.env.send(sender, Evicted(f"a share must be positive, not {message.share}"))
            return
        if (former := self._sessions.at(sender.node)) is not None:
            self._remove(former, "attached again")
        client = self._sessions.attach(sender, message, self._copies.unclaimed)
        if client is not None and message.resume:
            client.resuming = Resumption(self._rebuilder.expect())

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        client = self._sessions.at(message.node)
        if client is not None:
            self._remove(client, message.reason)
        else:
            self._uploads.host_lost(message.node)
            self._copies.host_lost(message.node)
            self._saves.host_lost(message.node)

    def _remove(self, client: Client, reason: str) -> None:
        """Release all that the client owned, on every host."""
        self.env.log(
            "info",
            "client left",
            client=client.number,
            reason=reason,
            arrays=len(client.arrays),
            runs=client.in_flight,
        )
        self._copies.client_left(client)
        self._saves.client_left(client)
        self._sessions.leave(client, reason)
        for number in client.slices | client.borrowed:
            self._bindings.pop(number, None)
            self.env.send(RESOURCES, ReleaseSlice(number))
        self._runs.client_left(client)

    @handles(Directory)
    def _directory_changed(self, sender: Address, message: Directory) -> None:
        self._copies.hosts_are(message)
        self._saves.hosts_are(message)
        self._sessions.hosts_are(message)

    # --- slices --------------------------------------------------------------------------------------

    @handles(AllocateSlice)
    def _allocate(self, sender: Address, message: AllocateSlice) -> None:
        client = self._sessions.of(sender)
        if client is None:
            return
        if client_of(message.slice) != client.number or message.slice in client.requests:
            self._refuse_slice(client, message, ProtocolError("bad slice number"))
        elif message.devices < 1:
            words = f"a slice has at least 1 device, not {message.devices}"
            self._refuse_slice(client, message, InsufficientDevices(words))
        else:
            client.slices.add(message.slice)
            anew = msgspec.structs.replace(message, resumed=False, formerly="")
            client.requests[message.slice] = anew
            if client.resuming is not None:
                client.unbound[message.slice] = client.resuming.loss
            self.env.send(RESOURCES, message)

    def _refuse_slice(self, client: Client, message: AllocateSlice, error: Error) -> None:
        self.env.send(client.address, SliceRefused(message.slice, ErrorReport.of(error)))

    @handles(SliceBound)
    def _bound(self, sender: Address, message: SliceBound) -> None:
        client = self._clients.get(client_of(message.slice))
        if client is None or not client.has_slice(message.slice):
            self.env.send(RESOURCES, ReleaseSlice(message.slice))
            return
        self._bindings[message.slice] = Binding(message.slice, message.island, message.devices)
        self.env.send(client.address, message)
        client.bounds[message.slice] += 1
        client.unbound.pop(message.slice, None)
        self._programs.slice_bound(client, message.slice)
        self._rebuilder.proceed(client)

    @handles(SliceRefused)
    def _slice_refused(self, sender: Address, message: SliceRefused) -> None:
        client = self._clients.get(client_of(message.slice))
        if client is not None:
            client.slices.discard(message.slice)
            client.borrowed.discard(message.slice)
            client.requests.pop(message.slice, None)
            client.bounds.pop(message.slice, None)
            self._bindings.pop(message.slice, None)
            self.env.send(client.address, message)
            if message.slice in client.unbound:
                self._rebuilder.slice_refused(client, message.slice, message.error)

    def _release_slice(self, client: Client, number: int) -> None:
        if number in client.slices:
            client.slices.discard(number)
            self._unbind(client, number)

    def _return_slices(self, client: Client) -> None:
        """What was borrowed to rebuild something goes back, if nothing lies or arrives there any more."""
        arrays = (*client.arrays.values(), *client.doomed.values())
        used = {array.spec.placement.slice for array in arrays}
        for number in sorted(client.borrowed - used):
            client.borrowed.discard(number)
            self._unbind(client, number)

    def _unbind(self, client: Client, number: int) -> None:
        client.unbound.pop(number, None)
        client.bounds.pop(number, None)
        client.forget_request(number)
        self._bindings.pop(number, None)
        self.env.send(RESOURCES, ReleaseSlice(number))
        self.env.send(client.address, ReleaseSlice(number))

    # --- programs ------------------------------------------------------------------------------------

    @handles(RegisterProgram)
    def _register(self, sender: Address, message: RegisterProgram) -> None:
        client = self._sessions.of(sender)
        if client is not None:
            self._programs.register(client, message)

    @handles(ProgramInstalled)
    def _installed(self, sender: Address, message: ProgramInstalled) -> None:
        client = self._programs.installed(message)
        if client is None:
            return
        if client.recovering:
            self._rebuilder.proceed(client)
        else:
            self._go_on(client)

    # --- the client's stream -------------------------------------------------------------------------

    @handles(
        Run, Delete, CreateArray, ReleaseProgram, ReleaseSlice, Checkpoint, SaveArrays, Inquire
    )
    def _in_order(self, sender: Address, message: Held) -> None:
        client = self._sessions.of(sender)
        if client is None:
            return
        if client.resuming is not None and isinstance(message, Run):
            client.resuming.run(client, message)
        elif client.resuming is not None and isinstance(message, CreateArray):
            client.resuming.create(client, message)
        elif client.backlog or self._must_wait(client, message):
            client.backlog.append(message)
        else:
            self._handle(client, message)

    @handles(Resumed)
    def _resumed(self, sender: Address, message: Resumed) -> None:
        """A client of an earlier controller has told what it has: from here on it is like any other."""
        client = self._sessions.of(sender)
        if client is None or client.resuming is None:
            self.env.count("messages_refused")
            return
        resuming, client.resuming = client.resuming, None
        resuming.finish(client, message)
        fields = {"arrays": len(message.held), "runs": len(client.lineage)}
        self.env.log("info", "client is back", client=client.number, **fields)
        self._rebuilder.resumed(client, resuming.loss)

    def _must_wait(self, client: Client, message: Held) -> bool:
        """Whether a message, and all behind it, has to wait for what it needs."""
        if isinstance(message, SaveArrays) and self._saves.must_wait(message):
            return True
        return client.must_wait(message)

    def _go_on(self, client: Client) -> None:
        while client.backlog and not self._must_wait(client, client.backlog[0]):
            self._handle(client, client.backlog.popleft())

    def _handle(self, client: Client, message: Held) -> None:
        if isinstance(message, Run):
            self._runs.start(client, message)
        elif isinstance(message, Delete):
            drop(self.env, self.ledger, client, client.delete(message.arrays))
        elif isinstance(message, CreateArray):
            self._uploads.create(client, message)
        elif isinstance(message, Checkpoint):
            self._copies.checkpoint(client, message)
        elif isinstance(message, SaveArrays):
            self._saves.begin(client, message)
        elif isinstance(message, Inquire):
            self._inquire(client, message)
        elif isinstance(message, ReleaseProgram):
            self._programs.release(client, message.program)
        else:
            self._release_slice(client, message.slice)

    def _inquire(self, client: Client, message: Inquire) -> None:
        """Nothing is lost any more, so all arrays are where they should be, if they are."""
        error = None
        if any(number not in client.arrays for number in message.arrays):
            error = ErrorReport.of(
                ArrayDeleted(
                    "the array was deleted, or donated to a computation, before its value was asked for; keep "
                    "a copy, copy.copy(x), or do not donate it"
                )
            )
        self.env.send(client.address, Answered(message.request, error))

    # --- runs ----------------------------------------------------------------------------------------

    @handles(SegmentDone)
    def _segment_done(self, sender: Address, message: SegmentDone) -> None:
        state = self._runs.segment_done(message)
        if state is None:
            return
        self._ender.ended(message.run, state)
        if state.lost is not None:
            self._rebuilder.run_lost(message.run, state.lost)
        else:
            self._runs.end(message.run)

    @handles(RunRefused)
    def _run_refused(self, sender: Address, message: RunRefused) -> None:
        self._ender.refused(message.run, message.results, message.error)

    @handles(RunStarted)
    def _run_started(self, sender: Address, message: RunStarted) -> None:
        self._ender.started(message.run)

    @handles(LookAtDeadlines)
    def _look_at_deadlines(self, sender: Address, note: LookAtDeadlines) -> None:
        self._ender.look_at_deadlines()

    @handles(Cancel)
    def _cancel(self, sender: Address, message: Cancel) -> None:
        client = self._sessions.of(sender)
        if client is not None:
            self._ender.cancel(client, message.arrays)

    @handles(CancelRuns)
    def _cancel_runs(self, sender: Address, message: CancelRuns) -> None:
        """Of any client: it is the operator's."""
        if self._sessions.of(sender) is not None:
            error = self._ender.cancel_runs(message)
            report = None if error is None else ErrorReport.of(error)
            self.env.send(sender, Answered(message.request, report))

    @handles(GiveBack)
    def _give_back(self, sender: Address, note: GiveBack) -> None:
        self._runs.give_back()

    def turn_ended(self) -> None:
        """Go on behind checkpoints that have ended, forget what nobody needs, and give credits back."""
        for client in self._clients.values():
            self._go_on(client)
            while client.lineage.has_unneeded:
                self._rebuilder.forget(client)
                self._go_on(client)  # a checkpoint may have ended with what it was still to copy
            if client.borrowed and not client.recovering:
                self._return_slices(client)
        self._runs.turn_ended()

    # --- arrays --------------------------------------------------------------------------------------

    @handles(Uploaded)
    def _uploaded(self, sender: Address, message: Uploaded) -> None:
        if sender.node in self._sessions:
            self.env.count("messages_stale")
        else:
            self._uploads.uploaded(sender.node, message)

    @handles(InputGone)
    def _input_gone(self, sender: Address, message: InputGone) -> None:
        client = self._sessions.of(sender)
        if client is not None:
            self._uploads.input_gone(client, message)

    @handles(Holdings)
    def _holds(self, sender: Address, message: Holdings) -> None:
        if sender.node in self._sessions:
            self.env.count("messages_refused")
        else:
            self._copies.holds(sender.node, message)
            if self._copies.unclaimed:
                self._disclaimer.start()

    @handles(HoldsNoMore)
    def _holds_no_more(self, sender: Address, message: HoldsNoMore) -> None:
        if sender.node in self._sessions:
            self.env.count("messages_refused")
        else:
            self._copies.is_back(sender.node)

    @handles(_Disclaim)
    def _disclaim(self, sender: Address, note: _Disclaim) -> None:
        self._disclaimer.ticked(more=False)
        self._copies.disclaim()

    @handles(FileWritten, FilesCommitted)
    def _of_files(self, sender: Address, message: FileWritten | FilesCommitted) -> None:
        if sender.node in self._sessions:
            self.env.count("messages_refused")
        elif isinstance(message, FileWritten):
            self._saves.written(sender.node, message)
        else:
            self._saves.committed(message)

    @handles(ArraysLost)
    def _arrays_lost(self, sender: Address, message: ArraysLost) -> None:
        for array in message.arrays:
            client = self._clients.get(client_of(array))
            if client is None or sender.node in self._sessions:
                self.env.count("messages_stale")
            else:
                self._rebuilder.array_lost(client, array)

    @handles(LinkLost)
    def _link_lost(self, sender: Address, message: LinkLost) -> None:
        client = self._sessions.of(sender)
        if client is not None:
            self._rebuilder.link_lost(client, message.host)

    # --- islands and hosts ---------------------------------------------------------------------------

    @handles(IslandFormed)
    def _island_formed(self, sender: Address, message: IslandFormed) -> None:
        self.ledger.islands.add(message.island)
        if message.device_memory_bytes is not None:
            self.ledger.limited.add(message.island)
        if message.island not in self.ledger.schedulers:
            self.ledger.schedulers[message.island] = None
            self._spawn_scheduler(message.island)
            self._sessions.scheduler_added(message.island)
        self.env.send(scheduler_of(message.island), message)
        self._saves.island_formed(message)

    @handles(IslandLost)
    def _island_lost(self, sender: Address, message: IslandLost) -> None:
        """Hold the clients that need it until it is back; the rest of everybody's work goes on."""
        self.ledger.islands.discard(message.island)
        self.ledger.limited.discard(message.island)
        self.env.send(scheduler_of(message.island), message)
        self._rebuilder.island_lost(message)
        self._saves.island_lost(message.island)

    @handles(Proceed)
    def _proceed(self, sender: Address, note: Proceed) -> None:
        client = self._clients.get(note.client)
        if client is not None:
            self._rebuilder.proceed(client)

    @handles(LookForCopies)
    def _look_for_copies(self, sender: Address, note: LookForCopies) -> None:
        self._rebuilder.look_for_copies()

    @handles(OfferAgain)
    def _offer_again(self, sender: Address, note: OfferAgain) -> None:
        self._copies.offer_again()

    @handles(GiveUp)
    def _give_up(self, sender: Address, note: GiveUp) -> None:
        self._rebuilder.give_up(note)

    @handles(DrainHost)
    def _drain_host(self, sender: Address, message: DrainHost) -> None:
        if self._sessions.of(sender) is not None:
            self.env.send(RESOURCES, DrainHost(message.request, message.node, sender.node))

    @handles(Draining)
    def _draining(self, sender: Address, message: Draining) -> None:
        self._copies.draining = set(message.nodes)
        if message.nodes:
            self._drains.start()

    @handles(_LookAtDrained)
    def _look_at_drained(self, sender: Address, note: _LookAtDrained) -> None:
        self._drains.ticked(more=bool(self._copies.draining))
        for node in sorted(self._copies.draining):
            if self._copies.emptied(node):
                self.env.send(RESOURCES, HostEmptied(node))

    # --- reports -------------------------------------------------------------------------------------

    @handles(GetStatus)
    def _status(self, sender: Address, message: GetStatus) -> None:
        self.env.send(
            sender,
            Status(
                message.request,
                self._versions.pw,
                self._versions.jax,
                self._policy,
                self._island_status(),
                self._sessions.status(),
                self._ender.status(),
                self._waiting_hosts(),
            ),
        )

    @handles(Explain)
    def _explain(self, sender: Address, message: Explain) -> None:
        if self._sessions.of(sender) is not None:
            self._explainer.answer(sender, message)

    @handles(IslandReport)
    def _island_reported(self, sender: Address, message: IslandReport) -> None:
        self._explainer.island_reported(message)

    @handles(HostReport)
    def _host_reported(self, sender: Address, message: HostReport) -> None:
        self._explainer.host_reported(sender.node, message)

    @handles(Overdue)
    def _overdue(self, sender: Address, note: Overdue) -> None:
        self._explainer.overdue(note)

    @handles(Stalled)
    def _stalled(self, sender: Address, message: Stalled) -> None:
        self._explainer.log()

    @handles(GetStats)
    def _stats(self, sender: Address, message: GetStats) -> None:
        counters = self._counters()
        counters["live_arrays"] = sum(len(client.arrays) for client in self._clients.values())
        counters["programs"] = sum(len(client.programs) for client in self._clients.values())
        counters["runs_in_flight"] = len(self.ledger.runs)
        self.env.send(sender, Stats(message.request, CONTROLLER, counters))
