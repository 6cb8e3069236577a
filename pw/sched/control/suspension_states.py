"""The suspension of a client: it leaves its devices at a launch boundary, and keeps all it has.

Theory of operation. The client's work stops between two launches. First the schedulers *hold* its launches.
When no host takes any more, its stream and its uploads wait, too, and the schedulers *count* what is queued.
The last run that was launched on any island is the boundary: all runs up to it *end*. Then what exists is
*copied* to host memory: the arrays that the client holds, and those that only queued runs read. Now the client
is *suspended*: its queued runs are withdrawn, its arrays and slices are lost to it as with a host, and its
devices are free.

To resume it is to recover: slices are bound where there is room, arrays come back from their copies, and queued
runs are run for the first time. A suspension can end before it is complete; then launches just go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pw.core.actors.lifecycle import Lifecycle
from pw.core.ids import Address
from pw.core.sharding import DeviceAddress


class SuspensionState(StrEnum):
    """The states of a suspension."""

    HOLDING = "holding"
    """State while a host may still take launches of the client."""
    COUNTING = "counting"
    """State while schedulers have not said which runs are queued."""
    ENDING = "ending"
    """State while launched runs have not ended, or uploads have not arrived."""
    COPYING = "copying"
    """State while arrays are copied to host memory."""
    SUSPENDED = "suspended"
    """State of a client that has no devices."""
    OVER = "over"
    """State after the client was resumed."""


class SuspensionEvent(StrEnum):
    """Event that changes the state of a suspension."""

    HOLD = "all schedulers hold the launches"
    COUNT = "all schedulers have said what is queued"
    END = "launched runs have ended"
    COPY = "all arrays are in host memory"
    RESUME = "the client is resumed"


_S, _E = SuspensionState, SuspensionEvent

SUSPENSION = Lifecycle[SuspensionState, SuspensionEvent](
    "suspension",
    {
        _S.HOLDING: {_E.HOLD: _S.COUNTING, _E.RESUME: _S.OVER},
        _S.COUNTING: {_E.COUNT: _S.ENDING, _E.RESUME: _S.OVER},
        _S.ENDING: {_E.END: _S.COPYING, _E.RESUME: _S.OVER},
        _S.COPYING: {_E.COPY: _S.SUSPENDED, _E.RESUME: _S.OVER},
        _S.SUSPENDED: {_E.RESUME: _S.OVER},
        _S.OVER: {},
    },
)


@dataclass(slots=True, eq=False)
class Suspension:
    """The suspension of one client."""

    by: str
    """Words for who has suspended it."""
    since_s: float
    """Time at which it was asked for, in seconds."""
    slices: frozenset[int]
    """Numbers of the slices that the client leaves."""
    unanswered: set[str] = field(default_factory=set)
    """Names of islands whose schedulers have not said that they hold the client."""
    state: SuspensionState = SuspensionState.HOLDING
    asked: list[tuple[Address, int]] = field(default_factory=list)
    """Askers and the numbers of their requests, to be answered when the client has left its devices."""
    goes_on: bool = False
    """True to resume the client as soon as it has left its devices."""
    target: str = ""
    """Name of the island where these slices are to be bound then; empty for any."""
    devices: Mapping[int, tuple[DeviceAddress, ...]] = field(default_factory=dict)
    """The devices there that slices are to have, in order, by slice; any for the others."""
    is_heard: bool = False
    """True if the client sends no new values to hosts any more, or is silent."""
    queued: dict[str, frozenset[int]] = field(default_factory=dict)
    """Runs of which nothing was launched, by island."""
    withdrawn: tuple[int, ...] = ()
    """Runs behind the boundary, which are run when the client is resumed."""
    copied: set[int] = field(default_factory=set)
    """Arrays that were to be copied."""
    copies_since_s: float = 0.0
    """Time at which their copies were asked for, in seconds."""
    size_bytes: int = 0
    """Bytes of these arrays."""
    outlasts: bool = True
    """True if the client stays suspended when the controller is started again."""
    islands: frozenset[str] = frozenset()
    """Names of islands that the client has left."""
    to_files: bool = False
    """True if copies are to lie in files, where hosts have a folder for files."""

    def after(self, event: SuspensionEvent) -> None:
        """Change the state. Raises ImpossibleTransition."""
        self.state = SUSPENSION.after(self.state, event)

    def include(self, slices: Collection[int]) -> None:
        """Have the client leave also the slices that it has asked for since, unless it only moves."""
        if not self.target:
            self.slices = frozenset(slices)

    @property
    def verb(self) -> str:
        """Participle for what is done to the client."""
        return "moved" if self.target else "suspended"

    def in_words(self, client: int, now_s: float) -> str:
        """Return who has suspended a client, and since when."""
        ago = f"by {self.by}, {now_s - self.since_s:.0f} s ago"
        if self.is_complete:
            return f"suspended, {ago} (pw resume {client})"
        return f"leaving its devices when its launched work has ended: {self.verb}, {ago}"

    @property
    def stops_stream(self) -> bool:
        """Whether messages of the client wait."""
        return self.state not in (SuspensionState.HOLDING, SuspensionState.OVER)

    @property
    def is_complete(self) -> bool:
        """Whether the client has left its devices."""
        return self.state is SuspensionState.SUSPENDED
