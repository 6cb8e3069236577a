"""`Value`: an array's part on one host, from the op that makes it until its buffers are donated.

Actors create values and pass them to ops; an op *fills* its results. The table says what happens to a value:

- A value that has failed keeps its first error, whatever happens to it later.
- A made value may still fail: its computation was enqueued, and fails on the device.
- `begin` announces a thread of its own, which fills the value; who needs the array waits for that thread.

Several threads use a value. The loop counts its reads (`begin_read`) before it looks whether the value is given
away, and the execute thread gives it away (`may_donate`) before it looks at the reads. So at least one of them
sees the other.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Any, Protocol

from pw.core.actors.lifecycle import Lifecycle
from pw.core.errors import ErrorReport


class ValueState(StrEnum):
    """What a value has."""

    UNMADE = "unmade"
    """No array yet: its op has not run."""
    MADE = "made"
    """An array, which devices may still compute."""
    FAILED = "failed"
    """An error in place of an array; also that its array was donated."""


class ValueEvent(StrEnum):
    """What happens to a value."""

    FILL = "fill"
    """The op of the value has enqueued the array."""
    FAIL = "fail"
    """The op of the value or an input of it has failed, or a computation has taken the buffers."""


LIFECYCLE = Lifecycle(
    "value",
    {
        ValueState.UNMADE: {ValueEvent.FILL: ValueState.MADE, ValueEvent.FAIL: ValueState.FAILED},
        ValueState.MADE: {ValueEvent.FAIL: ValueState.FAILED},
        ValueState.FAILED: {ValueEvent.FILL: ValueState.FAILED, ValueEvent.FAIL: ValueState.FAILED},
    },
)


class Building(Protocol):
    """Tells when a thread has filled the values that it makes; a `threading.Event`."""

    def set(self) -> None:
        """Let all threads go on that wait."""

    def wait(self) -> object:
        """Wait until the values are filled."""


class Value:
    """A logical array's part on this host. Its methods make all changes but that of `shared`.

    Args:
        error: the error that it has from the start.
        alone: true if the error arose on this host; other hosts may have the value.
    """

    __slots__ = (
        "__weakref__",
        "alone",
        "buffers",
        "building",
        "error",
        "heir",
        "is_given",
        "is_joint",
        "maker",
        "order",
        "payload",
        "questions",
        "reads_begun",
        "reads_ended",
        "record",
        "shared",
    )

    def __init__(self, error: ErrorReport | None = None, *, alone: bool = False) -> None:
        self.error = error
        """Reason why there is no array; None as long as there may be one."""
        self.alone = alone
        """True if the error arose on this host only: other hosts may have the array."""
        self.payload: Any = None
        """The backend's array; None until it is made, and after a failure."""
        self.shared = False
        """True if another value may alias the buffers, which are then copied before a donation."""
        self.buffers: dict[int, object] | None = None
        """The shared buffer on each device of this host; None if no view names a shard of it."""
        self.maker = ""
        """Name of the computation that makes it, for its error."""
        self.is_joint = False
        """True if other hosts take part in making the value, so that a failure may be this host's alone."""
        self.order = 0
        """Place of its computation among all that the devices of this host compute."""
        self.record = 0
        """Serial number of the record of its computation; 0 if no timeline has one."""
        self.building: Building | None = None
        """Tells when the thread that makes it has ended; None if it is made in the order of ops."""
        self.questions: deque[Any] | None = None
        """Ops of the backend that are answered when it is made."""
        self.reads_begun = 0
        """Number of reads that have begun: their views may alias the buffers."""
        self.reads_ended = 0
        """Number of reads that no longer keep the buffers from a donation."""
        self.is_given = False
        """True if the buffers are donated, or about to be."""
        self.heir: Value | None = None
        """The first result of the computation that its buffers were donated to."""

    is_away = False
    """True if the buffers do not lie on devices for a while, although the array belongs there."""
    is_in_file = False
    """True if the buffers lie in a file: then the payload is that of `pw.devices.host.spill_files`."""

    @property
    def state(self) -> ValueState:
        """Its row in the table."""
        if self.error is not None:
            return ValueState.FAILED
        return ValueState.UNMADE if self.payload is None else ValueState.MADE

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether other hosts may have read a value that this host could not read."""
        return self.error is None or self.alone

    def begin(
        self, building: Building, maker: str = "", order: int = 0, *, joint: bool = False
    ) -> None:
        """Say that a thread makes the array, and how to wait for it."""
        self.building, self.maker, self.order, self.is_joint = building, maker, order, joint

    def fill(self, payload: object) -> None:
        """Take the array that the op has made; a value that has failed drops it."""
        if self.error is None:
            self.payload = payload

    def fill_by(self, payload: object, maker: str, order: int, joint: bool) -> None:
        """Take the array that a computation of this name and place makes."""
        self.maker, self.order, self.is_joint = maker, order, joint
        if self.error is None:
            self.payload = payload

    def fail(self, error: ErrorReport, *, alone: bool = False) -> None:
        """Put an error in the place of the array; the first error stays."""
        if self.error is None:
            self.alone, self.error = alone, error
        self.payload = None

    def fail_as(self, source: Value, unmade: ErrorReport) -> None:
        """Take the error of a value that it is made of; `unmade` if that has none."""
        self.fail(source.error or unmade, alone=source.alone)

    def may_donate(self, heir: Value | None) -> bool:
        """Give the buffers to a computation that makes `heir`, unless they are shared or being read.

        If so, a `Watch` follows the heir, and the loop does not read the value any more.
        """
        if self.shared:
            return False
        # `heir` is set before the call, because a watcher may find the array deleted during it.
        self.is_given, self.heir = True, heir
        if self.reads_begun == self.reads_ended:
            return True
        self.is_given, self.heir = False, None
        return False

    def begin_read(self) -> None:
        """Keep the buffers from a donation."""
        self.reads_begun += 1

    def end_read(self) -> None:
        """Let the buffers be donated again: a view is a copy, or the backend sees it. Under a lock."""
        self.reads_ended += 1

    def ask(self, question: object) -> None:
        """Keep a question until the value is made. Under a lock."""
        if self.questions is None:
            self.questions = deque()
        self.questions.append(question)


class AwayValue(Value):
    """A value whose buffers lie in host memory, until a run reads it (`pw.devices.host.tiers`)."""

    __slots__ = ()
    is_away = True


class FileValue(AwayValue):
    """A value whose buffers lie in a file, until a run reads it.

    Args:
        file: payload of the value.
    """

    __slots__ = ()
    is_in_file = True

    def __init__(self, file: object) -> None:
        super().__init__()
        self.fill(file)
