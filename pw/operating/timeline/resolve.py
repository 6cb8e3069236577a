"""Makes a timeline of the records of all processes (`pw.core.recorder` has their fields).

A computation begins when it was called, the one before it on its devices has ended, and what made its
arguments on this host has ended. Where the end of a computation is not known, because its result was
donated, it shares the time until the next known end with the computations up to there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pw.client.session.timelines import RecordedProcess
from pw.core.ids import client_of
from pw.core.recorder import (
    CALLED,
    COMPUTED,
    ENDED,
    FETCHED,
    LAUNCHED,
    RECEIVED,
    SENT,
    UPLOADED,
    WIDTH,
)
from pw.operating.timeline.timeline import (
    Call,
    Computation,
    Launch,
    Process,
    Timeline,
    Transfer,
    Wait,
)


def resolved(
    sources: Sequence[RecordedProcess], clients: dict[int, str], begin_s: float, end_s: float
) -> Timeline:
    """Return the timeline of what was recorded between two moments on this process's clock."""
    timeline = Timeline(end_s - begin_s, clients=dict(clients))
    edges: list[_ResolvedEdge] = []
    launches: dict[tuple[int, int, str], Launch] = {}
    calls: dict[int, Call] = {}
    for source in sources:
        offset_s, error_s = _aligned(source)
        process = Process(source.node, error_s, source.count, source.dropped, source.lost)
        timeline.processes.append(process)
        reader = _Reader(source, offset_s + begin_s, end_s - begin_s)
        reader.read(timeline, edges, launches, calls)
    timeline.computations.sort(key=lambda one: one.start_s)
    _add_edges(timeline, edges)
    timeline.transfers.sort(key=lambda one: one.start_s)
    timeline.waits.sort(key=lambda one: one.start_s)
    timeline.launches = sorted(launches.values(), key=lambda one: one.queued_s or 0.0)
    timeline.calls = sorted(calls.values(), key=lambda one: one.began_s or 0.0)
    return timeline


def _aligned(source: RecordedProcess) -> tuple[float, float]:
    """Return the offset of a clock, and its error.

    An offset within its error is none: processes of one machine have one clock.
    """
    if abs(source.offset_s) <= source.error_s:
        return 0.0, source.error_s
    return source.offset_s, source.error_s


def records_in(part: bytes) -> Iterable[tuple[Any, ...]]:
    """Return the records of a part of a source."""
    values = iter(msgspec.msgpack.decode(part))
    return zip(*[values] * WIDTH, strict=True)


@dataclass(slots=True)
class _ResolvedEdge:
    """One end of a route, as its host has recorded it."""

    host: str
    is_incoming: bool
    start_s: float
    end_s: float
    run: int
    edge: int
    peer: str
    size_bytes: int


class _Reader:
    """Reads the records of one process."""

    def __init__(self, source: RecordedProcess, begin_s: float, length_s: float) -> None:
        self._source = source
        self._begin_s = begin_s
        self._length_s = length_s
        self._names = source.names

    def _time(self, there_s: float) -> float:
        return there_s - self._begin_s

    def _seen(self, there_s: float) -> float | None:
        """Return a time, or None for what happened before or after the timeline, or not at all."""
        here_s = self._time(there_s)
        return here_s if there_s and 0.0 <= here_s <= self._length_s else None

    def _is_within(self, start_s: float, end_s: float) -> bool:
        return end_s >= 0.0 and start_s <= self._length_s

    def _name(self, number: int) -> str:
        return self._names.get(number, "?")

    def read(
        self,
        timeline: Timeline,
        edges: list[_ResolvedEdge],
        launches: dict[tuple[int, int, str], Launch],
        calls: dict[int, Call],
    ) -> None:
        computed: list[_Computed] = []
        ended: dict[int, float] = {}
        last_s = 0.0
        for kind, start, end, run, *more in self._records():
            start_s, end_s = self._time(start), self._time(end) if end else self._length_s
            last_s = max(last_s, self._time(end or start))
            if kind == COMPUTED:
                segment, serial, what, maker, makers = more
                if end:
                    ended[serial] = end_s
                devices, _, name = self._name(what).partition(" ")
                where = tuple(devices.split(","))
                computed.append(
                    _Computed(start_s, serial, run, segment, name, where, (maker, *makers))
                )
            elif kind == ENDED:
                ended[run] = start_s
            elif not self._is_within(start_s, end_s):
                continue
            elif kind == LAUNCHED:
                segment, island, launched, device_us, _ = more
                name = self._name(island)
                launches[run, segment, name] = Launch(
                    name,
                    run,
                    segment,
                    self._seen(start),
                    self._seen(launched),
                    self._seen(end),
                    device_us * 1e-6,
                )
            elif kind == CALLED:
                program = self._name(more[0])
                calls[run] = Call(run, program, self._seen(start), self._seen(end))
            elif kind in (SENT, RECEIVED):
                edge, peer, size = more[:3]
                host, name = self._source.node, self._name(peer)
                edges.append(
                    _ResolvedEdge(host, kind == RECEIVED, start_s, end_s, run, edge, name, size)
                )
            elif kind in (UPLOADED, FETCHED):
                what = "upload" if kind == UPLOADED else "fetch"
                host, client = self._source.node, client_of(run)
                timeline.transfers.append(
                    Transfer(host, kind == UPLOADED, what, start_s, end_s, more[0], client)
                )
        covered_s = self._length_s if not self._source.lost else min(last_s, self._length_s)
        for one in _placed(self._source.node, computed, ended, covered_s):
            if self._is_within(one.start_s, one.end_s):
                timeline.computations.append(one)

    def _records(self) -> Iterable[tuple[Any, ...]]:
        for part in self._source.parts:
            yield from records_in(part)


