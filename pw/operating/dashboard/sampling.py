"""What a short timeline says: how busy devices are, and what hosts send each other.

Theory of operation. A timeline of a fraction of a second (`pw.operating.timeline`) has every computation,
transfer and launch of the cluster in that time. Nothing is recorded between two samples, so they cost hardly
anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import msgspec

from pw.core.ids import client_of
from pw.operating.timeline.timeline import Computation, Timeline

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
