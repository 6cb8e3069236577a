"""The work of a host: its runs, the pieces of work in its lanes, and the ops made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import ReferenceType

import msgspec

from pw.core.errors import ErrorReport
from pw.core.messages import ArrayCopy, CopyFile, Launch
from pw.devices.host.backend import Backend, Build, NotedLaunch, Op
from pw.devices.host.program import HostProgram, SegmentSteps
from pw.devices.host.store import ObjectStore
from pw.devices.host.tiers import Spilling
from pw.devices.host.value import Value


class HostRun(msgspec.Struct, eq=False):
    """One run of a program on this host, from its first launch here to its last."""

    run: int
    program: HostProgram
    slots: dict[int, Value]
    results: tuple[int, ...]
    began: int
    """Place of the run among the runs of this host."""
    slots_with_op: set[int] = msgspec.field(default_factory=set)
    """Slots of results whose op is submitted, or in the queue."""
    decisions: dict[Value, bool | ErrorReport | None] | None = None
    """Predicates of the run, or their errors; None for one that the backend reads."""
    held: dict[Value, Build] = msgspec.field(default_factory=dict)
    """Received values that are made only if a computation needs them (`HostProgram.held`)."""
    launched: int = -1
    """Newest segment of the run that was launched here; segments are launched in their order."""


@dataclass(slots=True)
class GuardedResults:
    """What a launch with guards or merges has made so far (`pw.devices.host.guards`)."""

    latest: dict[frozenset[int], Value] = field(default_factory=dict)
    """The last result on each set of devices, of those that are needed still."""
    merged: list[Value] = field(default_factory=list)
    """Results of the program that merges have made."""


class HostLaunch(msgspec.Struct, eq=False):
    """The launch of one segment on this host, and how far it is."""

    message: Launch
    run: HostRun
    segment: SegmentSteps
    position: int = 0
    """The next instruction."""
    last: tuple[ReferenceType[Value], ...] = ()
    """The last values that it makes on each device."""
    to_watch: tuple[Value, ...] = ()
    """Results that are watched as soon as their sends are submitted."""
    pending: int = 1
    """Ends that it waits for: its own enqueueing, and one for each watched result."""
    enqueued_s: float = 0.0
    """Time, in seconds, at which the launch was enqueued and its results from other hosts had come."""
    lost: ErrorReport | None = None
    """Error of a value that the launch has read and that was lost."""
    began_s: float | None = None
    """Time, in seconds, at which the first computation was enqueued whose results wait for their outcome."""
    busy_s: float = 0.0
    """The device time that it is charged with."""
    guarded_results: GuardedResults | None = None
    """Results of a segment with guards or merges, without the skipped ones; None for other segments."""
    noted: NotedLaunch | None = None
    """Times of the launch, if it is noted (`pw.devices.host.pace`)."""

    @property
    def is_watched(self) -> bool:
        """Whether this host looks for its end."""
        return self.message.report or self.noted is not None

    @property
    def name(self) -> tuple[int, int]:
        """Its run and segment."""
        return self.run.run, self.message.segment


@dataclass(frozen=True, slots=True)
class Forgetting:
    """Work: the backend forgets computations, and runs end."""

    keys: tuple[bytes, ...]
    runs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Replicating:
    """Work: shards are copied to host memory, or to files."""

    client: int
    copies: tuple[tuple[ArrayCopy, Value | None], ...]
    files: tuple[tuple[CopyFile, tuple[Value | None, ...]], ...]

    def values(self) -> Iterator[Value | None]:
        """All values that it reads."""
        yield from (value for _, value in self.copies)
        yield from (value for _, values in self.files for value in values)


Work = HostLaunch | Forgetting | Replicating | Spilling


RecentLaunch = tuple[int, int, HostProgram, tuple[ReferenceType[Value], ...]]
"""The run, segment and program of an enqueued launch, and its last values, which it does not hold."""


class Arriving(dict[Value, list[Callable[[], None]]]):
    """The values that no op may use yet, each with the calls to be made when it arrives.

    They are on their way from another host, or their outcome is not known
    (`pw.devices.host.outcomes`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.unsettled: dict[Value, str] = {}
        """Values without an outcome, with the names of their computations."""
        self.of_functions: set[Value] = set()
        """Those of them that Python functions of this host make."""

    def arrive(self, value: Value) -> None:
        """Make the calls that wait for a value."""
        for act in self.pop(value):
            act()

    def when_here(self, values: Sequence[Value], act: Callable[[], None]) -> None:
        """Call `act` as soon as none of these values is missing."""
        missing = [value for value in dict.fromkeys(values) if value in self] if self else []
        if not missing:
            act()
            return

        def arrived(value: Value) -> None:
            missing.remove(value)
            if not missing:
                act()

        for value in missing:
            self[value].append(partial(arrived, value))


class OpQueue:
    """Collects the ops of a message, and submits them together."""

    def __init__(self, backend: Backend, store: ObjectStore) -> None:
        self._backend = backend
        self._requests = store.requests
        self.ops: list[Op] = []
        self.arrays: list[tuple[int, Value]] = []
        """Arrays, by id, whose op is in `ops`, and that the store has to know of."""

    def flush(self) -> None:
        """Submit the ops, then tell the store which arrays they make."""
        if self.ops:
            batch, self.ops = self.ops, []
            self._backend.submit(batch)
        if self.arrays:
            arrays, self.arrays = self.arrays, []
            for array, value in arrays:
                self._requests.submitted(array, value)
