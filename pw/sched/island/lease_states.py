"""The launch leases of an island: their states, and what each knows of its launches.

    open: the client launches
      | the client sends a run without the lease, leaves, or is silent for some heartbeats; another client
      | wants one of the hosts; a host has closed the lease
      v
    closing: each host says what it has taken; the runs that the client tells of wait
      | what one host has taken, or the scheduler knows, is sent to the others
      v
    over: earlier launches than `final` have been taken by all hosts, later ones by none

Only `pw.sched.island.leases` changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pw.core.actors.lifecycle import Lifecycle
from pw.core.messages import Finished, LeasedLaunch, LentProgram, SubmitLeased, index_of
from pw.sched.island.lent_memory import LentMemory

KEPT = 1024
"""Number of launches that are kept, also when they have ended: some hosts may still lack them."""


class LeaseState(StrEnum):
    """The states of a lease."""

    OPEN = "open"
    """State in which the client may launch."""
    CLOSING = "closing"
    """State in which hosts take no more launches of the client, and are asked which they have taken."""
    OVER = "over"
    """State in which all hosts have taken the same launches."""


class LeaseEvent(StrEnum):
    """Event that changes the state of a launch lease."""

    CLOSE = "close"
    AGREE = "all hosts have answered"


LEASE = Lifecycle[LeaseState, LeaseEvent](
    "lease",
    {
        LeaseState.OPEN: {LeaseEvent.CLOSE: LeaseState.CLOSING},
        LeaseState.CLOSING: {LeaseEvent.AGREE: LeaseState.OVER},
        LeaseState.OVER: {},
    },
)


@dataclass(slots=True, eq=False)
class LaunchLease:
    """The right of one client to number the launches on some hosts."""

    number: int
    client: int
    hosts: tuple[str, ...]
    programs: dict[int, LentProgram]
    first: int
    window: int
    """Number of launches that may be in flight."""
    state: LeaseState = LeaseState.OPEN
    noticed: int = 0
    """Index of the first launch that the client has not told of."""
    until: int = 0
    """Index before which the client may launch."""
    ended: int = 0
    """Number of launches that have ended."""
    final: int = 0
    """Index behind the last launch of the lease; right when the lease is over."""
    running: dict[int, int] = field(default_factory=dict)
    """Number of segments that have not ended, by run."""
    launches: dict[int, LeasedLaunch] = field(default_factory=dict)
    """Newest launches by index, without their steps."""
    answers: dict[str, int] = field(default_factory=dict)
    """Index behind the last launch that each host has taken, of the hosts that have answered while the lease is
    closing."""
    waiting: list[SubmitLeased] = field(default_factory=list)
    """Launches that the client has told of while the lease is closing."""
    is_left: bool = False
    """True if the client has left."""
    memory: LentMemory | None = None
    """Memory that is set aside for the launches; None where nothing limits it."""

    def __post_init__(self) -> None:
        self.noticed = self.first
        self.until = self.first + self.window

    def happened(self, event: LeaseEvent) -> None:
        """Change the state. Raises ImpossibleTransition."""
        self.state = LEASE.after(self.state, event)

    def launched(self, launch: LeasedLaunch, segments: int) -> None:
        """The client has launched a run."""
        self.running[launch.run] = segments
        self.launches[launch.index] = launch
        self.launches.pop(launch.index - KEPT, None)

    def program_of(self, index: int) -> int | None:
        """Return the program of a launch; None if that is not known."""
        launch = self.launches.get(index)
        return None if launch is None else launch.program

    def may_tell_of(self, host: str, number: int) -> bool:
        """Whether the client may still tell of the launch with this number on a host."""
        index = index_of(number)
        is_made = self.state is not LeaseState.OVER or index < self.final
        return host in self.hosts and index >= self.noticed and is_made

    def segment_ended(self, run: int) -> bool:
        """A segment has ended. Returns whether the client needs a new window."""
        self.running[run] -= 1
        if self.running[run]:
            return False
        del self.running[run]
        self.ended += 1
        until = self.first + self.ended + self.window
        return self.state is LeaseState.OPEN and until - self.until > self.window // 2


@dataclass(eq=False)
class LeaseTable:
    """Launch leases of an island."""

    holders: dict[str, LaunchLease] = field(default_factory=dict)
    """Leases that are not over, by host."""
    numbered: dict[int, LaunchLease] = field(default_factory=dict)
    """Leases by number, also those that are over while the client may still tell of launches."""
    early: dict[tuple[str, int], Finished] = field(default_factory=dict)
    """Ends of launches of which the client has not told yet, by host and number."""
    sliding: list[LaunchLease] = field(default_factory=list)
    """Leases whose clients need a new window."""
    unwanted: list[LaunchLease] = field(default_factory=list)
    """Leases that keep arrays on devices where other runs have no room."""

    def are_free(self, hosts: tuple[str, ...]) -> bool:
        """Whether none of these hosts is lent."""
        return not self.holders or self.holders.keys().isdisjoint(hosts)

    def behind(self, hosts: tuple[str, ...]) -> dict[str, int] | None:
        """Return the index behind the known launches of a lease, for each of the hosts that is lent.

        None if a lease is being closed: then nothing is known.
        """
        leases = {host: lease for host in hosts if (lease := self.holders.get(host)) is not None}
        if any(lease.state is not LeaseState.OPEN for lease in leases.values()):
            return None
        return {host: lease.noticed for host, lease in leases.items()}

    def may_be_told_of(self, host: str, number: int) -> bool:
        """Whether some client may still tell of the launch with this number on a host."""
        return any(lease.may_tell_of(host, number) for lease in self.numbered.values())

    def forget_early(self) -> None:
        """Drop the ends of launches of which no client will tell."""
        for host, number in [key for key in self.early if not self.may_be_told_of(*key)]:
            del self.early[host, number]

    def clear(self) -> None:
        """The island has left its epoch."""
        self.holders.clear()
        self.numbered.clear()
        self.early.clear()
        self.sliding.clear()
        self.unwanted.clear()
