"""What a short timeline says: how busy devices are, what hosts send each other, and which host is slow.

Theory of operation. A timeline of a fraction of a second (`pw.operating.timeline`) has every computation,
transfer and launch of the cluster in that time. Nothing is recorded between two samples, so they cost hardly
anything.

The hosts of a gang run the same computation at the same time. Where it has collectives, all wait in them for
the slowest host, so durations are alike; but a host that is slow to begin begins later than the others, and one
that computes slowly ends later, with what is behind the last collective. A host is slow if one of both was so
on average in the gangs that it was in during the last minutes, and too steadily for chance.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

import msgspec

from pw.core.ids import client_of
from pw.operating.timeline.timeline import Computation, Timeline

REMEMBERED_S = 300.0
"""Seconds after which a comparison of hosts is forgotten."""
PARTS_KEPT = 512
"""Comparisons that are kept for each host."""
LEAST_GANGS = 20
"""Comparisons that are needed to call a host slow."""
LEAST_SECONDS = 5
"""Different seconds with comparisons that are needed to call a host slow."""
SLOW = 0.1
"""Part of its gangs' time by which a slow host is behind."""
LEAST_S = 0.001
SURE = 3.0
"""Standard errors by which the mean delay of a slow host is above 0."""

ROWS_DRAWN = 96
SLICES_DRAWN = 1500


