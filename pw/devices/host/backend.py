"""What a host's actors ask of its devices.

A backend runs *ops* one after the other, in the order of `submit`, without telling anyone: an op
fills the `Value`s that it makes, and later ops read them. Control runs ahead of data, so an actor
names a value as the result of one op and as the argument of the next in the same breath. Ops that
compute nothing stand in no queue: an array is built from host bytes at once (`Build`), and questions
about values (`Watch`, `Read`) are answered as soon as these are ready, whatever computations, of
whichever client, were submitted before or are under way. Only what
concerns the world outside the devices has a `done`: it is called on the loop thread, some time
later, exactly once (unless the backend is closed first). A value that cannot be made carries the
error instead, and whatever needs it gets that same error.

Nothing here knows JAX: the simulated backend keeps the same promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pw.core.errors import ErrorReport
from pw.core.messages import ThreadReport
from pw.core.plan import Piece
from pw.core.program import Computation
from pw.core.sharding import ArraySpec, Box, DeviceAddress

Done = Callable[[ErrorReport | None], None]
"""Called on the loop thread: with None for success, otherwise with what went wrong."""

DoneInstalling = Callable[[ErrorReport | int | None], None]
"""Called on the loop thread: with what went wrong, or with the memory that the computation takes on each of its
devices besides arguments and results, in bytes; None where nobody knows."""

Part = tuple[tuple[int, ...], Box, np.ndarray[Any, Any]]
"""Host bytes for a box, relative to the shard, of the shards at these positions."""


def relative(box: Box) -> Box:
    """The whole of a shard that has this box of an array, as a box of the shard."""
    return tuple((0, stop - start) for start, stop in box)


class Value:
    """A logical array's part on this host, filled by the backend some time after it was submitted.

    Actors make values, pass them to ops and drop them; everything in them belongs to the backend,
    but for `error`, which actors may read once a `done` has told them that the value is settled.
    """

    __slots__ = (
        "__weakref__",
        "alone",
        "asked",
        "building",
        "error",
        "given",
        "heir",
        "joint",
        "maker",
        "order",
        "payload",
        "reads_begun",
        "reads_ended",
        "shared",
    )

    def __init__(self, error: ErrorReport | None = None) -> None:
        self.payload: Any = None
        """The backend's own idea of the array; None until it is made, and when it failed."""
        self.error = error
        self.maker = ""
        """Name of the computation that makes it, for the error if it fails."""
        self.shared = False
        """Another value may alias the buffers: copied before a donation."""
        self.reads_begun = 0
        """Reads that are under way, or have been: their views may alias the buffers."""
        self.reads_ended = 0
        """Those whose views are there and are copies; when all are, the buffers may be donated again."""
        self.building: Any = None
        """Tells the execute thread when a build that was deferred has ended."""
        self.order = 0
        """When it was enqueued, among all that a host's devices compute."""
        self.asked: Any = None
        """Questions to be looked at when it has been made."""
        self.given = False
        """Its buffers are donated, or about to be: the execute thread may be in that call."""
        self.heir: Value | None = None
        """A result of the computation that this value's buffers were donated to."""
        self.joint = False
        """It is made together with other hosts, so that a failure here may be this host's `alone`."""
        self.alone = False
        """The error arose here, in this host's part of something that other hosts may have succeeded at."""

    def fail(self, error: ErrorReport) -> None:
        """Put an error in the place of what was made, while no other op knows the value."""
        self.error, self.payload = error, None


