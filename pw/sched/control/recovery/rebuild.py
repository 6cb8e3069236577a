"""Gets back what clients had on hosts that were lost.

Theory of operation. When an island leaves its epoch, every run in flight that needs it is cancelled
everywhere, and what those runs would have made is *lost*, as is every array that lay on the island. A
client with something lost, or with a slice that is not bound, is *recovering*: what it sends waits. When
its slices are bound again (to the same ranks, on the hosts that have come back or on spares), the lost
arrays are made from copies in host memory where there are any, and the rest is run again from there
(`pw.sched.control.recovery.plan` works out what). Repeated runs have numbers of their own, so that an
edge of an old attempt is never taken for one of the new. Their results have the ids that the client
knows. Then the client's stream goes on; the client has noticed nothing but the delay.

What is to be run again may need a slice that the client has given back since. Such a slice is *borrowed*: asked
for once more, as the client had asked for it, and returned when nothing lies or arrives there any more.

What can not be had back fails, with the reason. An island that does not come back at all is given up after
a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from pw.core.actor import Env
from pw.core.errors import INFRASTRUCTURE, ErrorReport, HostLost
from pw.core.ids import RESOURCES, arrays_in, client_of, scheduler_of, store_of
from pw.core.messages import (
    CancelRun,
    CreateArray,
    FileSource,
    ForgetInputs,
    ForgetRuns,
    IslandLost,
    ReadArray,
    Restore,
    RunFailed,
    SliceLost,
    UninstallProgram,
    UploadAgain,
)
from pw.core.ticker import Ticker
from pw.sched.control.checkpoints.replicas import Copies
from pw.sched.control.clients import Array, Client, RunState
from pw.sched.control.ledger import Ledger, drop
from pw.sched.control.lineage import Origin, Record
from pw.sched.control.programs import RegisteredProgram, holders
from pw.sched.control.recovery.plan import ANEW_S, RecoveryPlan, is_in_vain, named, plan_recovery
from pw.sched.control.recovery.resume import RESTARTED

PATIENCE_S = 5.0
"""How long to wait for hosts that may have copies, when a client of an earlier controller has come back."""
LOOK_S = 0.5
"""How often to see whether such hosts have come."""
ATTEMPT_S = 4.0
"""What is tried again and again within this time is one attempt: a network may take a while to heal."""
AGAIN_S = 0.02
"""How long to wait before another try, at first: a link may have to come back."""
DOUBLINGS = 7
"""How often that is doubled, with every try that was in vain."""

_NOT_BORROWED = ErrorReport.of(
    HostLost(
        "devices that were given back are needed once more, to make again what was lost with a host"
    )
)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Note to the controller: an island that left this epoch should have been formed by now."""

    island: str
    error: ErrorReport
    loss: int


@dataclass(frozen=True, slots=True)
class Proceed:
    """Note to the controller: rebuild what this client has lost."""

    client: int


@dataclass(frozen=True, slots=True)
class LookForCopies:
    """Note to the controller: hosts may have come by now that have what clients miss."""


