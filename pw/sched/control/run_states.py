"""The life of a run at the controller.

Theory of operation. A run that waits in its client's backlog, and a run that is refused, have no
entry here. A run is *in flight* from when it is submitted to the scheduler of each of its islands
until each of its segments has ended there. It then has *ended*, and its client gets a credit back.

A segment ends without its value when a host was lost. The run is *spoilt* from then on; it is
*lost* when its last segment has ended. A run is lost at once when an island that it needs is lost,
or when an argument or a run that makes an argument is lost. The results of a lost run are lost
arrays. Recovery runs the same record again if the client still needs them, as another run with a
number of its own.

A run has *failed* when it is cancelled, overdue or refused by a scheduler, or when an argument of
it has failed. Its results carry the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pw.core.actors.lifecycle import Lifecycle
from pw.core.errors import ErrorReport
from pw.sched.control.array_states import ArrayEntry
from pw.sched.control.lineage import Record


class RunState(StrEnum):
    """The states of a run."""

    IN_FLIGHT = "in flight"
    """State of a run that was submitted, and of which some segments have not ended."""
    SPOILT = "spoilt"
    """State of a run in flight of which a segment has ended without its value."""
    ENDED = "ended"
    LOST = "lost"
    """State of a run that was withdrawn, and whose record recovery may run again."""
    FAILED = "failed"
    """State of a run that was withdrawn, and whose results carry an error."""


class RunTransition(StrEnum):
    """Event that changes the state of a run."""

    SPOIL = "a launch of it ends without its value"
    END = "its last launch ends"
    LOSE = "a host or an argument is lost"
    FAIL = "it is cancelled, overdue or refused, or an argument fails"


_S, _E = RunState, RunTransition

RUN = Lifecycle[RunState, RunTransition](
    "run",
    {
        _S.IN_FLIGHT: {_E.SPOIL: _S.SPOILT, _E.END: _S.ENDED, _E.LOSE: _S.LOST, _E.FAIL: _S.FAILED},
        _S.SPOILT: {_E.SPOIL: _S.SPOILT, _E.LOSE: _S.LOST, _E.FAIL: _S.FAILED},
        _S.ENDED: {},
        _S.LOST: {},
        _S.FAILED: {},
    },
)


@dataclass(slots=True, eq=False)
class RunInFlight:
    """A submitted run, with its state."""

    number: int
    client: int
    record: Record
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]
    donated: list[tuple[int, ArrayEntry]]
    """Arrays that the client donates to the run, with their numbers."""
    islands: tuple[str, ...]
    """Names of the islands to which the run was submitted."""
    segments_left: int
    began_s: float
    credited: bool = True
    """True if the run has a credit of the client; a repeated run has none."""
    state: RunState = RunState.IN_FLIGHT
    cause: ErrorReport | None = None
    """Error that spoilt the run."""
    names: tuple[str, str] | None = None
    """Names of the run and of this attempt, once they were published."""

    def after(self, event: RunTransition) -> None:
        """Change the state."""
        self.state = RUN.after(self.state, event)

    def spoil(self, error: ErrorReport) -> None:
        """A segment has no value, or will have none."""
        self.after(RunTransition.SPOIL)
        self.cause = error

    def segment_ended(self, error: ErrorReport | None) -> bool:
        """A segment has ended, with its value or an `error`; return whether it was the last."""
        self.segments_left -= 1
        if error is not None and self.cause is None:
            self.spoil(error)
        return self.segments_left <= 0
