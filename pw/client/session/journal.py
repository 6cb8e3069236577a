"""What the controller has been told, as far as another one would have to know it.

A controller keeps nothing that outlives it. Should it be started again, its clients tell the new one what
they told the old one: slices, programs, and the runs and inputs from which what they have now was made.
How far back that goes, the controller says itself (`ForgetRuns`, `ForgetInputs`): its lineage ends at
inputs and at checkpoints, so what is kept here is as much as is kept there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set

import msgspec

from pw.core.artifacts import Artifacts
from pw.core.compact import Compact
from pw.core.errors import ErrorReport
from pw.core.ids import arrays_in
from pw.core.messages import (
    AllocateSlice,
    Checkpoint,
    CreateArray,
    Delete,
    FailedArray,
    KnownArray,
    KnownArrays,
    RegisterProgram,
    ReleaseProgram,
    ReleaseSlice,
    Resumed,
    Run,
    SliceBound,
)
from pw.core.sharding import ArraySpec

_LEAST = 64
"""Entries that are not worth to be looked through."""


class Journal:
    """One client's side of what its controller knows."""

    def __init__(self) -> None:
        self._slices: dict[int, AllocateSlice] = {}
        self._islands: dict[int, str] = {}
        self._programs: dict[int, RegisterProgram] = {}
        self._released: set[int] = set()
        """Programs that are kept only for the runs that were made of them."""
        self._runs_of: Counter[int] = Counter()
        self._effects: dict[int, tuple[tuple[int, ...], tuple[ArraySpec, ...]]] = {}
        """Positions of the arguments that a program takes away, and what it makes."""
        self._artifacts = Artifacts()
        """Those of all programs that are kept: some were sent with an earlier one."""
        self._inputs: dict[int, CreateArray] = {}
        self._runs: dict[int, Run] = {}
        self._held: dict[int, ArraySpec] = {}
        self._failed: dict[int, ErrorReport] = {}
        self._copied: set[int] = set()
        self._copied_limit = _LEAST
        self._requests: dict[int, object] = {}
        self._requests_limit = _LEAST
        self.in_flight = 0
        """Runs that have not been settled."""
        self._notes: dict[type, Callable[..., None]] = {
            Run: self._run,
            Delete: self._delete,
            CreateArray: self._create,
            RegisterProgram: self._register,
            ReleaseProgram: self._release_program,
            AllocateSlice: self._allocate,
            ReleaseSlice: self._release_slice,
        }

    def __contains__(self, array: int) -> bool:
        """Whether the client has this array, and has not given it away."""
        return array in self._held

    # --- what the client says ------------------------------------------------------------------------

    def told(self, message: object) -> None:
        """This has been sent to the controller."""
        note = self._notes.get(type(message))
        if note is not None:
            note(message)
        elif (request := getattr(message, "request", None)) is not None:
            self._requests[request] = message

    def _allocate(self, message: AllocateSlice) -> None:
        self._slices[message.slice] = message

    def _release_slice(self, message: ReleaseSlice) -> None:
        self.slice_refused(message.slice)

    def _register(self, message: RegisterProgram) -> None:
        body = message.body.whole()
        self._programs[message.program] = msgspec.structs.replace(
            message, artifacts=self._artifacts.of(body, message.artifacts)
        )
        self._effects[message.program] = (body.donated, tuple(o.spec for o in body.outputs))

    def _release_program(self, message: ReleaseProgram) -> None:
        self._released.add(message.program)
        self._drop_program(message.program)

    def _drop_program(self, number: int) -> None:
        if number in self._released and not self._runs_of[number]:
            self._released.discard(number)
            self._programs.pop(number, None)
            self._effects.pop(number, None)
            del self._runs_of[number]

    def _create(self, message: CreateArray) -> None:
        self._inputs[message.array] = message
        self._held[message.array] = message.spec

    def _run(self, message: Run) -> None:
        self.in_flight += 1
        effects = self._effects.get(message.program)
        if effects is None:
            return
        donated, made = effects
        self._runs[message.run] = message
        self._runs_of[message.program] += 1
        self._let_go(arrays_in(message.args[index] for index in donated))
        self._held.update(zip(message.results, made, strict=False))

    def _delete(self, message: Delete) -> None:
        self._let_go(message.arrays)

    def _let_go(self, arrays: Sequence[int]) -> None:
        for array in arrays:
            self._held.pop(array, None)
        if self._failed and not self._failed.keys().isdisjoint(arrays):
            self._prune_failed()

    def _prune_failed(self) -> None:
        """A run may have read what has failed and been deleted since: then it fails in the same way."""
        if self._failed:
            interest = self._of_interest()
            self._failed = {a: error for a, error in self._failed.items() if a in interest}

    @property
    def slices(self) -> Set[int]:
        """Slices that another controller will be told of."""
        return self._slices.keys()

    # --- what the controller says --------------------------------------------------------------------

    def slice_bound(self, message: SliceBound) -> None:
        """The slice lies there."""
        if message.slice in self._slices:  # one that was given back may be bound once more
            self._islands[message.slice] = message.island

    def slice_refused(self, slice: int) -> None:
        """There is no such slice."""
        self._slices.pop(slice, None)
        self._islands.pop(slice, None)

    def settled(self, count: int) -> None:
        """So many runs have ended."""
        self.in_flight -= count

    def failed(self, run: int, arrays: tuple[int, ...], error: ErrorReport) -> None:
        """These arrays never will be."""
        for array in arrays:
            if array in self._held:
                self._failed[array] = error
        made = self._runs.get(run)
        if made is not None and self._failed.keys() >= self._held.keys() & set(made.results):
            self.forget_runs((run,))

    def forget_runs(self, runs: tuple[int, ...]) -> None:
        """Nothing is made of these runs any more that could be lost."""
        for number in runs:
            run = self._runs.pop(number, None)
            if run is not None:
                self._runs_of[run.program] -= 1
                self._drop_program(run.program)

    def forget_inputs(self, arrays: tuple[int, ...]) -> None:
        """Nor of these inputs."""
        for array in arrays:
            self._inputs.pop(array, None)

    def answered(self, request: int, error: ErrorReport | None) -> None:
        """The controller has done what it was asked to."""
        message = self._requests.pop(request, None)
        if isinstance(message, Checkpoint) and error is None:
            self._copied.update(message.arrays)
            if len(self._copied) > self._copied_limit:
                self._copied &= self._of_interest()
                self._copied_limit = 2 * len(self._copied) + _LEAST

    def open_requests(self, is_open: Callable[[int], bool]) -> list[object]:
        """What the controller was asked and has not answered; forgets the rest."""
        self._requests = {n: message for n, message in self._requests.items() if is_open(n)}
        return list(self._requests.values())

    def prune_requests(self, is_open: Callable[[int], bool]) -> None:
        """Forget requests that nobody waits for, now and then."""
        if len(self._requests) > self._requests_limit:
            self._requests_limit = 2 * len(self.open_requests(is_open)) + _LEAST

    # --- another controller --------------------------------------------------------------------------

    def retold(self) -> Iterator[object]:
        """Everything once more, for a controller that knows nothing of it."""
        for slice, request in self._slices.items():
            home = self._islands.get(slice, "")
            yield msgspec.structs.replace(request, resumed=True, formerly=home)
        sent: set[bytes] = set()
        for number, program in self._programs.items():
            new = tuple(artifact for artifact in program.artifacts if artifact.digest not in sent)
            sent.update(artifact.digest for artifact in new)
            yield msgspec.structs.replace(program, artifacts=new, released=number in self._released)
        for created in self._inputs.values():
            yield msgspec.structs.replace(created, bound=0)
        yield from self._runs.values()
        made = self._inputs.keys() | {a for run in self._runs.values() for a in run.results}
        self._copied &= self._of_interest()
        self._prune_failed()
        known = [KnownArray(a, spec) for a, spec in self._held.items() if a not in made]
        yield Resumed(
            tuple(self._held),
            Compact.of(KnownArrays(tuple(known))),
            tuple(FailedArray(a, error) for a, error in self._failed.items()),
            tuple(sorted(self._copied)),
        )

    def _of_interest(self) -> set[int]:
        """Arrays that the client has, or that something which it has was made of."""
        read = {arg for run in self._runs.values() for arg in arrays_in(run.args)}
        return read | self._held.keys()
