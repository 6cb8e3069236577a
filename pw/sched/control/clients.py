"""What the controller remembers of a client, and whether a run of its can be.

Everything a client owns hangs on one `Client`, so that forgetting it is dropping it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from pw.core.errors import (
    ArgumentError,
    ArrayDeleted,
    ErrorReport,
    HostLost,
    NotOwner,
    ProtocolError,
)
from pw.core.ids import Address, arrays_in, client_id, client_of
from pw.core.messages import (
    AllocateSlice,
    Checkpoint,
    ClientStatus,
    CreateArray,
    Delete,
    Inquire,
    ReleaseProgram,
    ReleaseSlice,
    Run,
    SaveArrays,
)
from pw.core.sharding import ArraySpec, Binding, Placement, Sharding
from pw.sched.control.lineage import Lineage, Record
from pw.sched.control.programs import Home, RegisteredProgram

if TYPE_CHECKING:
    from pw.sched.control.recovery.resume import Resumption


@dataclass(slots=True)
class Array:
    """A logical array: one entry, whatever the number of its shards."""

    spec: ArraySpec
    island: str
    hosts: tuple[str, ...]
    uploading: frozenset[str] = frozenset()
    """Hosts that do not have their shards yet."""
    error: ErrorReport | None = None
    input: int = 0
    """What the client knows it as that uploads it; 0 if it does not come from the client."""
    restored: bool = False
    """It was made from copies in host memory, or had to be brought once more."""
    repeats: int = 0
    """How often it has not arrived, or was said not to be there."""
    attempts: int = 0
    """The same, as a `Record` has it."""
    attempted_s: float = -math.inf


@dataclass(slots=True)
class RunState:
    """A run whose segments have not all ended."""

    client: int
    record: Record
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]
    islands: tuple[str, ...]
    segments_left: int
    donated: list[tuple[int, Array]]
    """What the run takes away, and has not taken if it is cancelled."""
    credited: bool = True
    """It counts among the client's runs in flight; a run that is run again does not."""
    lost: ErrorReport | None = None
    """How a segment of it has ended without its value, because a host was lost."""
    began_s: float = 0.0
    """When it was submitted."""


class Poisoned(Exception):
    """A run cannot be, for a reason that is known already and goes on as it is."""

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report.message)
        self.report = report


CHECKPOINTS_AT_ONCE = 2
"""Of each kind, in memory and on disk, and of each client: every one has all its arrays in host memory."""

REPEATS = 1 << 39
"""Serials from here on are the controller's."""

NOWHERE = ArraySpec((), "bool", Sharding((), ()), Placement(0, ()))
"""The spec of an array whose run was refused: it never lies anywhere."""

Held = (
    Run | Delete | CreateArray | ReleaseProgram | ReleaseSlice | Checkpoint | SaveArrays | Inquire
)
"""What keeps its place in a client's order."""


