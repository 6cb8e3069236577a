"""The controller: clients, what they own, and the way from a client's `Run` to the gang schedulers.

It forwards a run to every island the run touches at once, without waiting for anything but the first
compilation of a program and never for data: the control plane runs ahead of the data plane. It holds no
buffers and opens no bulk channel; one entry stands for a logical array, whatever its shards.

What a client sends is handled in order. While a program is being installed, runs of it, and all that
the client sent after them, wait in the client's backlog, so that compile errors poison a run on all
its hosts alike and deletes never overtake runs. The stream is held in the same way while something that the
client had on a lost host, or under an earlier controller (`pw.sched.resume`), is being rebuilt
(`pw.sched.rebuild`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from pw.core.actor import Actor, Env, handles
from pw.core.errors import (
    INFRASTRUCTURE,
    ArrayDeleted,
    ArrayLost,
    Error,
    ErrorReport,
    InsufficientDevices,
    NotOwner,
    ProtocolError,
)
from pw.core.ids import CONTROLLER, RESOURCES, Address, client_of, scheduler_of, store_of
from pw.core.messages import (
    AddClient,
    AllocateSlice,
    Answered,
    ArraysLost,
    Artifact,
    Attach,
    Attached,
    Cancel,
    CancelRuns,
    Checkpoint,
    ClientStatus,
    CreateArray,
    Delete,
    Directory,
    DrainHost,
    Draining,
    DropUploads,
    Evicted,
    Explain,
    FilesCommitted,
    FileWritten,
    GetStats,
    GetStatus,
    Holdings,
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
    RemoveClient,
    Resumed,
    Run,
    RunFailed,
    RunRefused,
    RunsSettled,
    RunStarted,
    SaveArrays,
    SegmentDone,
    SliceBound,
    SliceRefused,
    Stalled,
    Stats,
    Status,
    UninstallProgram,
    UploadAgain,
    Uploaded,
    UploadEnded,
    WaitingHost,
)
from pw.core.sharding import Binding
from pw.core.ticker import Ticker
from pw.sched.cancelling import LookAtDeadlines, RunEnder
from pw.sched.clients import NOWHERE, Array, Client, Held, Poisoned, RunState
from pw.sched.programs import RegisteredProgram, check_program, holders
from pw.sched.rebuild import GiveUp, Ledger, LookForCopies, OfferAgain, Proceed, Rebuilder
from pw.sched.resume import ClientNumbers, Resumption
from pw.sched.saves import Saves
from pw.sched.why import Explainer, Overdue

RECOVERY_S = 60.0
"""How long what needs a lost island waits for it, before it fails."""

RUN_CREDITS = 512
"""Runs a client may have in flight before its calls block."""

CREDITS_AT_ONCE = 64
"""So many are given back at once; fewer can wait, since a client that has most of its credits misses none."""

CREDITS_S = 0.01
"""How long credits wait for others: who waits for the end of each run must not be disturbed by each."""


def ticket_for(secret: bytes, client: int) -> bytes:
    """What proves to a host that the controller let this client in."""
    return hashlib.blake2b(client.to_bytes(8, "big"), key=secret, digest_size=16).digest()


EMPTIED_S = 0.1
"""How often to look whether a drained host is empty."""


RESUME_S = 90.0
"""How long hosts keep what they have of clients of an earlier controller that have not come back."""


@dataclass(frozen=True, slots=True)
class _Disclaim:
    """Note to oneself: clients of an earlier controller have come back by now."""


@dataclass(frozen=True, slots=True)
class _GiveBack:
    """Note to oneself: credits have waited for others long enough."""


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
        self._secret = secret
        self._versions = versions
        self._policy = policy
        self._spawn_scheduler = spawn_scheduler
        self._island_status = island_status
        self._waiting_hosts = waiting_hosts
        self._counters = counters
        ledger = self._ledger = Ledger()
        self._clients = ledger.clients
        self._bindings = ledger.bindings
        self._runs = ledger.runs
        self._islands = ledger.islands
        numbers = self._numbers = ClientNumbers(first_client)
        self._rebuilder = Rebuilder(
            env,
            ledger,
            recovery_s,
            self._lower,
            self._credit,
            self._drain,
            numbers.is_known,
        )
        self._ender = RunEnder(env, ledger, self._rebuilder, self._fail_run)
        self._saves = Saves(env, ledger)
        self._nodes: dict[str, Client] = {}
        self._disclaimer = Ticker(env, RESUME_S, _Disclaim())
        self._drains = Ticker(env, EMPTIED_S, _LookAtDrained())
        self._artifacts: dict[bytes, bytes] = {}
        self._schedulers: dict[str, None] = {}
        """Islands that have a scheduler, in the order of their forming."""
        self._explainer = Explainer(env, ledger, self._schedulers, island_status, heard_s)
        self._ender.explain = self._explainer.explain_run
        self._shares: dict[int, tuple[float, int]] = {}
        self._directory = Directory(())
        self._settled: set[int] = set()
        """Clients that get credits back when this turn ends."""
        self._credits_at_once = credits_at_once
        self._refunds = Ticker(env, CREDITS_S, _GiveBack())

    # --- clients come and go -------------------------------------------------------------------------

    @handles(Attach)
    def _attach(self, sender: Address, message: Attach) -> None:
        if not 0 < message.share < math.inf:
            self.env.send(sender, Evicted(f"a share must be positive, not {message.share}"))
            return
        if sender.node in self._nodes:
            self._remove(self._nodes[sender.node], "attached again")
        number = message.resume
        if not number:
            number = self._numbers.take(self._rebuilder.unclaimed)
        elif not self._numbers.claim(number):
            self.env.send(sender, Evicted("it was silent for too long, and was given up"))
            return
        client = Client(sender, number, message.name, repeats=self._numbers.first << 16)
        if message.resume:
            client.resuming = Resumption(self._rebuilder.expect())
        self._clients[number] = self._nodes[sender.node] = client
        self._shares[number] = (message.share, message.priority)
        for island in self._schedulers:
            self.env.send(scheduler_of(island), AddClient(number, message.share, message.priority))
        event = "client attached again" if message.resume else "client attached"
        self.env.log("info", event, client=number, node=sender.node, name=message.name)
        self.env.send(sender, self._directory)
        self.env.send(
            sender,
            Attached(
                number,
                ticket_for(self._secret, number),
                RUN_CREDITS,
                tuple(sorted(self._islands)),
            ),
        )

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        client = self._nodes.get(message.node)
        if client is not None:
            self._remove(client, message.reason)
        else:
            for client in self._clients.values():
                for early in client.early_uploads.values():
                    early.pop(message.node, None)
            self._rebuilder.host_lost(message.node)
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
        self._rebuilder.client_left(client)
        self._saves.client_left(client)
        del self._nodes[client.address.node], self._clients[client.number]
        del self._shares[client.number]
        for island in self._schedulers:
            self.env.send(scheduler_of(island), RemoveClient(client.number))
        for number in client.slices:
            self._bindings.pop(number, None)
            self.env.send(RESOURCES, ReleaseSlice(number))
        for run in [run for run, state in self._runs.items() if state.client == client.number]:
            del self._runs[run]
        self._settled.discard(client.number)
        if not self._clients:
            self._artifacts.clear()

    def _client(self, sender: Address) -> Client | None:
        client = self._nodes.get(sender.node)
        if client is None:
            self.env.count("messages_from_strangers")
            reason = "the controller does not know this client (any more)"
            self.env.send(sender, Evicted(reason, may_attach=True))
        return client

    @handles(Directory)
    def _directory_changed(self, sender: Address, message: Directory) -> None:
        self._directory = message
        self._rebuilder.hosts_are(message)
        for client in self._clients.values():
            self.env.send(client.address, message)

    # --- slices --------------------------------------------------------------------------------------

    @handles(AllocateSlice)
    def _allocate(self, sender: Address, message: AllocateSlice) -> None:
        client = self._client(sender)
        if client is None:
            return
        if client_of(message.slice) != client.number or message.slice in client.slices:
            self._refuse_slice(client, message.slice, ProtocolError("bad slice number"))
        elif message.devices < 1:
            self._refuse_slice(
                client,
                message.slice,
                InsufficientDevices(f"a slice has at least 1 device, not {message.devices}"),
            )
        else:
            client.slices.add(message.slice)
            if client.resuming is not None:
                client.unbound[message.slice] = client.resuming.loss
            self.env.send(RESOURCES, message)

    def _refuse_slice(self, client: Client, number: int, error: Error) -> None:
        self.env.send(client.address, SliceRefused(number, ErrorReport.of(error)))

    @handles(SliceBound)
    def _bound(self, sender: Address, message: SliceBound) -> None:
        client = self._clients.get(client_of(message.slice))
        if client is None or message.slice not in client.slices:
            self.env.send(RESOURCES, ReleaseSlice(message.slice))
            return
        self._bindings[message.slice] = Binding(message.slice, message.island, message.devices)
        self.env.send(client.address, message)
        client.bounds[message.slice] += 1
        client.unbound.pop(message.slice, None)
        self._lower_again(client, message.slice)
        self._rebuilder.proceed(client)

    @handles(SliceRefused)
    def _slice_refused(self, sender: Address, message: SliceRefused) -> None:
        client = self._clients.get(client_of(message.slice))
        if client is not None:
            client.slices.discard(message.slice)
            self._bindings.pop(message.slice, None)
            self.env.send(client.address, message)
            if message.slice in client.unbound:
                self._rebuilder.slice_refused(client, message.slice, message.error)

    # --- programs ------------------------------------------------------------------------------------

    @handles(RegisterProgram)
    def _register(self, sender: Address, message: RegisterProgram) -> None:
        client = self._client(sender)
        if client is None:
            return
        if client_of(message.program) != client.number or message.program in client.programs:
            self.env.count("messages_refused")
            return
        for artifact in message.artifacts:
            if hashlib.sha256(artifact.blob).digest() == artifact.digest:
                self._artifacts[artifact.digest] = artifact.blob
        needed = {computation.artifact for computation in message.body.computations}
        program = RegisteredProgram(
            message.program,
            message.body.with_specs(client.one_spec),
            tuple(
                Artifact(digest, self._artifacts[digest])
                for digest in sorted(needed)
                if digest in self._artifacts
            ),
        )
        if client.resuming is not None:
            client.resuming.programs[message.program] = program
            if message.released:
                return
        client.programs[message.program] = program
        if len(program.artifacts) < len(needed):
            program.error = ErrorReport.of(
                ProtocolError(f"program {message.body.name!r} came without all its artifacts")
            )
        else:
            self._lower(client, program)

    def _lower(self, client: Client, program: RegisteredProgram) -> None:
        try:
            foreign = program.body.slices() - client.slices
            if foreign:
                raise NotOwner(
                    f"program {program.body.name!r} names slices that this client has not allocated"
                )
            unbound = program.body.slices() - self._bindings.keys()
            if unbound and unbound <= client.unbound.keys():
                return  # it is lowered when they are bound
            if unbound:
                raise ArrayLost(f"the slices of program {program.body.name!r} are not bound")
            check_program(program.body, self._bindings)
            installs = program.lower(self._bindings, self._ledger.limited)
        except Error as error:
            program.error = ErrorReport.of(error)
            return
        for island, install in installs:
            self.env.send(scheduler_of(island), install)

    def _lower_again(self, client: Client, number: int) -> None:
        for program in (*client.programs.values(), *client.retired.values()):
            if number in program.body.slices():
                self._lower(client, program)

    @handles(ProgramInstalled)
    def _installed(self, sender: Address, message: ProgramInstalled) -> None:
        client = self._clients.get(client_of(message.program))
        if client is None:
            return
        number = message.program
        program = client.programs.get(number) or client.retired.get(number)
        if program is None or message.install != program.installs:
            return
        program.installing.discard(message.island)
        if message.error is not None:
            program.error = message.error
            program.installing.clear()
        if client.recovering:
            self._rebuilder.proceed(client)
        else:
            self._drain(client)

    # --- the client's stream -------------------------------------------------------------------------

    @handles(
        Run, Delete, CreateArray, ReleaseProgram, ReleaseSlice, Checkpoint, SaveArrays, Inquire
    )
    def _in_order(self, sender: Address, message: Held) -> None:
        client = self._client(sender)
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
        client = self._client(sender)
        if client is None or client.resuming is None:
            self.env.count("messages_refused")
            return
        resuming, client.resuming = client.resuming, None
        resuming.finish(client, message)
        fields = {"arrays": len(message.held), "runs": len(client.lineage)}
        self.env.log("info", "client is back", client=client.number, **fields)
        self._rebuilder.resumed(client, resuming.loss)

    def _must_wait(self, client: Client, message: Held) -> bool:
        if client.recovering:
            return True
        if isinstance(message, Run):
            program = client.programs.get(message.program)
            return program is not None and bool(program.installing)
        if isinstance(message, (Checkpoint, SaveArrays)):
            arrays = [client.arrays.get(number) for number in message.arrays]
            return any(array is not None and array.uploading for array in arrays)
        return False

    def _drain(self, client: Client) -> None:
        while client.backlog and not self._must_wait(client, client.backlog[0]):
            self._handle(client, client.backlog.popleft())

    def _handle(self, client: Client, message: Held) -> None:
        if isinstance(message, Run):
            self._run(client, message)
        elif isinstance(message, Delete):
            self._delete(client, message.arrays)
        elif isinstance(message, CreateArray):
            self._create(client, message)
        elif isinstance(message, Checkpoint):
            self._rebuilder.checkpoint(client, message)
        elif isinstance(message, SaveArrays):
            self._saves.begin(client, message)
        elif isinstance(message, Inquire):
            self._inquire(client, message)
        elif isinstance(message, ReleaseProgram):
            self._release_program(client, message.program)
        else:
            self._release_slice(client, message.slice)

    def _run(self, client: Client, message: Run) -> None:
        if client_of(message.run) != client.number or message.run <= client.last_run:
            self.env.count("messages_duplicate")
            return
        client.last_run = message.run
        try:
            program = client.program_of(message)
            awaits = client.check_arguments(program, message.args)
            homes = client.check_results(program, message.results, self._bindings)
        except Poisoned as poisoned:
            self._fail_run(client, message, poisoned.report)
            return
        except Error as error:
            self._fail_run(client, message, ErrorReport.of(error))
            return
        donated = []
        for index in program.body.donated:
            arg = message.args[index]
            if isinstance(arg, int) and (given := client.arrays.pop(arg, None)) is not None:
                donated.append((arg, given))
                if given.uploading:
                    client.doomed[arg] = given
        for array, output, home in zip(message.results, program.body.outputs, homes, strict=True):
            client.arrays[array] = Array(output.spec, *home)
        self.env.count("runs")
        record = client.lineage.add_run(message.run, program, message.args, message.results)
        client.lineage.release(number for number, _ in donated)
        islands = tuple(program.parts)
        if not islands:
            self._settle(client)
            return
        client.in_flight += 1
        self._runs[message.run] = RunState(
            client.number,
            record,
            message.args,
            message.results,
            islands,
            program.segment_count,
            donated,
            began_s=self.env.now_s(),
        )
        for island, submit in program.submissions(
            message.run, message.args, message.results, awaits
        ):
            self.env.send(scheduler_of(island), submit)

    def _fail_run(self, client: Client, message: Run, error: ErrorReport) -> None:
        for array in message.results:
            if client_of(array) == client.number and array not in client.arrays:
                client.arrays[array] = Array(NOWHERE, "", (), error=error)
        self.env.count("runs_failed")
        client.lineage.refuse_run(message.run)
        self.env.send(client.address, RunFailed(message.run, message.results, error))
        self._settle(client)

    def _settle(self, client: Client) -> None:
        client.settled += 1
        if client.settled >= self._credits_at_once:
            self._settled.add(client.number)
        else:
            self._refunds.start()

    @handles(_GiveBack)
    def _give_back(self, sender: Address, note: _GiveBack) -> None:
        self._refunds.ticked(more=False)
        self._settled.update(n for n, client in self._clients.items() if client.settled)

    def _credit(self, state: RunState) -> None:
        """A run that was in flight has ended, in whatever way."""
        if state.credited:
            client = self._clients[state.client]
            client.in_flight -= 1
            self._settle(client)

    @handles(SegmentDone)
    def _segment_done(self, sender: Address, message: SegmentDone) -> None:
        state = self._runs.get(message.run)
        if state is None:
            return
        state.segments_left -= 1
        state.lost = state.lost or message.lost
        if state.segments_left > 0:
            return
        self._ender.ended(message.run, state)
        if state.lost is not None:
            self._rebuilder.run_lost(message.run, state.lost)
        else:
            del self._runs[message.run]
            self._credit(state)

    @handles(Proceed)
    def _proceed(self, sender: Address, note: Proceed) -> None:
        client = self._clients.get(note.client)
        if client is not None:
            self._rebuilder.proceed(client)

    def turn_ended(self) -> None:
        """Give credits back, and forget what nobody needs."""
        for number in self._settled:
            client = self._clients.get(number)
            if client is not None:
                self.env.send(client.address, RunsSettled(client.settled))
                client.settled = 0
        self._settled.clear()
        for client in self._clients.values():
            if client.lineage.has_unneeded:
                self._rebuilder.forget(client)

    # --- arrays --------------------------------------------------------------------------------------

    def _create(self, client: Client, message: CreateArray) -> None:
        held = holders(message.spec, self._bindings)
        early = client.early_uploads.pop(message.array, {})
        if (
            client_of(message.array) != client.number
            or message.array in client.arrays
            or message.spec.placement.slice not in client.slices
            or held is None
        ):
            self.env.count("messages_refused")
            error: Error = NotOwner("an upload names a slice or array that is not this client's")
            if held is None and message.spec.placement.slice in client.slices:
                error = ArrayLost("the slice of an upload is not bound to an island at the moment")
            report = ErrorReport.of(error)
            client.newest_input = max(client.newest_input, message.array)
            for host in early:
                self.env.send(store_of(host), DropUploads((message.array,)))
            if client_of(message.array) == client.number and message.array not in client.arrays:
                client.arrays[message.array] = Array(NOWHERE, "", (), error=report)
            self.env.send(client.address, RunFailed(0, (message.array,), report))
            return
        island, hosts = held
        spec = client.one_spec(message.spec)
        array = Array(spec, island, hosts, set(hosts), input=message.array)
        client.arrays[message.array] = array
        client.lineage.add_input(message.array, spec, message.source)
        self.env.send(scheduler_of(island), self._ledger.placed(message.array, spec))
        client.newest_input = max(client.newest_input, message.array)
        if message.source is not None:
            array.input = 0
            self._rebuilder.read(message.array, array, message.source)
            return
        for host, error_report in early.items():
            self._upload_ended(client, message.array, array, host, error_report)
        sent_elsewhere = message.bound != client.bounds[message.spec.placement.slice]
        unsure = sent_elsewhere or message.array in client.unsure
        client.unsure.discard(message.array)
        if unsure and array.uploading and message.array not in client.lost:
            self.env.send(client.address, UploadAgain(message.array, message.array))

    @handles(Uploaded)
    def _uploaded(self, sender: Address, message: Uploaded) -> None:
        client = self._clients.get(client_of(message.array))
        if client is None or sender.node in self._nodes:
            self.env.count("messages_stale")
            if client is None and self._numbers.is_known(client_of(message.array)):
                self.env.send(sender, DropUploads((message.array,)))
            return
        array = client.arrays.get(message.array) or client.doomed.get(message.array)
        if array is None and message.again:
            self.env.count("messages_stale")  # runs that read it may not have been launched yet
            return
        if array is None and (
            message.array <= client.newest_input or client.is_repeat(message.array)
        ):
            self.env.send(sender, DropUploads((message.array,)))
            return
        if array is None:
            client.early_uploads.setdefault(message.array, {})[sender.node] = message.error
            return
        self._upload_ended(client, message.array, array, sender.node, message.error)

    def _upload_ended(
        self, client: Client, number: int, array: Array, host: str, error: ErrorReport | None
    ) -> None:
        if host not in array.uploading:
            self.env.count("messages_stale")
            return
        array.uploading.discard(host)
        if error is not None and array.error is None:
            if self._rebuilder.arrival_failed(client, number, array, error):
                return
            if error.kind in INFRASTRUCTURE:
                lost = ArrayLost(f"the array could not be brought back: {error.message}")
                error = ErrorReport.of(lost, error.where)
            array.error = error
            self._ender.fail(error, arrays=(number,))
        if array.uploading:
            return
        if array.restored:
            self._rebuilder.arrived(client, number)
        for island in self._schedulers:
            self.env.send(scheduler_of(island), UploadEnded(number))
        if client.doomed.pop(number, None) is not None:
            self._rebuilder.drop(client, [(number, array)])
        if client.backlog:
            self._drain(client)

    def _delete(self, client: Client, arrays: tuple[int, ...]) -> None:
        dropped = []
        client.lineage.release(arrays)
        for number in arrays:
            array = client.arrays.pop(number, None)
            if array is None:
                continue
            if array.uploading:
                client.doomed[number] = array
            else:
                dropped.append((number, array))
        self._rebuilder.drop(client, dropped)

    def _release_program(self, client: Client, number: int) -> None:
        program = client.programs.pop(number, None)
        if program is not None:
            for island, hosts in program.hosts.items():
                self.env.send(scheduler_of(island), UninstallProgram(number, hosts))

    def _release_slice(self, client: Client, number: int) -> None:
        if number in client.slices:
            client.slices.discard(number)
            client.unbound.pop(number, None)
            self._bindings.pop(number, None)
            self.env.send(RESOURCES, ReleaseSlice(number))

    # --- islands -------------------------------------------------------------------------------------

    @handles(IslandFormed)
    def _island_formed(self, sender: Address, message: IslandFormed) -> None:
        self._islands.add(message.island)
        if message.device_memory_bytes is not None:
            self._ledger.limited.add(message.island)
        if message.island not in self._schedulers:
            self._schedulers[message.island] = None
            self._spawn_scheduler(message.island)
            for number, (share, priority) in self._shares.items():
                self.env.send(scheduler_of(message.island), AddClient(number, share, priority))
        self.env.send(scheduler_of(message.island), message)

    @handles(IslandLost)
    def _island_lost(self, sender: Address, message: IslandLost) -> None:
        """Hold the clients that need it until it is back; the rest of everybody's work goes on."""
        self._islands.discard(message.island)
        self._ledger.limited.discard(message.island)
        self.env.send(scheduler_of(message.island), message)
        self._rebuilder.island_lost(message)
        self._saves.island_lost(message.island)

    @handles(LookForCopies)
    def _look_for_copies(self, sender: Address, note: LookForCopies) -> None:
        self._rebuilder.look_for_copies()

    @handles(OfferAgain)
    def _offer_again(self, sender: Address, note: OfferAgain) -> None:
        self._rebuilder.offer_again()

    @handles(GiveUp)
    def _give_up(self, sender: Address, note: GiveUp) -> None:
        self._rebuilder.give_up(note)

    @handles(RunRefused)
    def _run_refused(self, sender: Address, message: RunRefused) -> None:
        self._ender.refused(message.run, message.results, message.error)

    # --- runs that are ended -------------------------------------------------------------------------

    @handles(RunStarted)
    def _run_started(self, sender: Address, message: RunStarted) -> None:
        self._ender.started(message.run)

    @handles(LookAtDeadlines)
    def _look_at_deadlines(self, sender: Address, note: LookAtDeadlines) -> None:
        self._ender.look_at_deadlines()

    @handles(Cancel)
    def _cancel(self, sender: Address, message: Cancel) -> None:
        client = self._client(sender)
        if client is not None:
            self._ender.cancel(client, message.arrays)

    @handles(CancelRuns)
    def _cancel_runs(self, sender: Address, message: CancelRuns) -> None:
        """Of any client: it is the operator's."""
        if self._client(sender) is not None:
            error = self._ender.cancel_runs(message)
            report = None if error is None else ErrorReport.of(error)
            self.env.send(sender, Answered(message.request, report))

    # --- copies and drains -----------------------------------------------------------------------------

    @handles(Holdings)
    def _holds(self, sender: Address, message: Holdings) -> None:
        if sender.node in self._nodes:
            self.env.count("messages_refused")
        else:
            self._rebuilder.holds(sender.node, message)
            if self._rebuilder.unclaimed:
                self._disclaimer.start()

    @handles(_Disclaim)
    def _disclaim(self, sender: Address, note: _Disclaim) -> None:
        self._disclaimer.ticked(more=False)
        self._rebuilder.disclaim()

    @handles(FileWritten, FilesCommitted)
    def _of_files(self, sender: Address, message: FileWritten | FilesCommitted) -> None:
        if sender.node in self._nodes:
            self.env.count("messages_refused")
        elif isinstance(message, FileWritten):
            self._saves.written(sender.node, message)
        else:
            self._saves.committed(message)

    @handles(ArraysLost)
    def _arrays_lost(self, sender: Address, message: ArraysLost) -> None:
        for array in message.arrays:
            client = self._clients.get(client_of(array))
            if client is None or sender.node in self._nodes:
                self.env.count("messages_stale")
            else:
                self._rebuilder.array_lost(client, array)

    @handles(LinkLost)
    def _link_lost(self, sender: Address, message: LinkLost) -> None:
        client = self._client(sender)
        if client is not None:
            self._rebuilder.link_lost(client, message.host)

    def _inquire(self, client: Client, message: Inquire) -> None:
        """Nothing is lost any more, so all arrays are where they should be, if they are."""
        error = None
        if any(number not in client.arrays for number in message.arrays):
            error = ErrorReport.of(ArrayDeleted("the array was deleted or donated"))
        self.env.send(client.address, Answered(message.request, error))

    @handles(InputGone)
    def _input_gone(self, sender: Address, message: InputGone) -> None:
        client = self._client(sender)
        if client is None:
            return
        array = client.arrays.get(message.array) or client.doomed.get(message.array)
        if array is None or not array.uploading:
            return
        error = ErrorReport.of(
            ArrayLost(
                "the hosts that had it were lost, and the client has not kept the value; pass keep=True to "
                "pw.put, or call pw.checkpoint"
            )
        )
        for host in tuple(array.uploading):
            self._upload_ended(client, message.array, array, host, error)
        self.env.send(client.address, RunFailed(0, (message.array,), error))

    @handles(DrainHost)
    def _drain_host(self, sender: Address, message: DrainHost) -> None:
        if self._client(sender) is None:
            return
        self.env.send(RESOURCES, DrainHost(message.request, message.node, sender.node))

    @handles(Draining)
    def _draining(self, sender: Address, message: Draining) -> None:
        self._rebuilder.draining = set(message.nodes)
        if message.nodes:
            self._drains.start()

    @handles(_LookAtDrained)
    def _look_at_drained(self, sender: Address, note: _LookAtDrained) -> None:
        for node in sorted(self._rebuilder.draining):
            if self._rebuilder.emptied(node):
                self.env.send(RESOURCES, HostEmptied(node))
        self._drains.ticked(more=bool(self._rebuilder.draining))

    # --- reports -------------------------------------------------------------------------------------

    @handles(GetStatus)
    def _status(self, sender: Address, message: GetStatus) -> None:
        clients = tuple(
            ClientStatus(
                client.number,
                client.name,
                len(client.arrays),
                len(client.programs),
                len(client.slices),
                client.in_flight,
            )
            for client in self._clients.values()
        )
        self.env.send(
            sender,
            Status(
                message.request,
                self._versions.pw,
                self._versions.jax,
                self._policy,
                self._island_status(),
                clients,
                self._ender.status(),
                self._waiting_hosts(),
            ),
        )

    @handles(Explain)
    def _explain(self, sender: Address, message: Explain) -> None:
        if self._client(sender) is not None:
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
        counters["runs_in_flight"] = len(self._runs)
        self.env.send(sender, Stats(message.request, CONTROLLER, counters))
