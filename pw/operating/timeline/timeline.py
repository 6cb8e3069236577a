"""A timeline as a value: what the devices, transfers and schedulers of a cluster did at each moment.

All times are seconds since the beginning of the timeline, on the clock of the process that recorded it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from pw.core.ids import client_of


@dataclass(frozen=True, slots=True)
class Computation:
    """One computation on one device; one of several devices has an entry for each."""

    host: str
    device: str
    """The ordinal of the device on its host, or "python" for a host function."""
    name: str
    run: int
    segment: int
    called_s: float
    """Time of the host's call, in seconds; perhaps long before the computation's turn."""
    start_s: float
    end_s: float
    divided: int = 1
    """Number of computations whose end was seen together, and which share the time in equal parts."""
    is_open: bool = False
    """Whether its end was not seen: it is drawn until the end of what is known."""

    @property
    def client(self) -> int:
        """The number of its client, as in `pw status`."""
        return client_of(self.run)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that one host sent or received.

    `kind` is `edge` (from host to host, of a run), `upload` or `fetch` (from and to a client).
    """

    host: str
    is_incoming: bool
    kind: str
    start_s: float
    end_s: float
    size_bytes: int
    client: int
    run: int = 0
    edge: int = 0
    peer: str = ""
    """The other host; empty for a client."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The time for which a launch on a host waited for the bytes of an edge."""

    host: str
    run: int
    edge: int
    peer: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """One segment of a run at the scheduler of its island; None: before or after the timeline."""

    island: str
    run: int
    segment: int
    queued_s: float | None
    launched_s: float | None
    ended_s: float | None
    device_s: float
    """Device seconds that its hosts have reported."""


@dataclass(frozen=True, slots=True)
class Call:
    """A run at the controller, from its call to its end; None: before or after the timeline."""

    run: int
    program: str
    began_s: float | None
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was recorded, and how far to trust it."""

    node: str
    clock_error_s: float
    """Seconds by which its times may be wrong, compared with those of other processes."""
    records: int
    dropped: int
    """Records that found no room."""
    lost: str
    """Reason why not all of its records came; empty if they did."""


@dataclass(slots=True)
class Timeline:
    """The records of `pw.trace`; its lists are in the order of their starts."""

    length_s: float = 0.0
    computations: list[Computation] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    clients: dict[int, str] = field(default_factory=dict)
    """The names of clients by their numbers, as in `pw status`."""
    _programs: dict[int, str] = field(default_factory=dict)

    def take(self, other: Timeline) -> None:
        """Become another timeline: the block that this one was given to has ended."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def program(self, run: int) -> str:
        """Return the name of a run's program; empty if the run began before the timeline."""
        if not self._programs:
            self._programs.update({call.run: call.program for call in self.calls})
        return self._programs.get(run, "")

    def busy(self, chosen: Callable[[Computation], bool] = lambda one: True) -> float:
        """Return the device time of the chosen computations, in seconds."""
        return sum(one.end_s - one.start_s for one in self.computations if chosen(one))

    @property
    def clock_error_s(self) -> float:
        """Return the seconds by which times of one process may be wrong beside those of another."""
        errors_s = [p.clock_error_s for p in self.processes if p.records]
        return 2 * max(errors_s, default=0.0)

    @property
    def notes(self) -> list[str]:
        """Return the reasons why something is missing in the timeline; empty if nothing is."""
        notes = []
        for process in self.processes:
            if process.lost:
                notes.append(
                    f"{process.node}: what it had not sent is missing, because {process.lost}"
                )
            if process.dropped:
                notes.append(
                    f"{process.node}: {process.dropped} records found no room and are missing"
                )
        return notes

    @property
    def summary(self) -> str:
        """One line: how long, how much, and how exact."""
        devices = {(one.host, one.device) for one in self.computations}
        return (
            f"{self.length_s:.2f} s, {len(self.computations)} computations on {len(devices)} devices, "
            f"{len(self.transfers)} transfers, {len(self.launches)} launches; clocks agree within "
            f"{self.clock_error_s * 1e3:.2f} ms"
        )

    def __repr__(self) -> str:
        return f"<Timeline: {self.summary}>"


def letters(clients: Sequence[int]) -> dict[int, str]:
    """Return a letter for each client, in the order of their numbers: A, B, ... Z, AA, AB, ..."""
    by_client = {}
    for index, client in enumerate(sorted(set(clients))):
        text, rest = "", index + 1
        while rest:
            rest, digit = divmod(rest - 1, 26)
            text = chr(ord("A") + digit) + text
        by_client[client] = text
    return by_client
