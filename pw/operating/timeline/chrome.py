"""Writes a timeline in Chrome's trace event format, which Perfetto and chrome://tracing open.

Each host is a process with a row for each device, for its transfers in and out, and for launches that
wait. The controller is a process with rows of the calls, and of queued and launched segments of each
island. What overlaps in a row is drawn in further rows of the same name, up to a bound; counters say how many
there were in all.

Perfetto chooses the colour of a slice by its name and ignores digits; chrome://tracing obeys `cname`. So
each name ends with the letter of its client.
"""

from __future__ import annotations

import heapq
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pw.core.errors import ArgumentError
from pw.core.ids import CONTROLLER, client_of, run_name
from pw.operating.timeline.timeline import Computation, Launch, Timeline, Transfer, Wait, letters

Event = dict[str, Any]
H = TypeVar("H", Computation, Transfer, Wait)

LANES = 4
"""Rows for what overlaps at the controller; what finds no place is counted in `otherData`."""

HOST_LANES = 16
"""Rows for transfers of one direction, and for waits, of each host."""

COLOURS = (
    *("thread_state_uninterruptible", "thread_state_iowait", "thread_state_running"),
    *("thread_state_runnable", "background_memory_dump", "vsync_highlight_color"),
    *("good", "bad", "terrible", "yellow", "olive", "rail_response", "rail_animation"),
    *("rail_idle", "rail_load", "startup", "heap_dump_stack_frame", "cq_build_passed"),
)
"""Reserved names of colours in chrome://tracing."""

CONTROLLER_PID = 1

LAUNCH_S = 20e-6
"""Seconds for which a launch is drawn in the row of launches; an arrow begins there."""


def write(timeline: Timeline, path: Path) -> None:
    """Write the file. Raises ArgumentError if there is no such folder, or it cannot be written."""
    writer = _Writer(timeline)
    document = {
        "traceEvents": list(writer.events()),
        "displayTimeUnit": "ms",
        "otherData": {
            "summary": timeline.summary,
            "missing": timeline.notes,
            "without a row": writer.left_out,
            "clients": {
                f"{letter} = {number}": timeline.clients.get(number, "left, or of another tenant")
                for number, letter in _letters(timeline).items()
            },
            "clocks": {
                one.node: f"within {one.clock_error_s * 1e6:.0f} us"
                for one in timeline.processes
                if one.records
            },
        },
    }
    try:
        path.write_bytes(msgspec.json.encode(document))
    except OSError as error:
        raise ArgumentError(f"the timeline cannot be written to {path}: {error}") from None


def _letters(timeline: Timeline) -> dict[int, str]:
    """Return the letters of the clients that did something."""
    return letters(
        [
            *(one.client for one in timeline.computations),
            *(one.client for one in timeline.transfers),
            *(client_of(one.run) for one in timeline.launches),
            *(client_of(one.run) for one in timeline.calls),
        ]
    )


@dataclass(slots=True)
class _Bar:
    """A slice, before it has a place in a row."""

    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]
    colour: str = ""
    tid: int = 0
    """Number of its row; 0 while it has none."""
    pid: int = 0


@dataclass(slots=True)
class _Rows:
    """The rows of one process."""

    pid: int
    name: str
    rows: list[str] = field(default_factory=list)

    def add(self, name: str) -> int:
        self.rows.append(name)
        return len(self.rows)


_Route = tuple[str, str, int, int]
"""The sending and the receiving host, the run, and the edge."""


def _route(one: Transfer) -> _Route:
    ends = (one.peer, one.host) if one.is_incoming else (one.host, one.peer)
    return (*ends, one.run, one.edge)


def _by_host(ones: Iterable[H]) -> dict[str, list[H]]:
    groups: defaultdict[str, list[H]] = defaultdict(list)
    for one in ones:
        groups[one.host].append(one)
    return groups


