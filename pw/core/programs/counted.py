"""Counted edges: of arrays that are filled in part, only the filled rows travel.

An array of *rows* has the shape `(*lead, capacity, *rest)`, and its *counts*, integers, have the shape
`lead`: of each cell of `lead`, the first `counts[cell]` of `capacity` rows are the value. The others are
padding, which does not travel: receivers see zeros there.

The plan of a counted edge is that of any edge; its routes say which pieces go where at most. What
travels along a route is

    how many rows of each cell of its pieces count (int32) | up to the next 64 bytes | those rows

In a message the rows follow each other without gaps, in the order of pieces and cells. In a landing, which has
room for all, pieces and cells lie where they would if all rows counted (*spread*), so that a receiver can use
them where they are. A route without rows is just its numbers, so a receiver always hears from each
sender. Hosts that send hold all counts, so all find the same error in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pw.core.errors import ErrorReport, ResultMismatch, ShardingError
from pw.core.landing import Bytes
from pw.core.programs.plan import BoxCopy, Counts, Route
from pw.core.programs.reshard import LAYOUTS_KEPT, route_layout
from pw.core.sharding import ALIGNMENT_BYTES, ArraySpec, Box, box_shape, dtype_of

NUMBER = np.dtype(np.int32)
"""Dtype of counts that travel."""

Array = np.ndarray[Any, Any]


class Filled(NamedTuple):
    """The rows of one cell of a piece that count."""

    cell: tuple[int, ...]
    """Place of the cell in the piece."""
    rows: int
    box: Box
    """Box of the rows in the destination shard."""


def check_counts(rows: ArraySpec, counts: ArraySpec) -> None:
    """Raise ShardingError if `counts` cannot say how many rows count on each host that has `rows`."""
    lead = len(counts.shape)
    if rows.shape[:lead] != counts.shape or len(rows.shape) <= lead:
        raise ShardingError(
            f"rows {rows.short} cannot have counts {counts.short}: the counts have the first dimensions of "
            "the rows, and the next dimension is the capacity"
        )
    if not np.issubdtype(dtype_of(counts.dtype), np.integer):
        raise ShardingError(f"counts are integers, not {counts.short}")
    if counts.placement != rows.placement or max(counts.sharding.partitions(lead), default=1) > 1:
        raise ShardingError(
            f"the counts {counts.short} of {rows.short} must be replicated on the devices of the rows, in "
            "the same order"
        )


@lru_cache(maxsize=LAYOUTS_KEPT)
def most_bytes(route: Route, source: ArraySpec, lead: int) -> int:
    """Return the size of what travels along a route if all rows count."""
    return _numbers_bytes(route, lead) + route_layout(route, source)[1]


def wrong_counts(counts: Array, rows: ArraySpec, maker: str) -> ErrorReport | None:
    """Return the error of counts that are negative, or more than there are rows; None if there is none."""
    words = impossible(counts, rows.shape[counts.ndim])
    if words is None:
        return None
    return ErrorReport.of(ResultMismatch(f"{maker} made counts for rows {rows.short} that {words}"))


def impossible(counts: Array, capacity: int) -> str | None:
    """Return the first count that is negative or above the capacity, as words for users; None if none is."""
    wrong = (counts < 0) | (counts > capacity)
    if not wrong.any():
        return None
    at = tuple(int(index) for index in np.argwhere(wrong)[0])
    where = f" at {list(at)}" if at else ""
    return f"say {int(counts[at])}{where}; counts are from 0 to the capacity, {capacity}"


def numbers_of(route: Route, source: ArraySpec, counts: Array) -> list[Array]:
    """Return how many rows of each cell count, for each piece of a route.

    Args:
        route: a route of an edge.
        source: the spec of the rows at the sender.
        counts: all counts.
    """
    lead, numbers = counts.ndim, []
    for piece in route.pieces:
        shard = source.box(piece.source_device)
        cells = tuple(
            slice(first + start, first + stop)
            for (first, _), (start, stop) in zip(shard[:lead], piece.source_box, strict=False)
        )
        (first, _), (start, stop) = shard[lead], piece.source_box[lead]
        beyond = counts[cells].astype(np.int64) - (first + start)
        numbers.append(np.clip(beyond, 0, stop - start).astype(NUMBER))
    return numbers


def filled(piece: BoxCopy, numbers: Array) -> Iterator[Filled]:
    """Yield the cells of a piece with rows that count, in their order."""
    lead, box = numbers.ndim, piece.destination_box
    below = box[lead][0]
    for index in np.argwhere(numbers):
        cell = tuple(index.tolist())
        rows = int(numbers[cell])
        place = [(start + at, start + at + 1) for (start, _), at in zip(box, cell, strict=False)]
        yield Filled(cell, rows, (*place, (below, below + rows), *box[lead + 1 :]))


def packed(
    route: Route, source: ArraySpec, counts: Array, views: Sequence[Array], most_packed_bytes: int
) -> tuple[list[tuple[int, Array]], int]:
    """Return what travels along a route, as arrays with their offsets in bytes, and their size together.

    If that is more than `most_packed_bytes`, the offsets are those of a landing.

    Args:
        route: a route of an edge.
        source: the spec of the rows at the sender.
        counts: all counts.
        views: the pieces of the route, with their padding.
    """
    numbers = numbers_of(route, source, counts)
    flat = np.concatenate([one.reshape(-1) for one in numbers])
    begin = _aligned(flat.nbytes)
    close: list[tuple[int, Array]] = [(0, flat)]
    spread: list[tuple[int, Array]] = [(0, flat)]
    size_bytes = begin if flat.any() else flat.nbytes
    offsets = route_layout(route, source)[0]
    for piece, each, view, offset in zip(route.pieces, numbers, views, offsets, strict=True):
        cell_bytes = view.nbytes // max(each.size, 1)
        for cell, rows, _ in filled(piece, each):
            counted, at = view[cell][:rows], _place(cell, each.shape)
            close.append((size_bytes, counted))
            spread.append((begin + offset + at * cell_bytes, counted))
            size_bytes += counted.nbytes
    return (spread if size_bytes > most_packed_bytes else close), size_bytes


def joined(parts: Sequence[tuple[int, Array]], size_bytes: int) -> bytes:
    """Return packed arrays as one buffer."""
    buffer = bytearray(size_bytes)
    for offset, array in parts:
        buffer[offset : offset + array.nbytes] = array.tobytes()
    return bytes(buffer)


def is_without_rows(buffer: bytes | Bytes, route: Route, lead: int) -> bool:
    """Whether what came along a route says that none of its rows count."""
    size_bytes = NUMBER.itemsize * sum([_cells(piece, lead) for piece in route.pieces])
    return isinstance(buffer, bytes) and len(buffer) == size_bytes and not any(buffer)


def unpacked(
    buffer: bytes | Bytes, route: Route, source: ArraySpec, lead: int
) -> tuple[list[tuple[BoxCopy, Array, list[Array]]], int]:
    """Return what came along a route: each piece with the numbers and the rows of its cells; and its size.

    The rows are those of the cells with rows that count, as `filled` yields them. They are spread if the
    buffer is a landing.

    Raises:
        ValueError: the buffer is not what a sender packs.
    """
    dtype, pieces = dtype_of(source.dtype), []
    is_spread = not isinstance(buffer, bytes)
    rest = np.frombuffer(buffer, NUMBER, sum(_cells(piece, lead) for piece in route.pieces))
    begin = _aligned(rest.nbytes)
    size_bytes = begin if rest.any() else rest.nbytes
    for piece, offset in zip(route.pieces, route_layout(route, source)[0], strict=True):
        shape = box_shape(piece.source_box)
        own, rest = np.split(rest, [_cells(piece, lead)])
        if own.size and not 0 <= own.min() <= own.max() <= shape[lead]:
            raise ValueError(f"it says {own.tolist()} of {shape[lead]} rows")
        numbers, rows = own.reshape(shape[:lead]), []
        row_bytes = math.prod(shape[lead + 1 :]) * dtype.itemsize
        for cell, count, _ in filled(piece, numbers):
            at = size_bytes
            if is_spread:
                at = begin + offset + _place(cell, numbers.shape) * shape[lead] * row_bytes
            flat = np.frombuffer(buffer, np.uint8, count * row_bytes, at)
            rows.append(flat.view(dtype).reshape(count, *shape[lead + 1 :]))
            size_bytes += flat.nbytes
        pieces.append((piece, numbers, rows))
    return pieces, size_bytes


def whole_piece(buffer: Bytes, route: Route, source: ArraySpec, lead: int, index: int) -> Array:
    """Return one piece of a landing, with whatever is in its padding."""
    piece = route.pieces[index]
    begin = _numbers_bytes(route, lead) + route_layout(route, source)[0][index]
    dtype, shape = dtype_of(source.dtype), box_shape(piece.source_box)
    return buffer[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def counts_read(route: Route, counts: Counts) -> list[tuple[int, Box]]:
    """Return the box that the sender of a route reads of the counts: all of them, on one of its devices."""
    return [(route.pieces[0].source_device, tuple((0, size) for size in counts.spec.shape))]


def _numbers_bytes(route: Route, lead: int) -> int:
    return _aligned(NUMBER.itemsize * sum(_cells(piece, lead) for piece in route.pieces))


def _place(cell: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the number of a cell in row-major order."""
    place = 0
    for at, size in zip(cell, shape, strict=True):
        place = place * size + at
    return place


def _cells(piece: BoxCopy, lead: int) -> int:
    return math.prod(box_shape(piece.source_box[:lead]))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
