"""What a host's actors ask of its devices.

A backend runs *ops* one after the other, in the order of `submit`. An op fills the `Value`s that it
makes, and later ops read them. Control runs ahead of the data: an actor may name a value as the
result of one op and as an argument of the next before either has run.

Ops that compute nothing stand in no queue. A `Build` makes an array from host bytes at once; a
`Watch` or `Read` is answered as soon as its values are ready, whatever else was submitted before.

Where an op has a `done`, the backend calls it on the loop thread, some time later, exactly once
(unless it is closed first). A value that cannot be made carries the error instead, and so does all
that is computed from it.

Nothing here knows JAX: the simulated backend keeps the same promises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from pw.core.errors import ErrorReport
from pw.core.messages import Detail, DeviceTest, ThreadReport
from pw.core.packing import ArrayType
from pw.core.programs.plan import BoxCopy
from pw.core.programs.program import Computation
from pw.core.programs.stablehlo import Facts
from pw.core.sharding import ArraySpec, Box, DeviceAddress
from pw.devices.host.value import Value

Done = Callable[[ErrorReport | None], None]
"""Called on the loop thread with an error, or None for success."""

DoneInstalling = Callable[[ErrorReport | int | None], None]
"""Called on the loop thread with an error, or with the bytes that the computation takes on each of
its devices besides arguments and results; None if that is not known."""

DoneReading = Callable[[list[np.ndarray[Any, Any]] | ErrorReport], None]
"""Called with the views that a read has asked for."""

DoneCompiling = Callable[[Facts | str | dict[str, float] | ErrorReport], None]
"""Called on the loop thread with an error, or with what was asked for."""

Suspect = Callable[[Collection[int], str], None]
"""Called on the loop thread with the ordinals of devices, and the word in an error that makes them suspect."""

Part = tuple[tuple[int, ...], Box, np.ndarray[Any, Any]]
"""The positions of shards, a box relative to the shard, and its bytes in host memory."""


def relative(box: Box) -> Box:
    """Return the whole of a shard that has this box of an array, as a box of the shard."""
    return tuple((0, stop - start) for start, stop in box)


@dataclass(slots=True, eq=False)
class NotedLaunch:
    """Times of a launch that is noted (`pw.devices.host.pace`), in seconds on the clock of this host."""

    came_s: float
    waited_s: float
    """Seconds for which work has waited for values, in all, when the launch came."""
    is_told: bool
    """True if the scheduler is told of it; the end of the others only shows when the next one began."""
    called_s: float = 0.0
    """Time at which its first computation was enqueued; another thread sets it."""
    is_called: bool = False
    """True if the op of that computation sets it."""
    free_s: float | None = None
    """Time at which the devices had ended all earlier work; None before the launch has ended."""
    inputs_s: float = 0.0
    """Seconds for which this launch, or work before it, waited for values."""
    has_stream: bool = False


class Execute(msgspec.Struct, eq=False):
    """Enqueue an installed computation, which fills `results`.

    `copied` are donated positions whose argument is still needed: a copy is donated instead. So is
    a copy of arguments that are `shared`, are being read, or are given twice. Other donated
    arguments are gone afterwards (`ArrayDeleted`).

    `failed` is given for computations of several hosts. It is called on the loop thread if this
    host cannot enqueue the computation, or has an argument that failed here `alone`; and, if
    `guarded`, if the computation fails later. After a failure to enqueue, no computation of several
    hosts is enqueued any more, so that it does not meet the wrong one of its peers.
    """

    key: bytes
    args: tuple[Value, ...]
    results: tuple[Value, ...]
    copied: tuple[int, ...] = ()
    failed: Callable[[ErrorReport], None] | None = None
    guarded: bool = True
    """No other op watches the results, or the values that are computed from them."""
    origin: tuple[int, ...] = ()
    """The run, the segment and the recorder's number of the computation, if it is to be recorded for a
    timeline (`pw.core.recorder`); empty if not."""
    noted: NotedLaunch | None = None
    """Launch of the computation, if it is noted and this is its first one: gets the time of the call."""


@dataclass(slots=True)
class Move:
    """Lay out `source` differently, from devices of this host to devices of this host.

    A source in a file goes to its own devices, before ops that were submitted earlier have run.
    Exactly one piece covers each destination shard on this host. A whole shard that stays on its
    device is aliased.
    """

    source: Value
    source_spec: ArraySpec
    source_devices: tuple[DeviceAddress, ...]
    result: Value
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    pieces: tuple[BoxCopy, ...]


class ViewSource(NamedTuple):
    """A value whose shards are in a view."""

    value: Value
    shards: tuple[tuple[int, int], ...]
    """The mesh positions of each shard in the view and in the value, which are on the same device."""


@dataclass(slots=True)
class View:
    """Make `result` of shards of other values, without moving them.

    The sources have a shard for each position on this host. They and the result are `shared`.
    """

    sources: tuple[ViewSource, ...]
    result: Value
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]


@dataclass(slots=True)
class Build:
    """Make an array from bytes in host memory; waits for no op.

    A part that covers a whole shard is aliased where the backend can (64-byte aligned memory on
    CPU), so its bytes must never change. Later ops may use `result` at once, but before `done` they
    may hold the execute thread while a large array is assembled.
    """

    result: Value
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    parts: Sequence[Part]
    done: Done | None = None
    over_zeros: bool = False
    """Elements that no part covers are zeros; otherwise the parts cover each element once."""
    padding: Sequence[np.ndarray[Any, Any]] = ()
    """Views of parts that are filled with zeros first."""
    is_copied: bool = False
    """True if the parts may not be aliased: their pages belong to a file."""

    @property
    def size_bytes(self) -> int:
        """Size of all parts together; of a shard if it is larger."""
        parts_bytes = sum([data.nbytes for _, _, data in self.parts])
        return max(parts_bytes, self.spec.shard_bytes) if self.over_zeros else parts_bytes


@dataclass(slots=True)
class Watch:
    """Tell when all of `values` are ready, or one has failed; without values, all submitted before.

    A value that was donated counts as ready when the computation that took it has run.
    """

    values: tuple[Value, ...]
    done: Done
    hurried: bool = True
    """False if a `done` without error may wait a little for others."""


@dataclass(slots=True)
class Read:
    """Give host views of boxes of shards on this host, in this order, once the value is ready.

    Each box is a position and a box relative to the shard there. No later op takes the buffers
    first. The views are read-only, cost no copy where devices share the host's memory, and stay
    valid.
    """

    value: Value
    boxes: Sequence[tuple[int, Box]]
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    done: DoneReading
    urgent: bool = False
    """The next computation waits for the answer."""


@dataclass(slots=True, eq=False)
class ClientCall:
    """A computation calls a function in its client's process, and waits.

    The first of `returned` and `raised` ends the wait; later ones do nothing.
    """

    client: int
    artifact: bytes
    """The SHA-256 of the computation's code."""
    index: int
    operands: Sequence[np.ndarray[Any, Any]]
    results: tuple[ArrayType, ...]
    """Types of the results that the function must return."""
    returned: Callable[[Sequence[np.ndarray[Any, Any]]], None]
    raised: Callable[[str], None]


