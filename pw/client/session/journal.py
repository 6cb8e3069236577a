"""All that a session has told its controller, as far as another controller needs it.

A controller keeps nothing on disk. When it is started again, each client tells it what the last one
knew: slices, programs, and the runs and inputs from which the client's arrays were made. The
controller says how far back that goes (`ForgetRuns`, `ForgetInputs`): its lineage ends at inputs
and at checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import Part, handles
from pw.core.compact import Compact
from pw.core.errors import ErrorReport
from pw.core.ids import Address, arrays_in
from pw.core.messages.artifacts import Artifacts
from pw.core.sharding import ArraySpec

_LEAST = 64
"""Tables with fewer entries are not pruned."""


class Journal(Part):
    """A client's copy of what its controller knows of it."""

    def __init__(self) -> None:
        self.slices: dict[int, msg.AllocateSlice] = {}
        self.bound: dict[int, msg.SliceBound] = {}
        self._hosts: dict[int, dict[str, None]] = {}
        """The hosts that each slice is or was bound to: they may have its arrays."""
        self._programs: dict[int, msg.RegisterProgram] = {}
        self._released: set[int] = set()
        """Programs that the client has released, and that runs in the journal still need."""
        self._runs_of: Counter[int] = Counter()
        self._effects: dict[int, tuple[tuple[int, ...], tuple[ArraySpec, ...]]] = {}
        """Positions of the donated arguments of each program, and the specs of its results."""
        self.artifacts = Artifacts()
        """Artifacts of all programs in the journal: the client sends each artifact once."""
        self.inputs: dict[int, msg.CreateArray] = {}
        self.runs: dict[int, msg.Run] = {}
        self.offers: dict[int, msg.Offer] = {}
        self.publications: dict[int, msg.Publish] = {}
        """Versions of names that arrive or that lookups find, by request."""
        self._published: dict[int, int] = {}
        """Requests of these publications, by the runs of their offers."""
        self.held: dict[int, ArraySpec] = {}
        self._failed: dict[int, ErrorReport] = {}
        self._copied: set[int] = set()
        self._copied_limit = _LEAST
        self.requests: dict[int, object] = {}
        self._requests_limit = _LEAST
        self.in_flight = 0
        """Runs that have not been settled."""
        self._noters: dict[type, Callable[..., None]] = {
            msg.Run: self._run,
            msg.Delete: lambda message: self._let_go(message.arrays),
            msg.CreateArray: self._create,
            msg.Offer: lambda message: self.offers.update({message.run: message}),
            msg.Publish: self._publish,
            msg.RegisterProgram: self._register,
            msg.ReleaseProgram: self._release_program,
            msg.AllocateSlice: lambda message: self.slices.update({message.slice: message}),
            msg.ReleaseSlice: lambda message: self._forget_slice(message.slice),
        }

    def __contains__(self, array: int) -> bool:
        """Whether the client has this array, and has not deleted or donated it."""
        return array in self.held

    # --- from the client -----------------------------------------------------------------------------

    def record(self, message: object) -> None:
        """Write down a message that was sent to the controller."""
        note = self._noters.get(type(message))
        if note is not None:
            note(message)
        elif (request := getattr(message, "request", None)) is not None:
            self.requests[request] = message

    def _register(self, message: msg.RegisterProgram) -> None:
        body = message.body.value()
        self._programs[message.program] = msgspec.structs.replace(
            message, artifacts=self.artifacts.of(body, message.artifacts)
        )
        self._effects[message.program] = (body.donated, tuple(o.spec for o in body.outputs))

    def _release_program(self, message: msg.ReleaseProgram) -> None:
        self._released.add(message.program)
        self._drop_program(message.program)

    def _drop_program(self, number: int) -> None:
        if number in self._released and not self._runs_of[number]:
            self._released.discard(number)
            self._programs.pop(number, None)
            self._effects.pop(number, None)
            del self._runs_of[number]

    def _create(self, message: msg.CreateArray) -> None:
        self.inputs[message.array] = message
        self.held[message.array] = message.spec

    def _publish(self, message: msg.Publish) -> None:
        self.publications[message.request] = self.requests[message.request] = message
        for offer in message.offers:
            self._published[offer.run] = message.request

    def _run(self, message: msg.Run) -> None:
        self.in_flight += 1
        effects = self._effects.get(message.program)
        if effects is None:
            return
        donated, specs = effects
        self.runs[message.run] = message
        self._runs_of[message.program] += 1
        if donated:
            self._let_go(arrays_in(message.args[index] for index in donated))
        self.held.update(zip(message.results, specs, strict=False))

    def _let_go(self, arrays: Sequence[int]) -> None:
        for array in arrays:
            self.held.pop(array, None)
        if self._failed and not self._failed.keys().isdisjoint(arrays):
            self._prune_failed()

    def _prune_failed(self) -> None:
        """Forget failed arrays that neither the client has nor a run in the journal reads."""
        if self._failed:
            interest = self._of_interest()
            self._failed = {a: error for a, error in self._failed.items() if a in interest}

    # --- from the controller -------------------------------------------------------------------------

    @handles(msg.SliceBound)
    def _on_bound(self, sender: Address, message: msg.SliceBound) -> None:
        if message.slice in self.slices:  # one that was given back may be bound once more
            self.bound[message.slice] = message
            hosts = self._hosts.setdefault(message.slice, {})
            hosts.update(dict.fromkeys(device.host for device in message.devices))

    @handles(msg.SliceRefused)
    def _on_refused(self, sender: Address, message: msg.SliceRefused) -> None:
        self._forget_slice(message.slice)

    def _forget_slice(self, slice: int) -> None:
        self.slices.pop(slice, None)
        self.bound.pop(slice, None)
        self._hosts.pop(slice, None)

    @handles(msg.RunsSettled)
    def _on_settled(self, sender: Address, message: msg.RunsSettled) -> None:
        self.in_flight -= message.count

    @handles(msg.RunFailed)
    def _on_run_failed(self, sender: Address, message: msg.RunFailed) -> None:
        # A run in the journal may read what the client has deleted meanwhile.
        is_held = self.held.keys() >= set(message.results)
        interest = self.held.keys() if is_held else self._of_interest()
        for array in message.results:
            if array in interest:
                self._failed[array] = message.error
        run = self.runs.get(message.run)
        if run is not None and self._failed.keys() >= self.held.keys() & set(run.results):
            self._forget_run(message.run)

    @handles(msg.ForgetRuns)
    def _on_forget_runs(self, sender: Address, message: msg.ForgetRuns) -> None:
        for number in message.runs:
            self._forget_run(number)

    def _forget_run(self, number: int) -> None:
        self.offers.pop(number, None)
        if (request := self._published.get(number)) is not None:
            self._forget_publication(request)
        run = self.runs.pop(number, None)
        if run is not None:
            self._runs_of[run.program] -= 1
            self._drop_program(run.program)

    def _forget_publication(self, request: int) -> None:
        publication = self.publications.pop(request, None)
        for offer in () if publication is None else publication.offers:
            self._published.pop(offer.run, None)

    @handles(msg.VersionEnded, msg.RequestFailed)
    def _on_version_ended(
        self, sender: Address, message: msg.VersionEnded | msg.RequestFailed
    ) -> None:
        self._forget_publication(message.request)

    @handles(msg.Published)
    def _on_published(self, sender: Address, message: msg.Published) -> None:
        published = self.publications.get(message.request)
        if published is not None:
            self.publications[message.request] = msgspec.structs.replace(
                published, version=message.version
            )

    @handles(msg.ForgetInputs)
    def _on_forget_inputs(self, sender: Address, message: msg.ForgetInputs) -> None:
        for array in message.arrays:
            self.inputs.pop(array, None)

    @handles(msg.Answered)
    def _on_answered(self, sender: Address, message: msg.Answered) -> None:
        asked = self.requests.pop(message.request, None)
        if isinstance(asked, msg.Checkpoint) and message.error is None:
            self._copied.update(asked.arrays)
            if len(self._copied) > self._copied_limit:
                self._copied &= self._of_interest()
                self._copied_limit = 2 * len(self._copied) + _LEAST

    def open_requests(self, is_open: Callable[[int], bool]) -> list[object]:
        """Return the requests that the controller has not answered; forget those that are not open."""
        self.requests = {n: message for n, message in self.requests.items() if is_open(n)}
        return list(self.requests.values())

    def prune_requests(self, is_open: Callable[[int], bool]) -> None:
        """Forget requests that are not open any more, when there are many."""
        if len(self.requests) > self._requests_limit:
            self._requests_limit = 2 * len(self.open_requests(is_open)) + _LEAST

    # --- another controller --------------------------------------------------------------------------

    def retold(self) -> Iterator[object]:
        """Yield everything once more, for a controller that knows nothing of this client."""
        for slice, request in self.slices.items():
            bound, hosts = self.bound.get(slice), tuple(self._hosts.get(slice, ()))
            yield msgspec.structs.replace(
                request,
                resumed=True,
                formerly="" if bound is None else bound.island,
                former_hosts=hosts,
                former_devices=() if bound is None else bound.devices,
            )
        sent: set[bytes] = set()
        for number, program in self._programs.items():
            new = tuple(artifact for artifact in program.artifacts if artifact.digest not in sent)
            sent.update(artifact.digest for artifact in new)
            yield msgspec.structs.replace(program, artifacts=new, released=number in self._released)
        for created in self.inputs.values():
            yield msgspec.structs.replace(created, bound=0)
        yield from self.runs.values()
        yield from self.offers.values()
        yield from self.publications.values()
        lineage = self.inputs.keys() | {a for run in self.runs.values() for a in run.results}
        self._copied &= self._of_interest()
        self._prune_failed()
        arrays = [msg.KnownArray(a, spec) for a, spec in self.held.items() if a not in lineage]
        yield msg.Resumed(
            tuple(self.held),
            Compact.of(msg.KnownArrays(tuple(arrays))),
            tuple(msg.FailedArray(a, error) for a, error in self._failed.items()),
            tuple(sorted(self._copied)),
        )

    def _of_interest(self) -> set[int]:
        """Return the arrays that the client has, and those that runs in the journal read."""
        read = {arg for run in self.runs.values() for arg in arrays_in(run.args)}
        published = (offer for one in self.publications.values() for offer in one.offers)
        read.update(*(offer.arrays for offer in (*self.offers.values(), *published)))
        return read | self.held.keys()
