"""The lifecycle of a launch: one segment of one run, on one island.

Theory of operation. A `Submit` brings the segments of a run to the island's scheduler, in the order
in which they are launched. A launch waits until the uploads of its arguments have ended and all
producers of its remote inputs have been launched: work in flight then waits only for work launched
before it, so islands cannot wait for each other in a circle (G4). From then on the launch is
eligible. When its producers have also ended it is ready, and the scheduler prefers ready launches:
an eligible one may hold its devices while it waits for an input (G3).

The scheduler launches an eligible or ready launch by sending it to all hosts of its gang. The
launch ends when every reporting host has said so. Hosts differ in between: some have ended their
part (`ended_on`), on some it waits for an input while other launches pass it (`passed_on`).

A run of a quarantined program is refused: its first launch stays in the queue, ahead of later runs
that need its results, until the controller cancels the run. A cancelled run loses the launches that
are not in flight. A launch in flight can only end, or be lost when the island leaves its epoch.

Admission to device memory (`pw.sched.island.admission`) concerns a whole run and has its own state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pw.core.actors.lifecycle import Lifecycle
from pw.core.errors import ErrorReport
from pw.core.messages import Arguments
from pw.sched.island.admission import Reservation
from pw.sched.island.installed_program import InstalledProgram
from pw.sched.island.lease_states import LaunchLease
from pw.sched.island.numbers import Gang
from pw.sched.island.window import Footprint, Stake


class LaunchState(StrEnum):
    """State of a launch."""

    WAITING = "waiting"
    """State of a launch for which an upload has not ended, or a producer has not been launched."""
    ELIGIBLE = "eligible"
    """State of a launch that may go; a producer has not ended."""
    READY = "ready"
    """State of a launch that may go, and needs nothing that another island still makes."""
    REFUSED = "refused"
    """State of a launch that waits for the controller to cancel its run."""
    IN_FLIGHT = "in flight"
    """State of a launch that was sent to its hosts."""
    ENDED = "ended"
    """State of a launch that all reporting hosts have ended."""
    CANCELLED = "cancelled"
    """State of a launch whose run was cancelled, or whose client left, before it was launched."""
    LOST = "lost"
    """State of a launch whose island left its epoch before it ended."""


class LaunchEvent(StrEnum):
    """Event that changes the state of a launch."""

    PRODUCERS_LAUNCHED = "uploads ended and producers launched"
    PRODUCERS_ENDED = "uploads and producers ended"
    REFUSE = "refuse"
    LAUNCH = "launch"
    END = "end"
    CANCEL = "cancel"
    LOSE = "lose"


_QUEUED = {LaunchEvent.CANCEL: LaunchState.CANCELLED, LaunchEvent.LOSE: LaunchState.LOST}

LAUNCH = Lifecycle[
    LaunchState, LaunchEvent
](
    "launch",
    {
        LaunchState.WAITING: {
            LaunchEvent.PRODUCERS_LAUNCHED: LaunchState.ELIGIBLE,
            LaunchEvent.PRODUCERS_ENDED: LaunchState.READY,
            LaunchEvent.REFUSE: LaunchState.REFUSED,
        }
        | _QUEUED,
        LaunchState.ELIGIBLE: {
            LaunchEvent.PRODUCERS_LAUNCHED: LaunchState.ELIGIBLE,  # one of several producers has ended
            LaunchEvent.PRODUCERS_ENDED: LaunchState.READY,
            LaunchEvent.LAUNCH: LaunchState.IN_FLIGHT,
        }
        | _QUEUED,
        LaunchState.READY: {
            LaunchEvent.REFUSE: LaunchState.REFUSED,
            LaunchEvent.LAUNCH: LaunchState.IN_FLIGHT,
        }
        | _QUEUED,
        LaunchState.REFUSED: {
            LaunchEvent.PRODUCERS_LAUNCHED: LaunchState.REFUSED,
            LaunchEvent.PRODUCERS_ENDED: LaunchState.REFUSED,
        }
        | _QUEUED,
        LaunchState.IN_FLIGHT: {
            LaunchEvent.END: LaunchState.ENDED,
            LaunchEvent.LOSE: LaunchState.LOST,
        },
        LaunchState.ENDED: {},
        LaunchState.CANCELLED: {},
        LaunchState.LOST: {},
    },
)


@dataclass(slots=True, eq=False)
class RunHere:
    """Values that the launches of one run on this island share."""

    run: int
    program: int
    stake: Stake
    """Stake of the client; device time that it uses counts for the tenant also when the client has left."""
    arguments: Arguments
    reservation: Reservation | None
    """Reservation of memory for the run; None where memory does not limit it."""
    queued_s: float
    """Time at which the run came, in seconds."""
    is_timed: bool
    """True while the controller has yet to hear of the run's first launch."""
    installed: InstalledProgram
    """Program as it was installed, also when it is uninstalled before the run has ended."""
    introduced: set[str | Gang] = field(default_factory=set)
    """Hosts, and large gangs as a whole, that have been sent the arguments."""
    lease: LaunchLease | None = None
    """Launch lease under which the client has launched the run."""


