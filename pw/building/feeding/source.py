"""What a stream is made of, and its position, which checkpoints contain."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.signature import ArrayType
from pw.core.errors import ArgumentError
from pw.core.functions.feeding import NOTE_BYTES, Note, note_of
from pw.core.messages import INLINE_BYTES

SAVED_BYTES = INLINE_BYTES
"""A saved position: a host value of a checkpoint."""

_HEAD = struct.Struct("<qqqq")


@dataclass(frozen=True, eq=False)
class StreamSource:
    """A stream as the user described it."""

    name: str
    make: Callable[..., Any]
    makes_part: bool
    types: tuple[ArrayType, ...]
    tree: Any
    mesh: OwnMesh
    prefetch: int
    room: int
    """Bytes for the state of an iterator."""
    timeout_s: float


class Position(NamedTuple):
    """The position of a stream."""

    number: int
    """Number of elements that were handed out."""
    rows: np.ndarray[Any, Any] | None = None
    """The notes with the last one, a row for each device (one row in the client); None if no part has a
    state."""

    def saved(self) -> np.ndarray[Any, Any]:
        """Return the position as bytes of fixed size.

        States that do not fit are left out: the elements are then skipped.
        """
        kinds: list[bytes] = []
        which: list[int] = []
        for row in () if self.rows is None else self.rows:
            data = row.tobytes()
            if data not in kinds:
                kinds.append(data)
            which.append(kinds.index(data))
        width = 0 if not kinds else len(kinds[0])
        packed = _HEAD.pack(self.number, len(which), len(kinds), width)
        packed += struct.pack(f"<{len(which)}q", *which) + b"".join(kinds)
        if len(packed) > SAVED_BYTES:
            packed = _HEAD.pack(self.number, 0, 0, 0)
        return np.frombuffer(packed.ljust(SAVED_BYTES, b"\0"), np.uint8)

    @classmethod
    def of(cls, saved: Any) -> Position:
        """Return the position in these bytes. Raises ArgumentError."""
        array = np.asarray(saved)
        if array.dtype != np.uint8 or array.shape != (SAVED_BYTES,):
            raise ArgumentError(f"{saved!r} is no position of a stream, as pw.checkpoint saves it")
        data = array.tobytes()
        number, rows, kinds, width = _HEAD.unpack_from(data)
        if not rows:
            return cls(number)
        which = struct.unpack_from(f"<{rows}q", data, _HEAD.size)
        start = _HEAD.size + 8 * rows
        table = np.frombuffer(data, np.uint8, kinds * width, start).reshape(kinds, width)
        return cls(number, table[list(which)])

    def fitting(self, rows: int, room: int) -> Position:
        """Return the position for so many rows with room for states of so many bytes.

        If its own do not fit, their states are left out.
        """
        if self.rows is not None and self.rows.shape == (rows, NOTE_BYTES + room):
            return self
        return Position(self.number)


def notes_of(rows: np.ndarray[Any, Any]) -> Sequence[Note]:
    """Return the notes of a fetched element."""
    return [note_of(row) for row in rows]