@dataclass(slots=True)
class Execute:
    """Enqueue an installed computation; `results` are filled as soon as it has been enqueued.

    `copied` are donated positions whose argument somebody still needs: a copy is donated instead.
    An argument that is `shared`, is being read, or is given twice, is copied without being named. The other
    donated arguments are gone afterwards (using them again is `ArrayDeleted`).

    `failed` is given for computations that run on other hosts, too, which may wait for this one. It is
    called on the loop thread if this host fails them: it could not enqueue the computation, or has an
    argument that failed here `alone`; and if it is `guarded`, also if the computation failed later. After a
    failure to enqueue, no computation of several hosts is enqueued any more, so that none is met by another
    one's peers.
    """

    key: bytes
    args: tuple[Value, ...]
    results: tuple[Value, ...]
    copied: tuple[int, ...] = ()
    failed: Callable[[ErrorReport], None] | None = None
    guarded: bool = True
    """Nobody else watches the results, or what is made of them."""


@dataclass(slots=True)
class Move:
    """Lay out `source` differently, from devices of this host to devices of this host.

    Every destination shard on this host is covered by exactly one piece. Nothing waits for the
    value; a whole shard that stays on its device is aliased.
    """

    source: Value
    source_spec: ArraySpec
    source_devices: tuple[DeviceAddress, ...]
    result: Value
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Build:
    """Make an array from bytes in host memory.

    A part that covers a whole shard is aliased where the backend can (64-byte aligned memory on
    CPU), so its bytes must never change afterwards; the array is kept alive as long as it is
    needed. `done` is called when `result` is made. It waits for no op submitted before. Ops submitted
    after this one may use `result` at once, but one that does so before `done` may hold up the execute
    thread while a large array is assembled.
    """

    result: Value
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    parts: Sequence[Part]
    done: Done | None = None

    @property
    def size_bytes(self) -> int:
        """Size of all parts together."""
        return sum([data.nbytes for _, _, data in self.parts])


@dataclass(slots=True)
class Watch:
    """Tell when all of `values` are ready, or one has failed.

    It waits for the ops that make them, and for no others; one without values, for all submitted before. A
    value that has been donated counts as ready when the computation that took it has run.
    """

    values: tuple[Value, ...]
    done: Done
    hurried: bool = True
    """Otherwise `done` may wait a little for others, if all went well."""


@dataclass(slots=True)
class Read:
    """Give host views of boxes of shards on this host, in the order asked for, once they are ready.

    It waits for the op that makes the value, and for no other; no op submitted later takes its buffers.
    Each box is a position and a box relative to the shard there. The views are read-only, cost no
    copy where devices share the host's memory, and stay valid whatever happens to the value later.
    """

    value: Value
    boxes: Sequence[tuple[int, Box]]
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    done: Callable[[list[np.ndarray[Any, Any]] | ErrorReport], None]


@dataclass(slots=True)
class Call:
    """Run a function on the execute thread, in its turn."""

    function: Callable[[], None]


Op = Execute | Move | Build | Watch | Read | Call


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
        """Compile a computation for `devices`, so that `Execute` can name it by `key` after `done`.

        Computations are compiled in the order of the calls. A key is given once: another installing has others.
        """

    def forget(self, key: bytes) -> None:
        """Drop an installed computation, after everything submitted so far has been enqueued."""

    def submit(self, ops: Sequence[Op]) -> None:
        """Run `ops` after all those submitted before, but for what stands in no queue; one wake-up for all."""

    def snapshot(
        self, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> list[tuple[Box, np.ndarray[Any, Any]]] | None:
        """Host views of this host's different boxes of an array, None if it is not ready now.

        It waits for no computation and not for the execute thread, which a collective without its
        peers may hold for ever. The views are like those of a `Read`.
        """

    def counters(self) -> dict[str, int]:
        """What this backend has done and holds."""

    def stage(self, value: Value) -> str:
        """How far the op that makes a value is, looked at without waiting.

        `handed over`, `entered` (the execute thread is in the call, where collectives may hold it),
        `enqueued` on the devices, or `finished`, well or badly.
        """

    def whereabouts(self) -> tuple[ThreadReport, ...]:
        """What every thread that is at work does, the execute thread first, and where in the code."""

    def close(self) -> None:
        """Stop; no `done` is called afterwards."""