@dataclass(slots=True, eq=False)
class SegmentTask:
    """One launch, from its submission to its end."""

    here: RunHere
    segment: int
    hosts: tuple[str, ...]
    footprint: Footprint
    notify: tuple[str, ...]
    """Names of islands that run consumers of this segment."""
    unlaunched: set[int]
    """Indices of producers on other islands that have not been launched."""
    unfinished: set[int]
    """Indices of producers on other islands that have not ended."""
    awaits: set[int]
    """Arrays whose uploads have not ended."""
    arrival: int
    """Place of the launch in the order in which the island's work arrived."""
    reporters: int
    """Number of hosts of the gang, from its first on, that have yet to report the end."""
    state: LaunchState = LaunchState.WAITING
    estimate_us: float = 0.0
    device_time_us: int = 0
    """Longest device time that a host has reported, in microseconds."""
    device_s: float = 0.0
    """Time for which it has had its devices, of each in all, in seconds; known at its end."""
    lost: ErrorReport | None = None
    """Error of a host that has no value because another host was lost."""
    ended_on: tuple[str, ...] = ()
    passed_on: frozenset[str] = frozenset()
    launched_s: float = 0.0
    """Time of the launch, in seconds; 0 before it."""

    def producer_launched(self, segment: int) -> None:
        """A segment of the run was launched on another island."""
        if segment in self.unlaunched:
            self.unlaunched.remove(segment)
            self._inputs_changed()

    def producer_ended(self, segment: int) -> None:
        """A segment of the run has ended on another island."""
        if segment in self.unfinished:
            self.unfinished.remove(segment)
            self._inputs_changed()

    def upload_ended(self, array: int) -> None:
        """An array is on its devices."""
        self.awaits.remove(array)
        self._inputs_changed()

    def __post_init__(self) -> None:
        self._inputs_changed()

    def _inputs_changed(self) -> None:
        if not (self.awaits or self.unlaunched):
            event = (
                LaunchEvent.PRODUCERS_LAUNCHED if self.unfinished else LaunchEvent.PRODUCERS_ENDED
            )
            self.state = LAUNCH.after(self.state, event)

    def launch(self, now_s: float) -> None:
        """Change the state when the launch was sent to its hosts."""
        self.state = LAUNCH.after(self.state, LaunchEvent.LAUNCH)
        self.launched_s = now_s

    def reported(self, host: str, device_time_us: int, lost: ErrorReport | None) -> bool:
        """A host has ended it. Returns whether that was the last one to report."""
        self.reporters -= 1
        self.device_time_us = max(self.device_time_us, device_time_us)
        self.lost = self.lost or lost
        if self.reporters:
            self.ended_on += (host,)
            return False
        self.state = LAUNCH.after(self.state, LaunchEvent.END)
        self.device_s = self.device_time_us * 1e-6 * len(self.footprint.sites)
        return True

    def happened(self, event: LaunchEvent) -> None:
        """Change the state. Raises ImpossibleTransition."""
        self.state = LAUNCH.after(self.state, event)

    def at_work_on(self) -> Iterable[str]:
        """Return the hosts where it runs, or waits for its turn behind what runs."""
        if not (self.ended_on or self.passed_on):
            return self.hosts
        return set(self.hosts).difference(self.ended_on, self.passed_on)