class Rebuilder:
    """The controller's part that deals with lost hosts; see the module."""

    def __init__(
        self,
        env: Env,
        ledger: Ledger,
        recovery_s: float,
        lower: Callable[[Client, RegisteredProgram], None],
        credit: Callable[[RunState], None],
        resume: Callable[[Client], None],
        copies: Copies,
    ) -> None:
        self._env = env
        self._ledger = ledger
        self._recovery_s = recovery_s
        self._lower = lower
        self._credit = credit
        self._resume = resume
        self._copies = copies
        self._looks = Ticker(env, LOOK_S, LookForCopies())
        self._losses = 0

    # --- what was lost -------------------------------------------------------------------------------

    def island_lost(self, message: IslandLost) -> None:
        """An island left its epoch: hold the clients that need it, and cancel what was under way."""
        ledger, error = self._ledger, message.error
        self._losses += 1
        gone = [n for n, binding in ledger.bindings.items() if binding.island == message.island]
        for number in gone:
            del ledger.bindings[number]
            client = ledger.clients[client_of(number)]
            client.unbound[number] = self._losses
            self._env.send(client.address, SliceLost(number, error))
        awaited: set[int] = set()
        for client in ledger.clients.values():
            for number, array in client.arrays.items():
                if array.island == message.island and array.error is None:
                    if array.uploading:
                        awaited.add(number)
                    self._lose(client, number, array, error)
                    array.hosts = ()
            for number in [n for n, a in client.doomed.items() if a.island == message.island]:
                awaited.add(number)
                del client.doomed[number]
            for program in (*client.programs.values(), *client.retired.values()):
                program.installing.discard(message.island)
        self._copies.island_lost(message.island)
        self.interrupt(error, island=message.island, uploads=awaited)
        if gone:
            self._env.call_later(self._recovery_s, GiveUp(message.island, error, self._losses))
        for client in list(ledger.clients.values()):
            self.proceed(client)

    def interrupt(
        self,
        error: ErrorReport,
        *,
        island: str = "",
        runs: Iterable[int] = (),
        uploads: Iterable[int] = (),
    ) -> None:
        """Cancel the runs in flight that need this island, or are these, and all that need their results.

        Also those that wait for one of these uploads, which will not end: a run waits for all its arguments,
        even for one on another island that it does not read.
        """
        ledger = self._ledger
        chosen = set(runs)
        lost = set(uploads)
        for run, state in list(ledger.runs.items()):
            needed = not lost.isdisjoint(arrays_in(state.args))
            if run not in chosen and island not in state.islands and not needed:
                continue
            lost.update(state.results)
            client = self.withdraw(run)
            for number in state.results:
                array = client.arrays.get(number)
                if array is not None and array.error is None and number not in client.lost:
                    self._lose(client, number, array, error)

    def withdraw(self, run: int, reason: str = "", grace_s: float = 0.0) -> Client:
        """End a run in flight before its time, everywhere; whose it was. What it was to take away goes.

        With a `reason` also what has been launched of it must end: `grace_s` later at the latest.
        """
        ledger = self._ledger
        state = ledger.runs.pop(run)
        for island in state.islands:
            if island in ledger.islands:
                self._env.send(scheduler_of(island), CancelRun(run, reason, grace_s))
        client = ledger.clients[state.client]
        given = [(n, array) for n, array in state.donated if not array.uploading]
        drop(self._env, ledger, client, given)
        self._credit(state)
        return client

    def run_lost(self, run: int, error: ErrorReport) -> None:
        """A run ended without its values, because a host was lost: run it, and what needs it, again."""
        state = self._ledger.runs[run]
        self.interrupt(error, runs=(run,))
        self._try_again(self._ledger.clients[state.client], state.record.repeats)

    def _try_again(self, client: Client, tries: int) -> None:
        pause_s = AGAIN_S * 2 ** min(tries, DOUBLINGS)
        self._env.call_later(pause_s, Proceed(client.number))

    def _lose(self, client: Client, number: int, array: Array, error: ErrorReport) -> None:
        client.lost.setdefault(number, error)
        array.uploading = frozenset()

    def array_lost(self, client: Client, number: int) -> None:
        """A host says that it has not got an array, which may be known."""
        array = client.arrays.get(number)
        if array is not None and array.error is not None:
            self._env.send(client.address, RunFailed(0, (number,), array.error))
        if array is None or array.error is not None or array.uploading or number in client.lost:
            return
        what = named(array.spec, client.lineage.origins.get(number))
        words = f"a host was lost while it sent what {what} is made of"
        error = ErrorReport.of(HostLost(words))
        making = [state for state in self._ledger.runs.values() if number in state.results]
        for state in making:
            state.lost = error  # it is seen to when the run has ended
        if not making:
            self._lose(client, number, array, error)
            origin = client.lineage.origins.get(number)
            maker = origin.maker if origin is not None else None
            if maker is None:
                _count(array, self._env.now_s())
            self._try_again(client, (maker or array).repeats)

    # --- getting it back -----------------------------------------------------------------------------

    def proceed(self, client: Client) -> None:
        """Rebuild what a client has lost, as soon as its slices are bound and its programs compiled."""
        if client.unbound or client.resuming is not None:
            return
        if client.lost:
            plan = self._plan(client)
            if self._waits_for_copies(client, plan):
                self._looks.start()
                return
            if self._waits_for_slices(client, plan) or self._waits_for_programs(client, plan):
                return
            lost = set(client.lost)
            client.lost.clear()
            self._fail(client, plan.lost)
            self._carry_out(client, plan, lost)
        self._copies.top_up(client)
        self._resume(client)

    def look_for_copies(self) -> None:
        """See whether those who have come back can go on, or have to do without."""
        self._looks.ticked(more=False)
        for client in list(self._ledger.clients.values()):
            if client.lost:
                self.proceed(client)

    def _waits_for_copies(self, client: Client, plan: RecoveryPlan) -> bool:
        """Whether hosts may come that have what cannot be had back without them."""
        origins = client.lineage.origins
        lasting = any(array in origins and origins[array].lasting for array in plan.lost)
        return bool(plan.lost) and (
            self._env.now_s() < client.patient_until_s or (lasting and self._copies.may_come_back)
        )

    def _plan(self, client: Client) -> RecoveryPlan:
        def exists(array: int) -> bool:
            held = client.arrays.get(array)
            return held is not None and array not in client.lost and held.error is None

        wanted = [array for array in client.lost if array in client.arrays]

        def bound(slice: int) -> bool:
            return slice in self._ledger.bindings or client.may_borrow(slice)

        def failed(array: int) -> ErrorReport | None:
            held = client.arrays.get(array) or client.lineage.origins.get(array)
            return None if held is None else held.error

        copies = self._copies.of(client)
        now_s = self._env.now_s()
        return plan_recovery(
            client.lineage, wanted, exists, copies, client.lost, bound, failed, now_s
        )

    def _waits_for_slices(self, client: Client, plan: RecoveryPlan) -> bool:
        """Borrow the slices that the client gave back and that are needed now; true if there are any."""
        needed = {
            client.lineage.origins[array].spec.placement.slice
            for array in (*plan.restores, *plan.uploads)
        }
        needed.update(*(record.program.slices for record in plan.runs))
        missing = needed - self._ledger.bindings.keys()
        if not missing:
            return False
        self._losses += 1
        for number in sorted(missing):
            client.borrowed.add(number)
            client.unbound[number] = self._losses
            self._env.send(RESOURCES, client.requests[number])
        self._env.call_later(self._recovery_s, GiveUp("", _NOT_BORROWED, self._losses))
        return True

    def _waits_for_programs(self, client: Client, plan: RecoveryPlan) -> bool:
        """Have the hosts compile what is to be run again; true while they are at it."""
        waits = False
        for record in plan.runs:
            program = record.program
            if program.program not in client.programs and program.program not in client.retired:
                client.retired[program.program] = program
                self._lower(client, program)
            waits = waits or bool(program.installing)
        return waits

    def _fail(self, client: Client, lost: dict[int, ErrorReport]) -> None:
        """These arrays are gone for good."""
        for number, error in lost.items():
            array = client.arrays.get(number)
            if array is not None and array.error is None:
                array.error = error
                self._env.send(client.address, RunFailed(0, (number,), error))

    def _carry_out(self, client: Client, plan: RecoveryPlan, lost: set[int]) -> None:
        """Make what the client holds under its own ids, and what is only needed for that under new ones.

        The hosts replace what they have under an id; an array that nobody holds may still be about to be
        dropped there, so its id is not used again.
        """
        names: dict[int, int] = {}
        if plan.restores or plan.uploads or plan.runs:
            self._env.log(
                "info",
                "rebuilding",
                client=client.number,
                from_copies=len(plan.restores),
                from_client=len(plan.uploads),
                runs=len(plan.runs),
            )
        for number, sources in plan.restores.items():
            name, array = self._land(client, number, names)
            array.restored = True
            array.input = 0
            devices = self._ledger.located(array.spec)
            for host in array.hosts:
                boxes = {
                    array.spec.box(position)
                    for position, device in enumerate(devices)
                    if device.host == host
                }
                chosen = tuple(source for source in sources if source.box in boxes)
                restore = Restore(name, number, array.spec, devices, chosen)
                self._env.send(store_of(host), restore)
            self._env.count("arrays_restored")
        for number in plan.uploads:
            name, array = self._land(client, number, names)
            source = client.lineage.origins[number].source
            if source is not None:
                self.read(name, array, source)
                continue
            array.input = number
            self._env.send(client.address, UploadAgain(number, name))
        temporary: list[tuple[int, Array]] = []
        failed: dict[int, ErrorReport] = {}
        for record in plan.runs:
            self._repeat(client, record, lost, names, failed, temporary)
        self._fail(client, {number: error for number, error in failed.items() if number in lost})
        drop(self._env, self._ledger, client, temporary)
        for program in client.retired.values():
            for island, hosts in program.hosts.items():
                if island in self._ledger.islands:
                    self._env.send(scheduler_of(island), UninstallProgram(program.program, hosts))
        client.retired.clear()

    def _land(self, client: Client, number: int, names: dict[int, int]) -> tuple[int, Array]:
        """An array is about to arrive on its hosts; it goes again if the client cannot use it.

        It may have failed before, which is for good: then only what was made of it is wanted.
        """
        spec = client.lineage.origins[number].spec
        held = holders(spec, self._ledger.bindings)
        assert held is not None, "slices are bound before anything is rebuilt"
        island, hosts = held
        array = client.arrays.get(number)
        if array is None or array.error is not None:
            names[number] = number = client.repeat_id()
            array = client.doomed[number] = Array(spec, island, hosts)
        array.island, array.hosts, array.uploading = island, hosts, frozenset(hosts)
        self._env.send(scheduler_of(island), self._ledger.placed(number, spec))
        return number, array

    def read(self, number: int, array: Array, source: FileSource) -> None:
        """Have an input read from disk by its hosts."""
        devices = self._ledger.located(array.spec)
        for host in array.hosts:
            self._env.send(store_of(host), ReadArray(number, source, array.spec, devices))

    def _repeat(
        self,
        client: Client,
        record: Record,
        lost: set[int],
        names: dict[int, int],
        failed: dict[int, ErrorReport],
        temporary: list[tuple[int, Array]],
    ) -> None:
        """Run a run again, under a new number."""
        program = record.program
        error = program.error or next(
            (failed[arg] for arg in arrays_in(record.args) if arg in failed), None
        )
        if error is not None:
            failed.update(dict.fromkeys(record.results, error))
            return
        _count(record, self._env.now_s())
        args = tuple(names.get(arg, arg) if isinstance(arg, int) else arg for arg in record.args)
        awaits = []
        for arg in arrays_in(args):
            given = client.arrays.get(arg) or client.doomed.get(arg)
            if given is not None and given.uploading:
                awaits.append(arg)
        results = []
        homes = program.result_homes(self._ledger.bindings)
        assert homes is not None, "slices are bound before anything is rebuilt"
        for number, output, home in zip(record.results, program.body.outputs, homes, strict=True):
            array = client.arrays.get(number)
            if array is not None and number in lost and not array.uploading:
                array.island, array.hosts = home
                results.append(number)
                continue
            name = client.repeat_id()
            if array is None or array.error is not None:
                names.setdefault(number, name)
            temporary.append((name, Array(output.spec, *home)))
            results.append(name)
        run = client.repeat_id()
        state = RunState(
            client.number,
            record,
            args,
            tuple(results),
            tuple(program.parts),
            program.segment_count,
            [],
            credited=False,
            began_s=self._env.now_s(),
        )
        self._ledger.runs[run] = state
        self._env.count("runs_repeated")
        for island, submit in program.submissions(
            run, args, tuple(results), tuple(dict.fromkeys(awaits))
        ):
            self._env.send(scheduler_of(island), submit)

    def arrival_failed(self, client: Client, number: int, array: Array, error: ErrorReport) -> bool:
        """An upload or a restored array did not get there: get it in another way, so many times."""
        now_s = self._env.now_s()
        if error.kind not in INFRASTRUCTURE or is_in_vain(array, now_s):
            return False
        array.restored = True
        _count(array, now_s)
        if number in client.arrays:
            self._lose(client, number, array, error)
        elif client.doomed.pop(number, None) is not None:
            # other hosts may have their shards
            drop(self._env, self._ledger, client, [(number, array)], late=True)
        consumers = [run for run, state in self._ledger.runs.items() if number in state.args]
        self.interrupt(error, runs=consumers)
        self._try_again(client, array.repeats)
        return True

    def give_up(self, note: GiveUp) -> None:
        """An island has not come back: what lay there fails, and what needs it fails from now on."""
        for client in list(self._ledger.clients.values()):
            gone = {number for number, loss in client.unbound.items() if loss == note.loss}
            if gone:
                self._env.log(
                    "warning", "island given up", island=note.island, client=client.number
                )
                words = (
                    f"{note.error.message}; there were no devices to go on with for {self._recovery_s:g} s. "
                    "Start its hosts again (pw.status() shows what is there), or ask for other devices with "
                    "pw.make_virtual_device_set() and compute there again"
                )
                error = msgspec.structs.replace(note.error, message=words)
                self._abandon(client, gone, error)

    def _abandon(self, client: Client, gone: set[int], error: ErrorReport) -> None:
        """These slices will not be bound: what lay there fails, and what needs it."""
        for number in gone:
            client.unbound.pop(number, None)
        for program in client.programs.values():
            if not gone.isdisjoint(program.slices):
                program.error = _said_of(f"{program.body.name!r} cannot run", error)
        origins = client.lineage.origins
        failed = {
            number: _said_of(_lost(array, origins.get(number)), error)
            for number in client.lost
            if (array := client.arrays.get(number)) is None or array.spec.placement.slice in gone
        }
        for number in failed:
            del client.lost[number]
        self._fail(client, failed)
        self.proceed(client)

    # --- what may be forgotten -----------------------------------------------------------------------

    def link_lost(self, client: Client, host: str) -> None:
        """What a client had sent to a host may not have come there: uploads are asked for again."""
        for number, array in (*client.arrays.items(), *client.doomed.items()):
            if host in array.uploading and array.input and number not in client.lost:
                self._env.send(client.address, UploadAgain(array.input, number))
        client.unsure.update(m.array for m in client.backlog if isinstance(m, CreateArray))

    def forget(self, client: Client) -> None:
        """What nothing of this client can need any more need not be kept anywhere."""
        unneeded = client.lineage.drain()
        if unneeded.runs:
            self._env.send(client.address, ForgetRuns(tuple(unneeded.runs)))
        if unneeded.inputs:
            self._env.send(client.address, ForgetInputs(tuple(unneeded.inputs)))
        for slice in unneeded.slices:
            client.forget_request(slice)
        self._copies.forget(client, unneeded.copies)

    # --- clients of an earlier controller ------------------------------------------------------------

    def expect(self) -> int:
        """A client comes back, whose slices are not bound; how that loss is called."""
        self._losses += 1
        return self._losses

    def resumed(self, client: Client, loss: int) -> None:
        """A client has told all that it has: what hosts have of it is its own again."""
        client.patient_until_s = self._env.now_s() + PATIENCE_S
        self._copies.claim(client)
        if client.unbound:
            self._env.call_later(self._recovery_s, GiveUp("", RESTARTED, loss))
        self.proceed(client)

    def slice_refused(self, client: Client, number: int, error: ErrorReport) -> None:
        """A slice that was bound, or is said to have been, cannot be had."""
        self._abandon(client, {number}, error)


def _lost(array: Array | None, origin: Origin | None) -> str:
    spec = array.spec if array is not None else None if origin is None else origin.spec
    return "an array is lost" if spec is None else f"{named(spec, origin)} is lost"


def _said_of(what: str, error: ErrorReport) -> ErrorReport:
    """The same error, about one of the user's objects."""
    return msgspec.structs.replace(error, message=f"{what}: {error.message}")


def _count(tried: Record | Array, now_s: float) -> None:
    """Something is tried once more: from the beginning, if what was made the last time has lived long."""
    since_s = now_s - tried.attempted_s
    if since_s >= ANEW_S:
        tried.repeats = tried.attempts = 0
    tried.repeats += 1
    if since_s >= ATTEMPT_S:
        tried.attempts += 1
        tried.attempted_s = now_s
