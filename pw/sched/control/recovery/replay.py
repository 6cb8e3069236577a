"""Carries out a recovery plan: restores arrays, asks for uploads again, and repeats runs.

Repeated runs have numbers of their own, so that no edge of an earlier attempt is taken for one of
theirs. An array that the client holds is made under the id that the client knows; the hosts replace
what they have under that id. An array that is only needed on the way gets a new id, because hosts
may be about to drop what they have under the old one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.ticker import Ticker
from pw.core.errors import ErrorReport
from pw.core.ids import arrays_in, store_of
from pw.sched.control.array_states import ArrayEntry, ArrayState
from pw.sched.control.clients import Client
from pw.sched.control.handovers import HandoverTable
from pw.sched.control.lineage import Record
from pw.sched.control.programs import holders
from pw.sched.control.recovery.plan import RecoveryPlan
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart

LOOK_S = 1.0
"""Seconds between two looks whether lost arrays have come."""


@dataclass(slots=True)
class _Rebuilding:
    """Arrays that a client waits for since its island was formed again."""

    since_s: float
    arrays: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Replays(ControlPart):
    """Carries out recovery plans."""

    registry: ProgramRegistry
    runs: RunsInFlight
    handovers: HandoverTable
    rebuilding: dict[int, _Rebuilding] = field(default_factory=dict, init=False)
    """Arrays that are being rebuilt, by client."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._looks = Ticker(self._env, LOOK_S, self._look)

    def carry_out(self, client: Client, plan: RecoveryPlan) -> None:
        """Carry out a plan, on slices that are bound and with programs that are compiled."""
        if client.arrays.lost and (plan.restores or plan.uploads or plan.runs):
            self._env.log(
                "info",
                "rebuilding",
                client=client.number,
                from_replicas=len(plan.restores),
                from_client=len(plan.uploads),
                runs=len(plan.runs),
            )
            begun = self.rebuilding.setdefault(client.number, _Rebuilding(self._env.now_s()))
            begun.arrays.update(client.arrays.lost)
            self._looks.start()
        names = dict(client.brought)
        for number, sources in plan.restores.items():
            self._restore(client, number, sources, names)
        for number in plan.uploads:
            source = client.lineage.origins[number].source
            is_taken = isinstance(source, msg.OfferSource)
            name, array = self._bring(client, number, names, by_run=is_taken)
            if isinstance(source, msg.OfferSource):
                if name != number:
                    client.brought[number] = name
                self.handovers.ask(number, name)
                continue
            if source is not None:
                self.read(name, array, source)
                continue
            array.input = number
            self.sessions.tell(client, msg.UploadAgain(number, name))
        temporary: list[tuple[int, ArrayEntry]] = []
        failed: dict[int, ErrorReport] = {}
        for record in plan.runs:
            self._repeat(client, record, names, failed, temporary)
        for number, error in failed.items():
            if number in client.arrays.lost:
                client.arrays.fail((number,), error)
                self.sessions.tell(client, msg.RunFailed(0, (number,), error))
            self.handovers.failed(client, number, error)
        self._islands.release(client.number, temporary)
        self.registry.uninstall_retired(client)

    def _look(self) -> bool:
        """Log of which clients all lost arrays have come, or have failed; runs may still compute them."""
        for number, begun in list(self.rebuilding.items()):
            client = self.sessions.get(number)
            if client is not None and any(map(client.arrays.is_on_its_way, begun.arrays)):
                continue
            del self.rebuilding[number]
            if client is not None:
                seconds = round(self._env.now_s() - begun.since_s, 1)
                self._env.log("info", "rebuilt", client=number, seconds=seconds)
        return bool(self.rebuilding)

    def _restore(
        self, client: Client, number: int, sources: tuple[msg.BoxSource, ...], names: dict[int, int]
    ) -> None:
        """Have the hosts of an array make it from replicas."""
        name, array = self._bring(client, number, names)
        array.restored = True
        array.input = 0
        devices = self._islands.located(array.spec)
        for host in array.hosts:
            boxes = {
                array.spec.box(position)
                for position, device in enumerate(devices)
                if device.host == host
            }
            chosen = tuple(source for source in sources if source.box in boxes)
            holders = dict.fromkeys(source.host for source in chosen)
            permits = {
                holder: self.sessions.claims.permit(number, holder, host) for holder in holders
            }
            error = client.lineage.origins[number].value_error
            restore = msg.Restore(name, number, array.spec, devices, chosen, permits, error)
            self._env.send(store_of(host), restore)
        self._env.count("arrays_restored")

    def _bring(
        self, client: Client, number: int, names: dict[int, int], *, by_run: bool = False
    ) -> tuple[int, ArrayEntry]:
        """Expect an array on its hosts, `by_run` of another client or not; return it with its id.

        An array that the client does not hold, or that has failed for good, is only needed for runs
        that are repeated: it is discarded when it has arrived.
        """
        spec = client.lineage.origins[number].spec
        home = holders(spec, self._islands.bindings)
        assert home is not None, "slices are bound before anything is rebuilt"
        array = client.arrays.get(number)
        if array is not None and array.is_lost:
            client.arrays.bring(number, *home)
        else:
            names[number] = number = client.new_id()
            array = client.arrays.discarded[number] = ArrayEntry(
                spec, *home, ArrayState.DISCARDED, frozenset(home[1])
            )
        if not by_run:
            self._islands.place(array.island, number, spec, is_back=True)
        return number, array

    def read(self, number: int, array: ArrayEntry, source: msg.FileSource) -> None:
        """Have the hosts of an array read it from files."""
        devices = self._islands.located(array.spec)
        for host in array.hosts:
            self._env.send(store_of(host), msg.ReadArray(number, source, array.spec, devices))

    def _repeat(
        self,
        client: Client,
        record: Record,
        names: dict[int, int],
        failed: dict[int, ErrorReport],
        temporary: list[tuple[int, ArrayEntry]],
    ) -> None:
        """Run a record again, under a new number."""
        program = record.program
        error = program.error or next(
            (failed[arg] for arg in arrays_in(record.args) if arg in failed), None
        )
        if error is not None:
            failed.update(dict.fromkeys(record.results, error))
            return
        record.count(self._env.now_s())
        args = tuple(names.get(arg, arg) if isinstance(arg, int) else arg for arg in record.args)
        arriving = []
        for arg in arrays_in(args):
            argument = client.arrays.find(arg)
            if argument is not None and argument.awaited:
                arriving.append(arg)
        homes = program.result_homes(self._islands.bindings)
        assert homes is not None, "slices are bound before anything is rebuilt"
        results = []
        imports = self.handovers.results(client, record) if client.wanted else {}
        for number, output, home in zip(record.results, program.body.outputs, homes, strict=True):
            if number in imports:
                results.append(imports[number])
                continue
            array = client.arrays.get(number)
            if array is not None and array.is_lost:
                client.arrays.replay(number, *home)
                results.append(number)
                continue
            name = client.new_id()
            if array is None or array.error is not None:
                names.setdefault(number, name)
            temporary.append((name, ArrayEntry(output.spec, *home)))
            results.append(name)
        self._env.count("runs_handing_over" if imports else "runs_repeated")
        awaits = tuple(dict.fromkeys(arriving))
        self.runs.submit(client, client.new_id(), record, args, tuple(results), awaits)
        if imports:
            self.handovers.submitted(record)
