"""Cutting arrays into pieces, so that one bulk thread can serve many transfers fairly.

A source may be any array: a strided view, a scalar, empty, of an extension type (bfloat16, int4,
float8). Items with the size of an unsigned integer are copied as such, because numpy then releases
the interpreter lock, which it does not do for extension types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pw.core.landing import Landing
from pw.transport.bulk.blocks import Array, Block, Bytes

Done = Callable[[Exception | None], None]
Ready = Callable[[int, bool, bool], None]
"""Callback that takes a descriptor, and whether it is readable and writable."""
Watch = Callable[[int, Ready, bool], None]
Unwatch = Callable[[int], None]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(slots=True, eq=False)
class Push:
    """One outgoing transfer."""

    landing: Landing
    parts: Sequence[tuple[int, Array]]
    size_bytes: int
    done: Done
    shared: Block | None = None
    """The block of this process in which all parts lie, if the receiver can read them there."""


def checked(landing: Landing, parts: Sequence[tuple[int, Array]], done: Done) -> Push:
    """A push whose parts lie inside the landing.

    Raises:
        ValueError: a part begins before or ends after the landing.
        TypeError: a part holds Python objects, which have no bytes to send.
    """
    size_bytes = 0
    arrays: list[tuple[int, Array]] = []
    for offset, part in parts:
        array: Array = np.asarray(part)
        if array.dtype.hasobject:
            raise TypeError(f"an array of {array.dtype} holds Python objects and cannot be pushed")
        if offset < 0 or offset + array.nbytes > landing.size_bytes:
            raise ValueError(
                f"a part of {array.nbytes} bytes at offset {offset} does not fit into "
                f"{landing.size_bytes} bytes"
            )
        size_bytes += array.nbytes
        arrays.append((offset, array))
    return Push(landing, arrays, size_bytes, done)


def cut(parts: Sequence[tuple[int, Array]], limit_bytes: int) -> Iterator[tuple[int, Array]]:
    """Return the same bytes in pieces of at most that size, as views; nothing is copied."""
    for offset, array in parts:
        if array.nbytes:
            yield from _cut(offset, array, limit_bytes)


def _cut(offset: int, array: Array, limit_bytes: int) -> Iterator[tuple[int, Array]]:
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    if array.flags.c_contiguous:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, limit_bytes):
            yield offset + start, flat[start : start + limit_bytes]
    elif array.nbytes <= limit_bytes:
        yield offset, array
    else:
        row_bytes = array.nbytes // array.shape[0]
        rows = max(1, limit_bytes // row_bytes)
        for start in range(0, array.shape[0], rows):
            yield from _cut(offset + start * row_bytes, array[start : start + rows], limit_bytes)


def place(target: Bytes, offset: int, piece: Array) -> None:
    """Copy a piece to its offset, in row-major order."""
    unsigned = _UNSIGNED.get(piece.dtype.itemsize)
    source = piece if unsigned is None else piece.view(unsigned)
    span = target[offset : offset + piece.nbytes]
    np.copyto(span.view(source.dtype).reshape(source.shape), source)


def packed(piece: Array) -> Bytes:
    """The bytes of a piece in row-major order; a copy only where they are not already."""
    if piece.flags.c_contiguous:
        return piece.reshape(-1).view(np.uint8)
    target: Bytes = np.empty(piece.nbytes, np.uint8)
    place(target, 0, piece)
    return target
