"""What the API's threads tell a session: notes that never leave the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pw.core.errors import Error
from pw.core.messages import AllocateSlice, GetStats, GetStatus
from pw.core.sharding import ArraySpec, Box

Part = tuple[Box, np.ndarray[Any, Any]]
"""A box of an array, and its value."""


class Settle(Protocol):
    """What the session needs of a future."""

    def set_result(self, result: Any) -> None:
        """It worked."""

    def set_exception(self, exception: BaseException | None) -> None:
        """It did not."""

    def done(self) -> bool:
        """Settled, or given up by its owner."""


@dataclass(frozen=True, slots=True)
class Open:
    """Attach to the controller; `attached` is settled with the `Attached` that answers."""

    name: str
    share: float
    priority: int
    attached: Settle


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to the controller."""

    message: object


@dataclass(frozen=True, slots=True)
class Forget:
    """No handle of these arrays is left."""

    arrays: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask for a slice; settled with its `SliceBound`."""

    request: AllocateSlice
    bound: Settle


@dataclass(frozen=True, slots=True)
class Put:
    """Upload a host value."""

    array: int
    spec: ArraySpec
    value: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Get:
    """Fetch an array; settled with the list of (box, ndarray) that cover it."""

    array: int
    spec: ArraySpec
    parts: Settle


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for arrays; settled with None when all are ready."""

    arrays: tuple[tuple[int, ArraySpec], ...]
    ready: Settle


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for the controller's status, or for every process's counters (node -> counters)."""

    what: type[GetStatus] | type[GetStats]
    answer: Settle


@dataclass(frozen=True, slots=True)
class AwaitHosts:
    """Wait until so many hosts are in formed islands."""

    count: int
    ready: Settle


@dataclass(frozen=True, slots=True)
class Close:
    """Fail all that is open; nothing more will be asked. Settled when that is done."""

    error: Error
    closed: Settle