class TimeSlice(msgspec.Struct, frozen=True, array_like=True):
    """A computation in the picture of a sample; times are milliseconds since its beginning."""

    start_ms: float
    end_ms: float
    name: str
    client: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A device in the picture of a sample."""

    host: str
    device: str
    slices: list[TimeSlice]


class Picture(msgspec.Struct, frozen=True):
    """The computations of a sample, as the page draws them."""

    number: int
    time_s: float
    """End of the sample, in seconds since 1970."""
    length_ms: float
    rows: list[Row]
    omitted: int
    """Devices and computations that are left out."""


class SlowHost(msgspec.Struct, frozen=True):
    """A host that others wait for."""

    host: str
    behind_s: float
    """Mean seconds by which the host is later than the others."""
    behind: float
    """Mean delay of the host as a part of the time that its gangs take."""
    gangs: int
    """Number of computations of gangs that were compared."""
    often: float
    """Part of the compared computations in which the host was behind."""

    @property
    def words(self) -> str:
        """One line about it."""
        return (
            f"host {self.host} is slow: its gangs wait {self.behind_s * 1e3:.1f} ms for it, "
            f"{self.behind:.0%} of a computation, in {self.often:.0%} of {self.gangs} computations"
        )


@dataclass(slots=True)
class Sample:
    """One timeline, summed up."""

    length_s: float
    computations: int
    busy: dict[tuple[str, str], float]
    """The busy part of the time of each device, by host and ordinal."""
    clients: dict[int, float]
    """Device seconds of each client."""
    sent: dict[tuple[str, str], int]
    """Bytes from host to host."""
    waits: list[tuple[int, float]]
    """Clients, and how long their launches were queued, in seconds."""
    launched: list[tuple[int, float]]
    """Clients, and how long their launches took from the launch to the end, in seconds."""


def summed(timeline: Timeline) -> Sample:
    """Sum up a timeline."""
    length_s = max(timeline.length_s, 1e-9)
    busy: defaultdict[tuple[str, str], float] = defaultdict(float)
    clients: defaultdict[int, float] = defaultdict(float)
    for one in timeline.computations:
        if one.device.isdecimal():
            inside_s = max(0.0, min(one.end_s, length_s) - max(one.start_s, 0.0))
            busy[one.host, one.device] += inside_s
            clients[one.client] += inside_s
    sent: Counter[tuple[str, str]] = Counter()
    for transfer in timeline.transfers:
        if transfer.kind == "edge" and transfer.peer and not transfer.is_incoming:
            sent[transfer.host, transfer.peer] += transfer.size_bytes
    waits, launched = [], []
    for launch in timeline.launches:
        client = client_of(launch.run)
        if launch.queued_s is not None and launch.launched_s is not None:
            waits.append((client, launch.launched_s - launch.queued_s))
        if launch.launched_s is not None and launch.ended_s is not None:
            launched.append((client, launch.ended_s - launch.launched_s))
    return Sample(
        timeline.length_s,
        len(timeline.computations),
        {device: min(1.0, seconds / length_s) for device, seconds in busy.items()},
        dict(clients),
        dict(sent),
        waits,
        launched,
    )


def pictured(timeline: Timeline, number: int, time_s: float) -> Picture:
    """Return the picture of a timeline: its busiest devices, and the longest computations of each."""
    rows: defaultdict[tuple[str, str], list[Computation]] = defaultdict(list)
    for one in timeline.computations:
        rows[one.host, one.device].append(one)
    chosen = sorted(rows, key=lambda key: -len(rows[key]))[:ROWS_DRAWN]
    room = SLICES_DRAWN // max(1, len(chosen))
    drawn, omitted = [], len(rows) - len(chosen)
    for host, device in sorted(chosen):
        longest = sorted(rows[host, device], key=lambda one: one.start_s - one.end_s)[:room]
        omitted += len(rows[host, device]) - len(longest)
        longest.sort(key=lambda one: one.start_s)
        slices = [
            TimeSlice(
                round(max(one.start_s, 0.0) * 1e3, 3),
                round(min(one.end_s, timeline.length_s) * 1e3, 3),
                one.name,
                one.client,
            )
            for one in longest
        ]
        drawn.append(Row(host, device, slices))
    return Picture(number, time_s, timeline.length_s * 1e3, drawn, omitted)


@dataclass(slots=True)
class _Compared:
    """A host beside the others in one gang."""

    time_s: float
    begins_s: float
    """Seconds by which the host begins later than the others."""
    ends_s: float
    gang_s: float


@dataclass(slots=True)
class Stragglers:
    """Compares the hosts of gangs over minutes."""

    _hosts: defaultdict[str, deque[_Compared]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=PARTS_KEPT))
    )

    def learn(self, timeline: Timeline, now_s: float) -> None:
        """Compare the hosts of each gang in a timeline; `now_s` is its time on any clock."""
        error_s = timeline.clock_error_s
        gangs: defaultdict[tuple[int, int, str], dict[str, Computation]] = defaultdict(dict)
        twice = set()
        for one in timeline.computations:
            if one.is_open or one.divided > 1 or not one.device.isdecimal():
                continue
            key = one.run, one.segment, one.name
            longest = gangs[key].get(one.host)
            if longest is None:
                gangs[key][one.host] = one
            elif longest.device == one.device:
                twice.add(key)  # it was called several times: which belongs to which is not known
            elif one.end_s > longest.end_s:
                gangs[key][one.host] = one
        for key, hosts in gangs.items():
            if key not in twice and len(hosts) > 1:
                self._compare(hosts, error_s, now_s)

    def _compare(self, hosts: dict[str, Computation], error_s: float, now_s: float) -> None:
        gang_s = median(one.end_s - one.start_s for one in hosts.values())
        for host, own in hosts.items():
            rest = [one for name, one in hosts.items() if name != host]
            begins_s = own.start_s - median(one.start_s for one in rest)
            ends_s = own.end_s - median(one.end_s for one in rest)
            begins_s, ends_s = (0.0 if abs(s) <= error_s else s for s in (begins_s, ends_s))
            second_s = now_s + int(own.end_s)
            self._hosts[host].append(_Compared(second_s, begins_s, ends_s, gang_s))

    def slow(self, now_s: float) -> tuple[SlowHost, ...]:
        """Return the slow hosts, the slowest first."""
        slow = []
        for host, compared in list(self._hosts.items()):
            while compared and compared[0].time_s < now_s - REMEMBERED_S:
                compared.popleft()
            if not compared:
                del self._hosts[host]
            elif len(compared) >= LEAST_GANGS and (one := _judged(host, compared)) is not None:
                slow.append(one)
        return tuple(sorted(slow, key=lambda one: -one.behind))

    def behind(self, host: str) -> float | None:
        """Return how much later a host is than the others of its gangs, in seconds; None if not known."""
        compared = self._hosts.get(host)
        return max(map(fmean, _behind(compared))) if compared else None


def _behind(compared: Sequence[_Compared]) -> tuple[list[float], list[float]]:
    return [one.begins_s for one in compared], [one.ends_s for one in compared]


def _judged(host: str, compared: Sequence[_Compared]) -> SlowHost | None:
    behind = max(_behind(compared), key=fmean)
    behind_s, gang_s = fmean(behind), fmean(one.gang_s for one in compared)
    late = sum(s > SLOW * one.gang_s for s, one in zip(behind, compared, strict=True))
    often, part = late / len(compared), behind_s / max(gang_s, 1e-9)
    if behind_s < LEAST_S or part < SLOW or not _is_sure(behind, compared):
        return None
    return SlowHost(host, behind_s, part, len(compared), often)


def _is_sure(behind: Sequence[float], compared: Sequence[_Compared]) -> bool:
    """Whether a host is behind all the time: gangs of one second may be late for one reason."""
    seconds: defaultdict[float, list[float]] = defaultdict(list)
    for late_s, one in zip(behind, compared, strict=True):
        seconds[one.time_s].append(late_s)
    means = [fmean(ones) for ones in seconds.values()]
    return len(means) >= LEAST_SECONDS and fmean(means) >= SURE * stdev(means) / len(means) ** 0.5