@dataclass(slots=True)
class _Computed:
    called_s: float
    serial: int
    run: int
    segment: int
    name: str
    devices: tuple[str, ...]
    after: tuple[int, ...]


def _placed(
    host: str, computed: list[_Computed], ended: dict[int, float], covered_s: float
) -> Iterable[Computation]:
    """Give each computation its place on its devices; records end at `covered_s`, in seconds."""
    computed.sort(key=lambda one: one.serial)
    on_device: defaultdict[str, list[_Computed]] = defaultdict(list)
    for one in computed:
        for device in one.devices:
            on_device[device].append(one)
    for device, ones in on_device.items():
        free_s = -1.0
        group: list[_Computed] = []
        ends = _in_order([ended.get(one.serial) for one in ones])
        for one, end_s, following_s in zip(ones, ends, [*ends[1:], None], strict=True):
            group.append(one)
            if end_s is None or end_s == following_s:
                continue
            start_s = max([free_s, group[0].called_s, *_ready(group[0], ended)])
            end_s = max(end_s, start_s)
            yield from _shared(host, device, group, start_s, end_s)
            free_s, group = end_s, []
        if group:
            start_s = max([free_s, group[0].called_s, *_ready(group[0], ended)])
            for part in _shared(host, device, group, start_s, max(covered_s, start_s)):
                yield replace(part, is_open=True)


def _in_order(ends: list[float | None]) -> list[float | None]:
    """Return ends none of which is later than a later one: a device computes one after the other.

    A thread that has to wake up first may see an end after the next one was seen.
    """
    least: float | None = None
    for at in reversed(range(len(ends))):
        end_s = ends[at]
        if end_s is not None:
            least = ends[at] = end_s if least is None else min(least, end_s)
    return ends


def _ready(one: _Computed, ended: dict[int, float]) -> Iterable[float]:
    """Yield when what made the arguments had ended."""
    return (ended[serial] for serial in one.after if serial in ended)


def _shared(
    host: str, device: str, group: list[_Computed], start_s: float, end_s: float
) -> Iterable[Computation]:
    """Divide the time from a start to an end among computations; none begins before it was called."""
    share_s = (end_s - start_s) / len(group)
    for index, one in enumerate(group):
        until_s = end_s
        if index + 1 < len(group):
            called_s = group[index + 1].called_s
            until_s = min(max(start_s + share_s, called_s), end_s)
        yield Computation(
            host, device, one.name, one.run, one.segment, one.called_s, start_s, until_s, len(group)
        )
        start_s = until_s


def _add_edges(timeline: Timeline, edges: list[_ResolvedEdge]) -> None:
    """Add the two ends of each edge; the bytes are on their way in from when they are sent."""
    sent = {(e.run, e.edge, e.host, e.peer): e for e in edges if not e.is_incoming}
    for end in edges:
        start_s = end.start_s
        if end.is_incoming:
            wait = Wait(end.host, end.run, end.edge, end.peer, end.start_s, end.end_s)
            timeline.waits.append(wait)
            origin = sent.get((end.run, end.edge, end.peer, end.host))
            if origin is not None:
                start_s = min(max(origin.start_s, start_s), end.end_s)
        timeline.transfers.append(
            Transfer(
                end.host,
                end.is_incoming,
                "edge",
                start_s,
                end.end_s,
                end.size_bytes,
                client_of(end.run),
                end.run,
                end.edge,
                end.peer,
            )
        )
