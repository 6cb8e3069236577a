"""What a timeline has of one client, and how the time of the block is divided among its parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pw.core.ids import client_of
from pw.operating.timeline.timeline import Computation, Timeline

Span = tuple[float, float]
"""Start and end, in seconds."""
PARTS = ("devices", "transfers", "other clients", "hosts", "controller", "client")
"""Names of parts, to which moments belong: to the first that has something under way, or else to the last."""


class FunctionWork(NamedTuple):
    """The computations of one function."""

    name: str
    calls: int
    """Number of computations, one for each device of each call."""
    device_s: float
    """Their time on all devices together."""


class Work:
    """One client's part of a timeline.

    Args:
        timeline: of the cluster.
        client: number of the client.
        sent_s: when the client sent each run that it sent in the block, in seconds of the timeline.
    """

    def __init__(self, timeline: Timeline, client: int, sent_s: Mapping[int, float]) -> None:
        self.timeline = timeline
        self.sent_s = sent_s
        self.length_s = timeline.length_s
        ran = [one for one in timeline.computations if one.client == client]
        self.computations = [one for one in ran if one.device != "python"]
        self.devices = {(one.host, one.device) for one in self.computations}
        self.foreign = [
            one
            for one in timeline.computations
            if one.client != client and (one.host, one.device) in self.devices
        ]
        self.transfers = [one for one in timeline.transfers if one.client == client]
        self.calls = [one for one in timeline.calls if client_of(one.run) == client]
        self.launches = [one for one in timeline.launches if client_of(one.run) == client]

    def parts(self) -> Iterator[tuple[str, float]]:
        """Yield each part with its seconds; together they are the length of the timeline."""
        launched = [self._span(one.launched_s, one.ended_s) for one in self.launches]
        ends = {one.run: one.ended_s for one in self.calls}
        began = {**{one.run: one.began_s for one in self.calls}, **self.sent_s}
        called = [self._span(start, ends.get(run)) for run, start in began.items()]
        layers: tuple[Iterable[Span], ...] = (
            _spans(self.computations),
            ((one.start_s, one.end_s) for one in self.transfers),
            common(joined(_spans(self.foreign)), joined(called)),
            launched,
            called,
        )
        covered: list[Span] = []
        before_s = 0.0
        for name, layer in zip(PARTS, layers, strict=False):
            inside = ((max(0.0, start), min(end, self.length_s)) for start, end in layer)
            covered = joined([*covered, *inside])
            yield name, length_s(covered) - before_s
            before_s = length_s(covered)
        yield PARTS[-1], max(0.0, self.length_s - before_s)

    def _span(self, start_s: float | None, end_s: float | None) -> Span:
        return start_s or 0.0, self.length_s if end_s is None else end_s

    @property
    def busy(self) -> float:
        """The part of the time in which the devices computed for the client, on average."""
        all_s = len(self.devices) * self.length_s
        return length_s(_spans(self.computations)) / all_s if all_s else 0.0

    def functions(self) -> list[FunctionWork]:
        """Return the functions, the one with the most device time first."""
        times: defaultdict[str, list[float]] = defaultdict(list)
        for one in self.computations:
            times[one.name].append(one.end_s - one.start_s)
        functions = [FunctionWork(name, len(each), sum(each)) for name, each in times.items()]
        return sorted(functions, key=lambda one: -one.device_s)

    def routes(self) -> list[tuple[str, int]]:
        """Return the bytes that were moved on each way, the most first."""
        moved: Counter[str] = Counter()
        for one in self.transfers:
            if one.kind != "edge":
                moved[f"{one.kind} {'to' if one.is_incoming else 'from'} {one.host}"] += (
                    one.size_bytes
                )
            elif one.is_incoming:
                moved[f"{one.peer} → {one.host}"] += one.size_bytes
        return moved.most_common()

    def neighbours(self) -> list[str]:
        """Return the names of other clients on the same devices, the one with the most device time first."""
        times: defaultdict[int, float] = defaultdict(float)
        for one in self.foreign:
            times[one.client] += one.end_s - one.start_s
        order = sorted(times, key=lambda client: -times[client])
        return [self.timeline.clients.get(client, "another client") for client in order]

    def latest_start(self) -> tuple[str, float]:
        """Return the program of the call that waited longest for its first launch, and how long in seconds."""
        first: dict[int, float] = {}
        for launch in self.launches:
            if launch.launched_s is not None:
                first[launch.run] = min(launch.launched_s, first.get(launch.run, launch.launched_s))
        waited = ((first[run] - sent_s, run) for run, sent_s in self.sent_s.items() if run in first)
        took_s, run = max(waited, default=(0.0, 0))
        return self.timeline.program(run), took_s


def _spans(computations: Iterable[Computation]) -> Iterator[Span]:
    return ((one.start_s, one.end_s) for one in computations)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the moments that some span covers, as spans in order that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def common(some: list[Span], others: list[Span]) -> Iterator[Span]:
    """Yield the moments that both lists cover; each list is as `joined` returns it."""
    a = b = 0
    while a < len(some) and b < len(others):
        start, end = max(some[a][0], others[b][0]), min(some[a][1], others[b][1])
        if start < end:
            yield start, end
        if some[a][1] < others[b][1]:
            a += 1
        else:
            b += 1


def length_s(spans: Iterable[Span]) -> float:
    """Return the length of all spans together."""
    return sum(end - start for start, end in spans)
