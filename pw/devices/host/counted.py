"""Reads the rows that count of a value on this host (`pw.core.counted`).

Rows and counts are read by two ops that are submitted together, so no later op takes the buffers of one of them
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pw.core.counted import Array, counts_read, filled, numbers_of, wrong_counts
from pw.core.errors import ErrorReport
from pw.core.plan import Counts, Receive, Route, Send
from pw.core.sharding import ArraySpec, DeviceAddress
from pw.devices.host.backend import Part, Read, Value

Counted = Callable[[list[Array], Array], None]
"""Called with the pieces of a route, with their padding, and all counts."""

Failed = Callable[[ErrorReport, bool], None]
"""Called with an error, and whether this host may have it alone."""

Slots = dict[int, Value]


def reads(
    route: Route,
    spec: ArraySpec,
    counts: Counts,
    rows: Value,
    slots: Slots,
    devices: tuple[DeviceAddress, ...],
    done: Counted,
    failed: Failed,
) -> tuple[Read, Read]:
    """Return the ops that read this host's pieces of a route, and the counts; one of the calls follows."""
    held = slots[counts.slot]
    answers: dict[str, list[Array] | ErrorReport] = {}

    def take(name: str, answer: list[Array] | ErrorReport) -> None:
        answers[name] = answer
        if len(answers) < 2:
            return None
        views, numbers = answers["rows"], answers["counts"]
        if isinstance(views, ErrorReport):
            return failed(views, rows.error is None or rows.alone)
        if isinstance(numbers, ErrorReport):
            return failed(numbers, held.error is None or held.alone)
        wrong = wrong_counts(numbers[0], spec, repr(held.maker) if held.maker else counts.maker)
        return done(views, numbers[0]) if wrong is None else failed(wrong, False)

    boxes = [(piece.source_device, piece.source_box) for piece in route.pieces]
    return (
        Read(rows, boxes, spec, devices, partial(take, "rows")),
        Read(held, counts_read(route, counts), counts.spec, devices, partial(take, "counts")),
    )


def parts_of(route: Route, spec: ArraySpec, views: Sequence[Array], counts: Array) -> list[Part]:
    """Return the rows that count of a route within this host, as parts of the destination's shards."""
    parts: list[Part] = []
    numbers = numbers_of(route, spec, counts)
    for piece, each, view in zip(route.pieces, numbers, views, strict=True):
        for cell, rows, box in filled(piece, each):
            shape = [stop - start for start, stop in box]
            parts.append((piece.destination_devices, box, view[cell][:rows].reshape(shape)))
    return parts


def arrives(instruction: Send | Receive, slots: Slots, arriving: dict[Value, Any]) -> bool:
    """Whether the counts of an edge have not arrived."""
    counts = instruction.counts
    return counts is not None and slots.get(counts.slot) in arriving