@dataclass(slots=True)
class Client:
    """A client and all it owns."""

    address: Address
    number: int
    name: str
    slices: set[int] = field(default_factory=set)
    requests: dict[int, AllocateSlice] = field(default_factory=dict)
    """How its slices were asked for; also those that it gave back, while runs that used them are kept."""
    borrowed: set[int] = field(default_factory=set)
    """Slices that it gave back, and that are bound once more while something is rebuilt."""
    programs: dict[int, RegisteredProgram] = field(default_factory=dict)
    arrays: dict[int, Array] = field(default_factory=dict)
    doomed: dict[int, Array] = field(default_factory=dict)
    """Deleted while their upload was under way: dropped on their hosts when it has ended there."""
    early_uploads: dict[int, dict[str, ErrorReport | None]] = field(default_factory=dict)
    """Uploads that ended before their announcement came, or left the backlog."""
    backlog: deque[Held] = field(default_factory=deque)
    newest_input: int = 0
    last_run: int = 0
    in_flight: int = 0
    settled: int = 0
    unanswered: Counter[type[Checkpoint | SaveArrays]] = field(default_factory=Counter)
    """Checkpoints of each kind that are under way."""
    lineage: Lineage = field(default_factory=Lineage)
    unbound: dict[int, int] = field(default_factory=dict)
    """Slices whose island was lost and is expected back, and the number of that loss."""
    lost: dict[int, ErrorReport] = field(default_factory=dict)
    """Arrays that were lost and are to be rebuilt, and how they were lost."""
    retired: dict[int, RegisteredProgram] = field(default_factory=dict)
    """Released programs that are installed once more, to run again what they made."""
    unsure: set[int] = field(default_factory=set)
    """Uploads that may not have reached their hosts, and whose announcement is still in the backlog."""
    bounds: Counter[int] = field(default_factory=Counter)
    """How often each slice was bound."""
    repeats: int = 0
    """Numbers given to repeated runs, and to their results that nobody needs."""

    _specs: WeakKeyDictionary[ArraySpec, ref[ArraySpec]] = field(default_factory=WeakKeyDictionary)
    resuming: Resumption | None = None
    """It is telling what an earlier controller knew of it."""
    patient_until_s: float = 0.0
    """Until then hosts may come that have copies."""

    @property
    def recovering(self) -> bool:
        """Whether what the client sends has to wait."""
        return bool(self.unbound or self.lost or self.resuming)

    def has_slice(self, number: int) -> bool:
        """Whether a slice is to be bound for it."""
        return number in self.slices or number in self.borrowed

    def may_borrow(self, number: int) -> bool:
        """Whether a slice that it gave back can be bound once more."""
        return number in self.requests and not self.has_slice(number)

    def forget_request(self, number: int) -> None:
        """A slice need not be bound again, unless it is in use or what was made there may be needed."""
        if not self.has_slice(number) and not self.lineage.touches(number):
            self.requests.pop(number, None)

    def one_spec(self, spec: ArraySpec) -> ArraySpec:
        """The one object for all specs that equal `spec`.

        Every argument of a run is compared with what its program takes, and a spec names all its devices.
        """
        known = self._specs.setdefault(spec, ref(spec))()
        return spec if known is None else known

    def is_repeat(self, identifier: int) -> bool:
        """Whether a number is one that `repeat_id` has given."""
        return bool(identifier & REPEATS)

    def repeat_id(self) -> int:
        """A number that the client itself never gives."""
        self.repeats += 1
        return client_id(self.number, REPEATS + self.repeats)

    def must_wait(self, message: Held) -> bool:
        """Whether a message, and all behind it, has to wait for what it needs."""
        if self.recovering:
            return True
        if isinstance(message, Run):
            program = self.programs.get(message.program)
            return program is not None and bool(program.installing)
        if isinstance(message, (Checkpoint, SaveArrays)):
            return self.awaits_checkpoints(message) or self.awaits_uploads(message)
        return False

    def awaits_checkpoints(self, message: Checkpoint | SaveArrays) -> bool:
        """Whether so many are under way that this one has to wait for the end of one.

        They would fill the memory of hosts if they came faster than disk or network can take them. Nothing
        that they wait for can be held with what is behind this one: work is queued in the client's order.
        """
        return self.unanswered[type(message)] >= CHECKPOINTS_AT_ONCE

    def awaits_uploads(self, message: Checkpoint | SaveArrays) -> bool:
        """Whether something that is to be checkpointed has not arrived."""
        arrays = [self.arrays.get(number) for number in message.arrays]
        return any(array is not None and array.uploading for array in arrays)

    def donated_to(self, message: Run) -> tuple[int, ...]:
        """Arrays that a run takes away, whether it can be or not."""
        program = self.programs.get(message.program)
        if program is None or not program.body.donated:
            return ()
        args = message.args
        donated = [args[index] for index in program.body.donated if 0 <= index < len(args)]
        return tuple(arrays_in(donated))

    def take(self, number: int) -> Array | None:
        """Take an array out, which is deleted or donated; its upload may still be under way."""
        array = self.arrays.pop(number, None)
        if array is not None and array.uploading:
            self.doomed[number] = array
        return array

    def delete(self, arrays: tuple[int, ...]) -> list[tuple[int, Array]]:
        """Forget arrays; those that hosts may drop now."""
        self.lineage.release(arrays)
        taken = [(number, self.take(number)) for number in arrays]
        return [(n, array) for n, array in taken if array is not None and not array.uploading]

    def status(self, share: float, priority: int) -> ClientStatus:
        """What it has, in numbers."""
        return ClientStatus(
            self.number,
            self.name,
            len(self.arrays),
            len(self.programs),
            len(self.slices),
            self.in_flight,
            share,
            priority,
        )

    def program_of(self, message: Run) -> RegisteredProgram:
        """The program of a run. Raises if it is not known, failed, or takes and makes other arrays."""
        program = self.programs.get(message.program)
        if program is None:
            raise NotOwner(
                "a function was called that the controller does not know; make it anew with pw.jit"
            )
        if program.error is not None:
            raise Poisoned(program.error)
        if len(message.args) != len(program.body.inputs):
            raise ArgumentError(
                f"{program.body.name!r} takes {len(program.body.inputs)} arrays and was given "
                f"{len(message.args)}"
            )
        if len(message.results) != len(program.body.outputs):
            raise ArgumentError(
                f"{program.body.name!r} makes {len(program.body.outputs)} arrays, and "
                f"{len(message.results)} were expected of it"
            )
        return program

    def check_arguments(
        self, program: RegisteredProgram, args: tuple[int | bytes, ...]
    ) -> tuple[int, ...]:
        """Raise if an argument cannot be used; otherwise those whose upload has not ended."""
        awaits = []
        for position, (arg, spec) in enumerate(zip(args, program.body.inputs, strict=True)):
            if isinstance(arg, bytes):
                if len(arg) != spec.size_bytes:
                    raise ArgumentError(
                        f"{_argument(program, position)} takes {spec.size_bytes} bytes and has {len(arg)}"
                    )
                continue
            if client_of(arg) != self.number:
                raise NotOwner(
                    f"{_argument(program, position)} belongs to another client; pass its value, pw.get(x)"
                )
            array = self.arrays.get(arg)
            if array is None:
                raise ArrayDeleted(
                    f"{_argument(program, position)} was deleted or donated before this call; pass a copy "
                    "where it was, copy.copy(x), or do not donate it"
                )
            if array.error is not None:
                raise Poisoned(array.error)
            if array.spec is not spec and array.spec != spec:
                raise ArgumentError(
                    f"{_argument(program, position)} is {_lies(array.spec)}, where the function was traced for "
                    f"{_lies(spec)}"
                )
            if array.uploading:
                awaits.append(arg)
        return tuple(awaits)

    def check_results(
        self,
        program: RegisteredProgram,
        results: tuple[int, ...],
        bindings: Mapping[int, Binding],
    ) -> list[Home]:
        """Where each result will lie; raise unless they can be named so and lie somewhere."""
        for array in results:
            if client_of(array) != self.number or array in self.arrays:
                raise ProtocolError("a result has a number that is taken or is another client's")
        if len(set(results)) < len(results):
            raise ProtocolError("two results of a run have the same number")
        held = program.result_homes(bindings)
        if held is None:
            raise HostLost(
                f"{program.body.name!r} has no devices at the moment: a host of their island was lost. Call it "
                "again when the island has all its hosts (see pw.status())"
            )
        return held


def _argument(program: RegisteredProgram, position: int) -> str:
    spec = program.body.inputs[position]
    return f"argument {position} of {program.body.name!r}, {spec.short},"


def _lies(spec: ArraySpec) -> str:
    """How an array lies, as far as that can be said in a user's words."""
    split = [", ".join(axes) or "-" for axes in spec.sharding.spec]
    how = (
        f"split over the mesh axes ({'; '.join(split)})"
        if any(spec.sharding.spec)
        else "replicated"
    )
    devices = ", ".join(map(str, spec.placement.devices[:8]))
    return f"{spec.short}, {how}, on the devices [{devices}] of its slice"
