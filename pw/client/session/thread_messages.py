"""Notes from the API's threads to the session; they never leave the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from pw.core.errors import Error
from pw.core.messages import AllocateSlice, Detail, OutputLine
from pw.core.sharding import ArraySpec, Box

Part = tuple[Box, np.ndarray[Any, Any]]
"""Box of an array, and its value."""
LOCKED_S = 5e-3
"""Seconds that the session waits for a lock of its threads. The handler of a signal may have come in the midst
of a call or a wait that has it, and wait for the session."""


class Settle(Protocol):
    """A future, as the session settles it."""

    def set_result(self, result: Any) -> None:
        """Settle the future with a result."""

    def set_exception(self, exception: BaseException | None) -> None:
        """Settle the future with an error."""


def resolve(future: Settle, result: Any) -> None:
    """Settle a future that its owner may be cancelling at this moment."""
    try:  # noqa: SIM105 - `suppress` is three calls, and this is paid for each wait
        future.set_result(result)
    except InvalidStateError:
        pass


def reject(future: Settle, error: Exception) -> None:
    """Fail a future that its owner may be cancelling at this moment."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Open:
    """Attach to the controller; `attached` is settled with the `Attached` that answers."""

    name: str
    share: float
    priority: int
    keep_bytes: int
    """Budget for the values of uploads that are kept after they were sent."""
    attached: Settle
    reconnect_s: float = 0.0
    """Seconds in which the session looks for a lost controller."""
    output: Callable[[str, tuple[OutputLine, ...]], None] | None = None
    """Takes the output of host functions; None if hosts shall not send it."""
    recovery_s: float | None = None
    """Seconds in which a lost island may come back; None for as many as the cluster says."""


class Tell(msgspec.Struct, frozen=True):
    """Send this to the controller."""

    message: object


@dataclass(frozen=True, slots=True)
class TellLaunched:
    """Tell the controller of the runs that were launched under leases."""


@dataclass(frozen=True, slots=True)
class Meet:
    """Begin lines to these hosts: a thread waits for what they have."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LineLost:
    """The line to this host is lost."""

    host: str


@dataclass(frozen=True, slots=True)
class Listen:
    """Make this client known to the hosts of these slices, which send it output of host functions."""

    slices: tuple[int, ...]
    for_calls: bool = False
    """Computations there will call functions in this process, whether or not it wants output."""


@dataclass(frozen=True, slots=True)
class Forget:
    """No handle of these arrays is left."""

    arrays: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask for a slice; settled with its `SliceBound`."""

    request: AllocateSlice
    bound: Settle


@dataclass(slots=True)
class Put:
    """Upload a host value."""

    array: int
    spec: ArraySpec
    value: np.ndarray[Any, Any]
    """No other code writes to it."""
    keep: bool
    """True to keep the value outside of the budget, as long as the controller may ask for it."""
    bound: int = 0
    """Number of bindings of the slice when the value was sent over lines; 0 if it was not."""


class AskedAhead:
    """Tells of a question that went with a run whether a thread waits for the answer by now."""

    is_waited_for = False


class Get(msgspec.Struct, frozen=True):
    """Fetch an array; settled with the list of (box, ndarray) that cover it."""

    array: int
    spec: ArraySpec
    parts: Settle
    positions: tuple[int, ...] = ()
    """Fetch only the shards at these mesh positions."""
    ahead: AskedAhead | None = None


class Await(msgspec.Struct, frozen=True):
    """Wait for arrays; settled with None when all are ready."""

    arrays: tuple[tuple[int, ArraySpec], ...]
    ready: Settle
    ahead: AskedAhead | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Have the controller answer a numbered request (`GetStats`: and every host).

    Settled with its `Status`, the counters by node, or None when it is done; fails if one of `arrays` does.
    """

    what: Callable[[int], object]
    answer: Settle
    arrays: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AskCompiler:
    """Have hosts compile an artifact for the devices of a spec; settled with the first `Compiled`."""

    artifact: bytes
    spec: ArraySpec
    detail: Detail
    answer: Settle


@dataclass(frozen=True, slots=True)
class DescribeCheckpoint:
    """Have a host describe the checkpoint at this path; settled with its `Described`.

    `spec` names the slice whose hosts are to be asked.
    """

    path: str
    spec: ArraySpec
    answer: Settle


@dataclass(frozen=True, slots=True)
class StartTimeline:
    """Record a timeline; `ready` is settled with None when all processes do."""

    number: int
    ready: Settle


@dataclass(frozen=True, slots=True)
class StopTimeline:
    """End a timeline; `collected` is settled with its sources."""

    number: int
    collected: Settle


@dataclass(frozen=True, slots=True)
class AwaitHosts:
    """Wait until so many hosts are in formed islands."""

    count: int
    ready: Settle


@dataclass(frozen=True, slots=True)
class FollowIslands:
    """Tell the runtime what happens to islands, or do so no more."""

    is_on: bool


@dataclass(frozen=True, slots=True)
class Close:
    """End the session, and fail all open futures; settled then, with the `RunFailed`s that no call raised."""

    error: Error
    closed: Settle


@dataclass(frozen=True, slots=True)
class Called:
    """A computation calls a function in this process; `AnswerCall` with the same key answers it."""

    key: tuple[str, int]
    artifact: bytes
    """The SHA-256 of the computation's code."""
    index: int
    """Index of the function among the callbacks of the artifact."""
    operands: list[np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """A function that a computation has called has returned, or raised."""

    key: tuple[str, int]
    results: tuple[np.ndarray[Any, Any], ...] = ()
    error: str = ""
