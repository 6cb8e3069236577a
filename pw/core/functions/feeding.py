"""Makes the elements of a stream by their numbers; hosts import this without JAX.

A request names an element, and perhaps a saved state of the generator from before it. The generator
goes on if it stands at that element. Otherwise the feeder makes it anew, restores the state if there is
one, and skips up to the element. So any element can be made again, on any host, and is the same.

Each element comes with a *note*: whether the stream has ended, and the generator's state after the
element.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pw.core.errors import ArgumentError
from pw.core.functions.host_calls import Structure, part_of
from pw.core.functions.parts import HostPart
from pw.core.sharding import box_shape, dtype_of

_NOTE = struct.Struct("<qqqq")
_REQUEST = struct.Struct("<qq")

NOTE_BYTES = _NOTE.size
"""Bytes of a note without a state."""

REQUEST_BYTES = _REQUEST.size

STATE_METHODS = (
    ("get_state", "set_state"),
    ("state_dict", "load_state_dict"),
    ("state", "restore"),
)
"""Names of the methods that save and restore the state of an iterator."""


class Note(NamedTuple):
    """Note of a part of a stream about an element."""

    ended: bool
    """True if there is no such element."""
    state: bytes | None
    """State of the iterator after the element, pickled; None if the iterator has none."""
    part: int
    """Number of the part; `parts` is the number of parts."""
    parts: int

    def row(self, room: int) -> np.ndarray[Any, Any]:
        """Return the note as bytes, with zeros behind, in an array of NOTE_BYTES + room."""
        state = self.state or b""
        size = -1 if self.state is None else len(state)
        packed = _NOTE.pack(self.ended, size, self.part, self.parts) + state
        return np.frombuffer(packed.ljust(NOTE_BYTES + room, b"\0"), np.uint8)


def note_of(row: np.ndarray[Any, Any]) -> Note:
    """Return the note in these bytes."""
    data = row.tobytes()
    ended, size, part, parts = _NOTE.unpack_from(data)
    state = None if size < 0 else data[NOTE_BYTES : NOTE_BYTES + size]
    return Note(bool(ended), state, part, parts)


def request(number: int, base: int) -> np.ndarray[Any, Any]:
    """Return the request for an element, as bytes; the state with it is that after `base` elements."""
    return np.frombuffer(_REQUEST.pack(number, base), np.uint8)


class Feeder:
    """Makes the elements of one part of a stream.

    Args:
        make: returns an iterable; it gets `part` if it `makes_part`.
        results: the structure of an element.
        makes_part: elements are the part only, not whole.
        room: bytes for a state; 0 saves none.
    """

    def __init__(
        self, make: Callable[..., Any], results: Structure, makes_part: bool, room: int
    ) -> None:
        self._make = make
        self._results = results
        self._makes_part = makes_part
        self._room = room
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._save: Callable[[], Any] | None = None

    def __call__(
        self,
        share: HostPart,
        asked: np.ndarray[Any, Any],
        state: np.ndarray[Any, Any] | None = None,
    ) -> list[np.ndarray[Any, Any]]:
        """Return the leaves of an element, and for each device of the host a copy of the note."""
        number, base = _REQUEST.unpack(asked.tobytes())
        note = None if state is None else note_of(state)
        elements = msgspec.structs.replace(
            share, boxes=share.boxes[:-1], shapes=share.shapes[:-1], dtypes=share.dtypes[:-1]
        )
        leaves, answer = self.element(elements, number, base, note)
        (start, stop), _ = share.boxes[-1]
        return [*leaves, np.tile(answer.row(self._room), (stop - start, 1))]

    def element(
        self, share: HostPart, number: int, base: int = 0, note: Note | None = None
    ) -> tuple[list[np.ndarray[Any, Any]], Note]:
        """Return the leaves of element `number` (zeros after the end), and the note.

        Args:
            share: the part, and the declared shapes and dtypes.
            number: from 0.
            base: how many elements the state in `note` comes after.
            note: of an earlier element, or None.

        Raises:
            ResultMismatch: the element is not as declared.
            ArgumentError: the iterator's state is larger than the room for it.
            BaseException: what the generator raises.
        """
        try:
            value = next(self.at(share, number, base, note))
        except StopIteration:
            self._iterator = iter(())
            zeros = [
                np.zeros(box_shape(box), dtype_of(dtype))
                for box, dtype in zip(share.boxes, share.dtypes, strict=True)
            ]
            return zeros, Note(True, None, share.index, share.count)
        except BaseException:
            self._iterator = None  # it ends after an error; another try begins anew
            raise
        try:
            leaves = share.cut(self._results.leaves_of(value), is_part=self._makes_part)
            self._position += 1
            return leaves, Note(False, self._saved(share), share.index, share.count)
        except BaseException:
            self._iterator = None
            raise

    def at(self, share: HostPart, number: int, base: int, note: Note | None) -> Iterator[Any]:
        """Return the iterator before this element. Raises StopIteration if it ends earlier."""
        state = None if note is None else note.state
        if note is None or (note.part, note.parts) != (share.index, share.count):
            base, state = 0, None  # the state of another part
        iterator = self._iterator
        is_behind = state is not None and self._position < base
        if iterator is None or self._position > number or is_behind:
            iterator = self._iterator = self._begun(share, state)
            self._position = base if state is not None and self._save is not None else 0
        while self._position < number:
            next(iterator)
            self._position += 1
        return iterator

    def _begun(self, share: HostPart, state: bytes | None) -> Iterator[Any]:
        """Return a new iterator, with this state."""
        self._save = None
        source = (
            self._make(part=part_of(share, self._results)) if self._makes_part else self._make()
        )
        methods = _state_methods(source)
        if methods is not None and state is not None:
            methods[1](pickle.loads(state))
        iterator: Iterator[Any] = iter(source)
        if methods is None:
            methods = _state_methods(iterator)
            if methods is not None and state is not None:
                methods[1](pickle.loads(state))
        if methods is not None and self._room:
            self._save = methods[0]
        return iterator

    def _saved(self, share: HostPart) -> bytes | None:
        if self._save is None:
            return None
        state = pickle.dumps(self._save())
        if len(state) > self._room:
            raise ArgumentError(
                f"the state of the iterator of {share.name!r} takes {len(state)} bytes, and there is room for "
                f"{self._room}: say pw.stream(..., state_bytes={len(state)}) or more; with state_bytes=0 no "
                "state is saved, and elements are counted"
            )
        return state


def _state_methods(source: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    for names in STATE_METHODS:
        save, restore = (getattr(source, name, None) for name in names)
        if callable(save) and callable(restore):
            return save, restore
    return None