@dataclass(slots=True)
class RunFunction:
    """Run a function on the execute thread, in its turn."""

    function: Callable[[], None]


Op = Execute | Move | View | Build | Watch | Read | RunFunction


class Backend(Protocol):
    """The devices of one host; all methods are called on the loop thread, and none blocks."""

    def install(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: DoneInstalling,
    ) -> None:
        """Compile a computation, in the order of the calls, so that `Execute` can name it by `key`.

        A key is never given again.
        """

    def compile(
        self,
        key: bytes,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        detail: Detail,
        done: DoneCompiling,
    ) -> None:
        """Compile a StableHLO artifact in the order of the calls, keep it under `key`, and describe it.

        A computation of the same artifact and devices, installed before `forget`, shares it. After an error,
        nothing is kept.
        """

    def forget(self, key: bytes) -> None:
        """Drop an installed or kept computation, after all ops submitted so far."""

    def take_calls(self, handler: Callable[[ClientCall], None]) -> None:
        """Have `handler` called for each call of a client's function, on the loop thread."""

    def submit(self, ops: list[Op]) -> None:
        """Run `ops` after all ops submitted before; one wake-up for all.

        The list is empty then, so that what an op alone has read is freed while later ones run.
        """

    def run_now(self, op: Execute) -> bool:
        """Run a computation before this returns, if that takes no time and nothing is before it.

        Returns whether it has run; its results may be on their way, or have failed.
        """

    def is_there(self, value: Value) -> bool:
        """Whether a value is ready, without an error, as far as that is known at once."""

    def read_now(self, op: Read) -> list[np.ndarray[Any, Any]] | None:
        """Return what `op` asks of a value that is there; None if that takes time, or fails."""

    def snapshot(
        self, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> list[tuple[Box, np.ndarray[Any, Any]]] | None:
        """Return host views of this host's different boxes of an array, None if it is not ready now.

        It does not wait for the execute thread, which a collective without its peers may hold for
        ever.
        """

    def counters(self) -> dict[str, int]:
        """Return what this backend has done and holds."""

    def allocated_bytes(self, ordinal: int) -> tuple[int | None, int | None]:
        """Return the bytes in use on a device of this host, and the most that were; None if it does not say."""

    def test(self, ordinal: int, done: Callable[[DeviceTest], None]) -> None:
        """Test a device of this host beside what runs there, which may take seconds.

        `done` gets the outcome, on the loop thread.
        """

    def take_suspicions(self, devices: int, handler: Suspect) -> None:
        """Have `handler` called for each error that names some of this host's so many devices, on the loop."""

    def stage(self, value: Value) -> str:
        """Return how far the op that makes a value is, without waiting.

        `submitted` to the execute thread, `entered` by it (collectives may hold it there),
        `enqueued` on the devices, or `finished`, with or without success.
        """

    def whereabouts(self) -> tuple[ThreadReport, ...]:
        """Describe the threads that are at work, the execute thread first."""

    def close(self) -> None:
        """Stop; no `done` is called afterwards."""
