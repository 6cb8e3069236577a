"""Reads the rows that count of a value on this host (`pw.core.programs.counted`).

Rows and counts are read by two ops that are submitted together, so no later op takes the buffers of one of them
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from pw.core.errors import ErrorReport
from pw.core.landing import Bytes
from pw.core.programs.counted import (
    Array,
    counts_read,
    filled,
    is_without_rows,
    numbers_of,
    unpacked,
    whole_piece,
    wrong_counts,
)
from pw.core.programs.plan import Counts, Receive, Route
from pw.core.sharding import ArraySpec, DeviceAddress, box_shape
from pw.devices.host.backend import Part, Read
from pw.devices.host.value import Value

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


class ArrivedRows(NamedTuple):
    """What came along a route."""

    parts: list[Part]
    padding: list[Array]
    """Inside of the parts: to be filled with zeros."""
    size_bytes: int


def arrived_rows(receive: Receive, route: Route, buffer: bytes | Bytes) -> ArrivedRows:
    """Return the parts of the destination's shards that came along a route.

    A piece that is a whole shard is used where it landed, if a quarter of its rows count: to clear its
    padding is then quicker than to copy its rows over fresh zeros. Raises ValueError if the buffer is not
    what a sender packs.
    """
    assert receive.counts is not None
    spec, lead = receive.source, len(receive.counts.spec.shape)
    if is_without_rows(buffer, route, lead):
        return ArrivedRows([], [], len(buffer))
    shard = tuple((0, size) for size in receive.spec.sharding.shard_shape(receive.spec.shape))
    pieces, size_bytes = unpacked(buffer, route, spec, lead)
    parts: list[Part] = []
    padding: list[Array] = []
    for index, (piece, numbers, rows) in enumerate(pieces):
        most = numbers.size * box_shape(piece.source_box)[lead]
        lands = not isinstance(buffer, bytes) and buffer.flags.writeable
        if lands and piece.destination_box == shard and 4 * int(numbers.sum()) >= most:
            assert isinstance(buffer, np.ndarray)
            array = whole_piece(buffer, route, spec, lead, index)
            parts.append((piece.destination_devices, shard, array))
            padding += [array[cell][numbers[cell] :] for cell in np.ndindex(numbers.shape)]
            continue
        for (_, _, box), own in zip(filled(piece, numbers), rows, strict=True):
            parts.append((piece.destination_devices, box, own.reshape(box_shape(box))))
    return ArrivedRows(parts, padding, size_bytes)