def _waiting(one: Wait) -> _Bar:
    args = {"run": run_name(one.run), "edge": one.edge}
    return _Bar(f"wait for {one.peer}", one.start_s, one.end_s, args, "grey")


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._letters = _letters(timeline)
        self._arrows = 0
        self.left_out = 0
        """Slices that overlapped with too many others."""
        self._launched: dict[tuple[int, int], _Bar] = {}
        self._computed: dict[tuple[str, int], list[tuple[float, _Bar, int]]] = defaultdict(list)
        """Called computations of each host and run, with their segments, in the order of calls."""

    def events(self) -> Iterator[Event]:
        timeline = self._timeline
        yield from self._controller()
        hosts = {one.node for one in timeline.processes if one.node != CONTROLLER}
        computations = _by_host(timeline.computations)
        transfers, waits = _by_host(timeline.transfers), _by_host(timeline.waits)
        arriving: dict[_Route, _Bar] = {}
        leaving: dict[_Route, _Bar] = {}
        for index, host in enumerate(sorted(hosts), 1):
            rows = _Rows(CONTROLLER_PID + index, f"host {host}")
            yield from self._devices(rows, computations[host])
            for incoming, name, ends in ((True, "in", arriving), (False, "out", leaving)):
                chosen = [one for one in transfers[host] if one.is_incoming == incoming]
                bars = [self._transfer(one) for one in chosen]
                yield from self._row(rows, f"transfers {name}", bars, HOST_LANES)
                for transfer, bar in zip(chosen, bars, strict=True):
                    ends[_route(transfer)] = bar
            bars = [_waiting(one) for one in waits[host]]
            yield from self._row(rows, "waits", bars, HOST_LANES)
            for wait, bar in zip(waits[host], bars, strict=True):
                yield from self._to_computation("wait", bar, host, wait.run, wait.end_s)
            yield from self._named(rows, index)
        for route, bar in leaving.items():
            yield from self._arrow("edge", bar, arriving.get(route))
        for (run, segment), bar in self._launched.items():
            for (_, other), called in self._computed.items():
                if other == run:
                    first = next((bar for _, bar, of in called if of == segment), None)
                    yield from self._arrow("launch", bar, first)

    # --- rows ----------------------------------------------------------------------------------------

    def _devices(self, rows: _Rows, computations: Sequence[Computation]) -> Iterator[Event]:
        by_device: dict[str, list[Computation]] = defaultdict(list)
        for one in computations:
            by_device[one.device].append(one)
        for device in sorted(by_device, key=lambda d: (not d.isdigit(), d.zfill(4))):
            tid = rows.add(f"device {device}" if device.isdigit() else "host functions")
            for one in by_device[device]:
                bar = self._computation(one)
                bar.pid, bar.tid = rows.pid, tid
                self._computed[one.host, one.run].append((one.called_s, bar, one.segment))
                yield _event(bar)

    def _computation(self, one: Computation) -> _Bar:
        program = self._timeline.program(one.run)
        args: dict[str, Any] = {
            "client": self._client(one.client),
            "program": program,
            "run": run_name(one.run),
            "called": f"{max(0.0, one.start_s - one.called_s) * 1e3:.3f} ms before",
        }
        if one.divided > 1:
            args["end"] = f"seen of {one.divided} computations together"
        if one.is_open:
            args["end"] = "not seen"
        name = f"{one.name or 'a computation'} [{self._letters[one.client]}]"
        return _Bar(
            name, one.start_s, one.end_s, args, self._colour(one.client, program or one.name)
        )

    def _transfer(self, one: Transfer) -> _Bar:
        took_s = max(one.end_s - one.start_s, 1e-9)
        args: dict[str, Any] = {
            "client": self._client(one.client),
            "bytes": one.size_bytes,
            "MB/s": round(one.size_bytes / took_s / 1e6, 1),
        }
        if one.kind == "edge":
            args |= {"run": run_name(one.run), "edge": one.edge}
        way = "from" if one.is_incoming else "to"
        other = f" {way} {one.peer}" if one.peer else ""
        name = f"{one.kind}{other} [{self._letters[one.client]}]"
        return _Bar(name, one.start_s, one.end_s, args, self._colour(one.client, one.kind))

    def _controller(self) -> Iterator[Event]:
        timeline, end_s = self._timeline, self._timeline.length_s
        rows = _Rows(CONTROLLER_PID, "controller")
        calls = [
            _Bar(
                f"{one.program or 'a call'} [{self._letters[client_of(one.run)]}]",
                one.began_s or 0.0,
                end_s if one.ended_s is None else one.ended_s,
                {"client": self._client(client_of(one.run)), "run": run_name(one.run)},
                self._colour(client_of(one.run), one.program),
            )
            for one in timeline.calls
        ]
        yield from self._row(rows, "calls", calls)
        yield from _counter(rows.pid, "calls in flight", calls)
        of_island: dict[str, list[Launch]] = defaultdict(list)
        for one in timeline.launches:
            of_island[one.island].append(one)
        for island in sorted(of_island):
            ones = of_island[island]
            queued, launched = [], []
            launching: list[_Bar] = []
            for one in ones:
                if one.queued_s is not None or one.launched_s is not None:
                    until_s = end_s if one.launched_s is None else one.launched_s
                    queued.append(self._launch(one, one.queued_s or 0.0, until_s))
                if one.launched_s is not None:
                    until_s = end_s if one.ended_s is None else one.ended_s
                    launched.append(self._launch(one, one.launched_s, until_s))
                    launching.append(self._launch(one, one.launched_s, one.launched_s + LAUNCH_S))
                    self._launched[one.run, one.segment] = launching[-1]
            launching.sort(key=lambda bar: bar.start_s)
            for bar, following in pairwise(launching):
                bar.end_s = min(bar.end_s, following.start_s)
            yield from self._row(rows, f"{island}: launches", launching)
            yield from self._row(rows, f"{island}: queued", queued)
            yield from self._row(rows, f"{island}: launched", launched)
            yield from _counter(rows.pid, f"{island}: queued", queued)
            yield from _counter(rows.pid, f"{island}: launched", launched)
        yield from self._named(rows, 0)

    def _launch(self, one: Launch, start_s: float, end_s: float) -> _Bar:
        client, program = client_of(one.run), self._timeline.program(one.run)
        args = {
            "client": self._client(client),
            "run": run_name(one.run),
            "segment": one.segment,
            "device time": f"{one.device_s * 1e3:.3f} ms",
        }
        name = f"{program or 'a launch'} [{self._letters[client]}]"
        return _Bar(name, start_s, end_s, args, self._colour(client, program))

    def _row(self, rows: _Rows, name: str, bars: list[_Bar], most: int = LANES) -> Iterator[Event]:
        """Place bars in as many rows of this name as they need, up to `most`."""
        free: list[tuple[float, int]] = []
        lanes = 0
        for bar in sorted(bars, key=lambda bar: bar.start_s):
            if free and free[0][0] <= bar.start_s:
                _, bar.tid = heapq.heappop(free)
            elif lanes < most:
                lanes += 1
                bar.tid = rows.add(name if lanes == 1 else f"{name} ({lanes})")
            else:
                self.left_out += 1
                continue
            bar.pid = rows.pid
            heapq.heappush(free, (bar.end_s, bar.tid))
            yield _event(bar)

    def _named(self, rows: _Rows, order: int) -> Iterator[Event]:
        yield _meta(rows.pid, 0, "process_name", name=rows.name)
        yield _meta(rows.pid, 0, "process_sort_index", sort_index=order)
        for tid, name in enumerate(rows.rows, 1):
            yield _meta(rows.pid, tid, "thread_name", name=name)
            yield _meta(rows.pid, tid, "thread_sort_index", sort_index=tid)

    # --- arrows --------------------------------------------------------------------------------------

    def _to_computation(
        self, kind: str, bar: _Bar, host: str, run: int, since_s: float
    ) -> Iterator[Event]:
        """Draw an arrow to the first computation of a run that a host called after a moment."""
        called = self._computed.get((host, run), [])
        called.sort(key=lambda one: one[0])
        at = bisect_left(called, since_s, key=lambda one: one[0])
        if at < len(called):
            yield from self._arrow(kind, bar, called[at][1])

    def _arrow(self, kind: str, origin: _Bar, target: _Bar | None) -> Iterator[Event]:
        """Draw an arrow between two slices that are drawn."""
        if target is None or not origin.tid or not target.tid:
            return
        self._arrows += 1
        for phase, bar, at_s in (("s", origin, origin.end_s), ("f", target, target.start_s)):
            one = {
                "ph": phase,
                "id": self._arrows,
                "cat": kind,
                "name": kind,
                "pid": bar.pid,
                "tid": bar.tid,
                "ts": round(at_s * 1e6, 3),
            }
            yield one | ({"bp": "e"} if phase == "f" else {})

    # --- names ---------------------------------------------------------------------------------------

    def _client(self, number: int) -> str:
        name = self._timeline.clients.get(number)
        return f"{self._letters[number]}: client {number}" + (f" ({name})" if name else "")

    def _colour(self, client: int, what: str) -> str:
        """Return the colour of a client's program: neighbours in the list for one client."""
        index = list(self._letters).index(client) * 5 + zlib.crc32(what.encode()) % 3
        return COLOURS[index % len(COLOURS)]


def _event(bar: _Bar) -> Event:
    return {
        "ph": "X",
        "name": bar.name,
        "pid": bar.pid,
        "tid": bar.tid,
        "ts": round(bar.start_s * 1e6, 3),
        "dur": round(max(0.0, bar.end_s - bar.start_s) * 1e6, 3),
        "args": bar.args,
        "cname": bar.colour,
    }


def _meta(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _counter(pid: int, name: str, bars: Iterable[_Bar]) -> Iterator[Event]:
    """Yield how many of these bars there are at each moment."""
    changes = sorted(change for bar in bars for change in ((bar.start_s, 1), (bar.end_s, -1)))
    count = 0
    for at, (when_s, change) in enumerate(changes):
        count += change
        if at + 1 == len(changes) or changes[at + 1][0] > when_s:
            yield {
                "ph": "C",
                "pid": pid,
                "name": name,
                "ts": round(when_s * 1e6, 3),
                "args": {"count": count},
            }
