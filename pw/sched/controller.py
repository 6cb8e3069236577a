"""The controller: clients, what they own, and the way from a client's `Run` to the gang schedulers.

It forwards a run to every island the run touches at once, without waiting for anything but the first
compilation of a program and never for data: the control plane runs ahead of the data plane. It holds no
buffers and opens no bulk channel; one entry stands for a logical array, whatever its shards.

What a client sends is handled in order. While a program is being installed, runs of it, and all that
the client sent after them, wait in the client's backlog, so that compile errors poison a run on all
its hosts alike and deletes never overtake runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from pw.core.actor import Actor, Env, handles
from pw.core.errors import (
    ArrayLost,
    Error,
    ErrorReport,
    InsufficientDevices,
    NotOwner,
    ProtocolError,
)
from pw.core.ids import CONTROLLER, RESOURCES, Address, client_of, scheduler_of
from pw.core.messages import (
    AddClient,
    AllocateSlice,
    Artifact,
    Attach,
    Attached,
    CancelRun,
    ClientStatus,
    CreateArray,
    Delete,
    Directory,
    Evicted,
    GetStats,
    GetStatus,
    IslandFormed,
    IslandLost,
    IslandStatus,
    PeerLost,
    ProgramInstalled,
    RegisterProgram,
    Release,
    ReleaseProgram,
    ReleaseSlice,
    RemoveClient,
    Run,
    RunFailed,
    RunsSettled,
    SegmentDone,
    SliceBound,
    SliceLost,
    SliceRefused,
    Stats,
    Status,
    UninstallProgram,
    Uploaded,
    UploadEnded,
)
from pw.core.sharding import Binding
from pw.sched.clients import NOWHERE, Array, Client, Held, Poisoned, RunState
from pw.sched.programs import RegisteredProgram, check_program, holders

RUN_CREDITS = 512
"""Runs a client may have in flight before its calls block."""


def ticket_for(secret: bytes, client: int) -> bytes:
    """What proves to a host that the controller let this client in."""
    return hashlib.blake2b(client.to_bytes(8, "big"), key=secret, digest_size=16).digest()


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
    ) -> None:
        super().__init__(env)
        self._secret = secret
        self._versions = versions
        self._policy = policy
        self._spawn_scheduler = spawn_scheduler
        self._island_status = island_status
        self._counters = counters
        self._clients: dict[int, Client] = {}
        self._nodes: dict[str, Client] = {}
        self._next_client = 1
        self._bindings: dict[int, Binding] = {}
        self._runs: dict[int, RunState] = {}
        self._artifacts: dict[bytes, bytes] = {}
        self._islands: set[str] = set()
        self._schedulers: set[str] = set()
        self._shares: dict[int, tuple[float, int]] = {}
        self._directory = Directory(())
        self._settled: set[int] = set()

    # --- clients come and go -------------------------------------------------------------------------

    @handles(Attach)
    def _attach(self, sender: Address, message: Attach) -> None:
        if not 0 < message.share < math.inf:
            self.env.send(sender, Evicted(f"a share must be positive, not {message.share}"))
            return
        if sender.node in self._nodes:
            self._remove(self._nodes[sender.node], "attached again")
        number = self._next_client
        self._next_client += 1
        client = Client(sender, number, message.name)
        self._clients[number] = self._nodes[sender.node] = client
        self._shares[number] = (message.share, message.priority)
        for island in self._schedulers:
            self.env.send(scheduler_of(island), AddClient(number, message.share, message.priority))
        self.env.log("info", "client attached", client=number, node=sender.node, name=message.name)
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
            self.env.send(sender, Evicted("the controller does not know this client (any more)"))
        return client

    @handles(Directory)
    def _directory_changed(self, sender: Address, message: Directory) -> None:
        self._directory = message
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
        self._lower_again(client, message.slice)

    @handles(SliceRefused)
    def _slice_refused(self, sender: Address, message: SliceRefused) -> None:
        client = self._clients.get(client_of(message.slice))
        if client is not None:
            client.slices.discard(message.slice)
            self._bindings.pop(message.slice, None)
            self.env.send(client.address, message)

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
            message.body,
            tuple(
                Artifact(digest, self._artifacts[digest])
                for digest in sorted(needed)
                if digest in self._artifacts
            ),
        )
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
            if unbound:
                raise ArrayLost(f"the slices of program {program.body.name!r} are not bound")
            check_program(program.body, self._bindings)
            installs = program.lower(self._bindings)
        except Error as error:
            program.error = ErrorReport.of(error)
            return
        for island, install in installs:
            self.env.send(scheduler_of(island), install)

    def _lower_again(self, client: Client, number: int) -> None:
        for program in client.programs.values():
            if number in program.body.slices():
                self._lower(client, program)

    @handles(ProgramInstalled)
    def _installed(self, sender: Address, message: ProgramInstalled) -> None:
        client = self._clients.get(client_of(message.program))
        program = client.programs.get(message.program) if client else None
        if client is None or program is None:
            return
        program.installing.discard(message.island)
        if message.error is not None:
            program.error = message.error
            program.installing.clear()
        self._drain(client)

    # --- the client's stream -------------------------------------------------------------------------

    @handles(Run, Delete, CreateArray, ReleaseProgram, ReleaseSlice)
    def _in_order(self, sender: Address, message: Held) -> None:
        client = self._client(sender)
        if client is None:
            return
        if client.backlog or self._must_wait(client, message):
            client.backlog.append(message)
        else:
            self._handle(client, message)

    def _must_wait(self, client: Client, message: Held) -> bool:
        if not isinstance(message, Run):
            return False
        program = client.programs.get(message.program)
        return program is not None and bool(program.installing)

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
            client.check_results(program, message.results, self._bindings)
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
        for array, output in zip(message.results, program.body.outputs, strict=True):
            held = holders(output.spec, self._bindings)
            assert held is not None
            client.arrays[array] = Array(output.spec, *held)
        client.in_flight += 1
        self.env.count("runs")
        islands = tuple(program.parts)
        if not islands:
            client.in_flight -= 1
            self._settle(client)
            return
        self._runs[message.run] = RunState(
            client.number, message.results, islands, program.segment_count, message.args, donated
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
        self.env.send(client.address, RunFailed(message.run, message.results, error))
        self._settle(client)

    def _settle(self, client: Client) -> None:
        client.settled += 1
        self._settled.add(client.number)

    @handles(SegmentDone)
    def _segment_done(self, sender: Address, message: SegmentDone) -> None:
        state = self._runs.get(message.run)
        if state is None:
            return
        state.segments_left -= 1
        if state.segments_left <= 0:
            del self._runs[message.run]
            client = self._clients[state.client]
            client.in_flight -= 1
            self._settle(client)

    def turn_ended(self) -> None:
        """Give credits back, one message a client and turn."""
        for number in self._settled:
            client = self._clients.get(number)
            if client is not None:
                self.env.send(client.address, RunsSettled(client.settled))
                client.settled = 0
        self._settled.clear()

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
            if client_of(message.array) == client.number and message.array not in client.arrays:
                client.arrays[message.array] = Array(NOWHERE, "", (), error=report)
            self.env.send(client.address, RunFailed(0, (message.array,), report))
            return
        island, hosts = held
        array = Array(message.spec, island, hosts, set(hosts))
        client.arrays[message.array] = array
        for host, error_report in early.items():
            self._upload_ended(client, message.array, array, host, error_report)

    @handles(Uploaded)
    def _uploaded(self, sender: Address, message: Uploaded) -> None:
        client = self._clients.get(client_of(message.array))
        if client is None or sender.node in self._nodes:
            self.env.count("messages_stale")
            return
        array = client.arrays.get(message.array) or client.doomed.get(message.array)
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
            array.error = error
            self._fail_runs(error, arrays={number})
        if array.uploading:
            return
        for island in self._schedulers:
            self.env.send(scheduler_of(island), UploadEnded(number))
        if client.doomed.pop(number, None) is not None:
            self._drop(client, [(number, array)])

    def _delete(self, client: Client, arrays: tuple[int, ...]) -> None:
        dropped = []
        for number in arrays:
            array = client.arrays.pop(number, None)
            if array is None:
                continue
            if array.uploading:
                client.doomed[number] = array
            else:
                dropped.append((number, array))
        self._drop(client, dropped)

    def _drop(self, client: Client, arrays: list[tuple[int, Array]]) -> None:
        """Have the hosts that hold these arrays forget them, after the client's earlier work."""
        by_island: dict[str, tuple[list[int], list[tuple[str, ...]]]] = {}
        for number, array in arrays:
            if array.hosts and array.island in self._islands:
                numbers, hosts = by_island.setdefault(array.island, ([], []))
                numbers.append(number)
                hosts.append(array.hosts)
        for island, (numbers, hosts) in by_island.items():
            self.env.send(
                scheduler_of(island), Release(client.number, tuple(numbers), tuple(hosts))
            )

    def _release_program(self, client: Client, number: int) -> None:
        program = client.programs.pop(number, None)
        if program is not None:
            for island, hosts in program.hosts.items():
                self.env.send(scheduler_of(island), UninstallProgram(number, hosts))

    def _release_slice(self, client: Client, number: int) -> None:
        if number in client.slices:
            client.slices.discard(number)
            self._bindings.pop(number, None)
            self.env.send(RESOURCES, ReleaseSlice(number))

    # --- islands -------------------------------------------------------------------------------------

    @handles(IslandFormed)
    def _island_formed(self, sender: Address, message: IslandFormed) -> None:
        self._islands.add(message.island)
        if message.island not in self._schedulers:
            self._schedulers.add(message.island)
            self._spawn_scheduler(message.island)
            for number, (share, priority) in self._shares.items():
                self.env.send(scheduler_of(message.island), AddClient(number, share, priority))
        self.env.send(scheduler_of(message.island), message)

    @handles(IslandLost)
    def _island_lost(self, sender: Address, message: IslandLost) -> None:
        """Fail what was in flight or lay there; the rest of every client's work goes on."""
        self._islands.discard(message.island)
        self.env.send(scheduler_of(message.island), message)
        for number, binding in list(self._bindings.items()):
            if binding.island == message.island:
                del self._bindings[number]
                self.env.send(
                    self._clients[client_of(number)].address, SliceLost(number, message.error)
                )
        self._fail_runs(message.error, island=message.island)
        for client in self._clients.values():
            self._lose_arrays(client, message)
            for program in client.programs.values():
                if message.island in program.parts:
                    program.error = message.error
                    program.installing.clear()
            self._drain(client)

    def _fail_runs(
        self, error: ErrorReport, *, island: str = "", arrays: set[int] | None = None
    ) -> None:
        """Give up the runs in flight that need this island or these arrays, and those that need them."""
        failed = set(arrays or ())
        for run, state in list(self._runs.items()):
            if island not in state.islands and failed.isdisjoint(state.args):
                continue
            del self._runs[run]
            client = self._clients[state.client]
            client.in_flight -= 1
            self._settle(client)
            failed.update(state.results)
            for array in state.results:
                if array in client.arrays:
                    client.arrays[array].error = error
            self.env.send(client.address, RunFailed(run, state.results, error))
            for touched in state.islands:
                if touched in self._islands:
                    self.env.send(scheduler_of(touched), CancelRun(run))
            self._drop(client, [(n, array) for n, array in state.donated if not array.uploading])

    def _lose_arrays(self, client: Client, message: IslandLost) -> None:
        client.doomed = {
            number: array
            for number, array in client.doomed.items()
            if array.island != message.island
        }
        lost = [n for n, array in client.arrays.items() if array.island == message.island]
        if not lost:
            return
        error = ErrorReport.of(
            ArrayLost(f"its buffers were on island {message.island}: {message.error.message}")
        )
        untold = tuple(number for number in lost if client.arrays[number].error is None)
        for number in lost:
            array = client.arrays[number]
            array.error = array.error or error
            array.hosts = ()
            array.uploading.clear()
        if untold:
            self.env.send(client.address, RunFailed(0, untold, error))

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
            ),
        )

    @handles(GetStats)
    def _stats(self, sender: Address, message: GetStats) -> None:
        counters = self._counters()
        counters["live_arrays"] = sum(len(client.arrays) for client in self._clients.values())
        counters["programs"] = sum(len(client.programs) for client in self._clients.values())
        counters["runs_in_flight"] = len(self._runs)
        self.env.send(sender, Stats(message.request, CONTROLLER, counters))
