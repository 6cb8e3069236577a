"""How each array of a client came to be, as far back as it may be needed again.

A *record* is a run: the program, what it read, what it made. A record is kept while one of its
results is needed: because the client holds it, or because another kept record reads it. Lineage
ends at an array of which there are replicas, and at an input, which the client keeps. The number of
records is bounded: the oldest go first, and what they made can then not be made again. Nothing here
sends a message: `drain` returns what nothing needs any more.

A record, like an array, counts how often it is tried again. Tries that follow each other closely
are one attempt, because a network may need a while to heal. After `ATTEMPTS` attempts it is given
up.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pw.core.errors import ErrorReport
from pw.core.ids import arrays_in
from pw.core.messages import FileSource, OfferSource
from pw.core.sharding import ArraySpec
from pw.sched.control.programs import RegisteredProgram

RECORDS_KEPT = 16_384
"""Number of records of one client."""

VALUES_KEPT = 1 << 20
"""Number of arrays that the records of one client read and make together; each takes some hundred bytes
here."""

VALUE_BYTES = 256
"""Bytes of small values in a run that count as one array."""

ATTEMPTS = 16
"""Number of attempts at one run or one array, before it is given up."""
ANEW_S = 60.0
"""Seconds without an attempt after which counting begins anew."""
ATTEMPT_S = 4.0
"""Seconds within which all tries are one attempt."""
AGAIN_S = 0.02
"""Seconds of the first pause before another try."""
DOUBLINGS = 7
"""Number of times that the pause is doubled, once for each try."""


def pause_s(tries: int) -> float:
    """Return the pause before the next try, in seconds."""
    return AGAIN_S * (1 << min(tries, DOUBLINGS))


@dataclass(slots=True, kw_only=True, eq=False)
class Attempts:
    """Counts the tries at one thing."""

    tries: int = 0
    attempts: int = 0
    attempted_s: float = -math.inf
    """Time at which the last attempt began, in seconds."""

    def count(self, now_s: float) -> None:
        """Count one more try."""
        since_s = now_s - self.attempted_s
        if since_s >= ANEW_S:
            self.tries = self.attempts = 0
        self.tries += 1
        if since_s >= ATTEMPT_S:
            self.attempts += 1
            self.attempted_s = now_s

    def in_vain(self, now_s: float) -> bool:
        """Return whether it was attempted so often that it is given up."""
        return self.attempts >= ATTEMPTS and now_s - self.attempted_s < ANEW_S


@dataclass(slots=True, eq=False)
class Record(Attempts):
    """One run, so that it can be run again."""

    order: int
    """Number of the run; runs with lower numbers made what it reads."""
    program: RegisteredProgram
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]
    wanted: int = 0
    """Number of its results that are needed."""
    weight: int = 0
    """Number of values that the run has read and made."""


@dataclass(slots=True, eq=False)
class Origin:
    """Source of an array, and the records that need it."""

    spec: ArraySpec
    maker: Record | None
    """Record of the run that made the array; None for an input, and if the run cannot be repeated."""
    is_input: bool = False
    source: FileSource | OfferSource | None = None
    """Source of an input, if the client does not upload it."""
    held: bool = True
    readers: int = 0
    """Number of kept records that read the array."""
    replicated: bool = False
    """True if a checkpoint has put replicas of the whole array in host memory."""
    error: ErrorReport | None = None
    """Error of the array, if the client does not hold it any more."""
    value_error: ErrorReport | None = None
    """Error that the array has on its hosts in place of values, if a copy has shown it."""
    lasting: bool = False
    """True if there were such replicas, and they are kept when they come back."""


@dataclass(slots=True)
class Unneeded:
    """Arrays, inputs, runs and slices that nothing can ask for any more."""

    arrays: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)


class Lineage:
    """The origins of one client's arrays."""

    def __init__(
        self,
        records_kept: int = RECORDS_KEPT,
        values_kept: int = VALUES_KEPT,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._wake = wake
        """Called when `drain` is to be called, for an owner that is not looked at in each turn."""
        self.origins: dict[int, Origin] = {}
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._slices: Counter[int] = Counter()
        """Number of programs of records that touch each slice."""
        self._records_kept = records_kept
        self._weight = 0
        self._values_kept = values_kept
        self._unneeded = Unneeded()

    def __len__(self) -> int:
        return len(self._records)

    def maker(self, array: int) -> Record | None:
        """Return the record that makes an array, if there is one."""
        origin = self.origins.get(array)
        return None if origin is None else origin.maker

    def touches(self, slice: int) -> bool:
        """Return whether a record has something on this slice."""
        return slice in self._slices

    def add_input(
        self, array: int, spec: ArraySpec, source: FileSource | OfferSource | None = None
    ) -> None:
        """The client uploads an array, or it comes from files or from another client."""
        self.origins[array] = Origin(spec, None, is_input=True, source=source)

    def add_known(self, array: int, spec: ArraySpec) -> None:
        """Only replicas can bring this array back, unless its origin is known."""
        self.origins.setdefault(array, Origin(spec, None))

    def has_failed(self, array: int, error: ErrorReport) -> None:
        """Note why an array has failed that the client lets go, and that nothing can make again."""
        origin = self.origins.get(array)
        if origin is not None and origin.maker is None and not origin.is_input:
            origin.error = error

    def refuse_run(self, order: int) -> None:
        """A run is refused: there is nothing to remember of it."""
        self._unneeded.runs.append(order)
        if self._wake is not None:
            self._wake()

    def add_run(
        self,
        order: int,
        program: RegisteredProgram,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
    ) -> Record:
        """A run is submitted; its results are held by the client."""
        weight, arrays = len(args) + len(results), arrays_in(args)
        if len(arrays) < len(args):
            weight += sum(len(arg) // VALUE_BYTES for arg in args if isinstance(arg, bytes))
        record = Record(order, program, args, results, len(results), weight)
        origins = self.origins
        for array, output in zip(results, program.body.outputs, strict=True):
            origins[array] = Origin(output.spec, record)
        if results:
            self._records[order] = record
            program.kept += 1
            if program.kept == 1:
                for slice in program.slices:
                    self._slices[slice] += 1
            for arg in arrays:
                if (origin := origins.get(arg)) is not None:
                    origin.readers += 1
            self._weight += weight
            while len(self._records) > self._records_kept or self._weight > self._values_kept:
                self._cut(next(iter(self._records.values())))
        else:
            self.refuse_run(order)
        return record

    def release(self, arrays: Iterable[int]) -> None:
        """The client no longer holds these arrays, or has donated them."""
        for array in arrays:
            origin = self.origins.get(array)
            if origin is not None and origin.held:
                origin.held = False
                self._reconsider(array)

    def hold(self, arrays: Iterable[int]) -> None:
        """Another client may need what these arrays are made of."""
        for array in arrays:
            if (origin := self.origins.get(array)) is not None:
                origin.readers += 1

    def let_go(self, arrays: Iterable[int]) -> None:
        """Undo `hold`."""
        for array in arrays:
            if (origin := self.origins.get(array)) is not None:
                origin.readers -= 1
                self._reconsider(array)

    def replicated(self, array: int) -> None:
        """Forget how an array was made: all of it is in host memory."""
        origin = self.origins.get(array)
        if origin is not None and not origin.replicated:
            origin.replicated = origin.lasting = True
            if origin.maker is not None:
                self._unwant([origin])

    def was_replicated(self, array: int) -> None:
        """Note that all of an array was in host memory, and may come back."""
        origin = self.origins.get(array)
        if origin is not None:
            origin.lasting = True

    def replicas_lost(self, array: int) -> None:
        """Not all of an array is in host memory any more."""
        origin = self.origins.get(array)
        if origin is not None:
            origin.replicated = False

    @property
    def has_unneeded(self) -> bool:
        """Whether `drain` returns something."""
        return bool(self._unneeded.arrays or self._unneeded.runs)

    def drain(self) -> Unneeded:
        """Return what has become unneeded since the last call."""
        unneeded, self._unneeded = self._unneeded, Unneeded()
        return unneeded

    def sources(self, arrays: Iterable[int], is_there: Callable[[int], bool]) -> set[int]:
        """Return the arrays, of those that are there, of which others can be made again.

        Args:
            arrays: arrays that are to be made again.
            is_there: whether an array exists, so that it need not be made again.
        """
        sources: set[int] = set()
        seen: set[int] = set()
        stack = list(arrays)
        while stack:
            array = stack.pop()
            origin = self.origins.get(array)
            if array in seen or origin is None or origin.maker is None:
                continue
            seen.add(array)
            for arg in arrays_in(origin.maker.args):
                (sources.add if is_there(arg) else stack.append)(arg)
        return sources

    # --- what is still needed -------------------------------------------------------------------

    def _reconsider(self, array: int) -> None:
        """Forget an array that nothing needs, and what was kept for its sake."""
        origin = self.origins[array]
        if origin.held or origin.readers:
            return
        self._forget(array, origin)
        if origin.maker is not None:
            self._unwant([origin])

    def _forget(self, array: int, origin: Origin) -> None:
        del self.origins[array]
        if origin.is_input:
            self._unneeded.inputs.append(array)
        self._unneeded.arrays.append(array)
        if self._wake is not None:
            self._wake()

    def _unwant(self, origins: list[Origin]) -> None:
        """Forget the makers of these origins; a loop, because chains are long."""
        while origins:
            origin = origins.pop()
            maker, origin.maker = origin.maker, None
            if maker is None:
                continue
            maker.wanted -= 1
            if not maker.wanted:
                origins += self._drop(maker)

    def _drop(self, record: Record) -> list[Origin]:
        """Drop a record; return the origins that it has read and that nothing needs any more."""
        if self._records.pop(record.order, None) is None:
            return []
        self._weight -= record.weight
        self._unneeded.runs.append(record.order)
        if self._wake is not None:
            self._wake()
        record.program.kept -= 1
        if not record.program.kept:
            self._leave(record.program.slices)
        unneeded = []
        for arg in arrays_in(record.args):
            read = self.origins.get(arg)
            if read is None:
                continue
            read.readers -= 1
            if not read.readers and not read.held:
                self._forget(arg, read)
                unneeded.append(read)
        return unneeded

    def _leave(self, slices: Iterable[int]) -> None:
        """The last record of a program that touches these slices is gone."""
        for slice in slices:
            self._slices[slice] -= 1
            if not self._slices[slice]:
                del self._slices[slice]
                self._unneeded.slices.append(slice)

    def _cut(self, record: Record) -> None:
        """Drop a record because too much is kept; its results cannot be made again."""
        for array in record.results:
            origin = self.origins.get(array)
            if origin is not None and origin.maker is record:
                origin.maker = None
        self._unwant(self._drop(record))
