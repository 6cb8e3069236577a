"""A stream whose generator runs in a thread of the client, for hosts that run no Python.

The thread makes whole elements and uploads them, so they are inputs, which recovery uploads again.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np

from pw.building.feeding.source import Position, StreamSource
from pw.client.functions.host_function import structure
from pw.client.functions.transfer import put
from pw.core.functions.feeding import Feeder, Note, note_of
from pw.core.functions.parts import whole_share

_LOOK_S = 0.5
"""Seconds between two looks of the thread whether its stream is still there."""


class InClient:
    """Makes the elements of a stream in this process, from a position on."""

    def __init__(self, source: StreamSource, position: Position) -> None:
        source.mesh.check_alive()
        self._source = source
        self.position = position = position.fitting(1, source.room)
        self._elements: queue.Queue[tuple[Any, Note] | BaseException] = queue.Queue(source.prefetch)
        self._closed = threading.Event()
        threading.Thread(
            target=_feed,
            args=(source, position, self._elements, self._closed),
            name="pw-stream",
            daemon=True,
        ).start()

    def __del__(self) -> None:
        self._closed.set()

    def fill(self) -> None:
        """Do nothing: the thread makes elements ahead without being asked."""

    def next(self) -> list[Any]:
        """Return the leaves of the next element. Raises what the generator raises, and StopIteration."""
        element = self._elements.get()
        if isinstance(element, BaseException):
            self._closed.set()
            raise element
        leaves, note = element
        if note.ended:
            self._elements.put((leaves, note))  # for the next call
            raise StopIteration
        rows = None if note.state is None else note.row(self._source.room)[None]
        self.position = Position(self.position.number + 1, rows)
        return list(leaves)


def _feed(
    source: StreamSource,
    position: Position,
    elements: queue.Queue[tuple[Any, Note] | BaseException],
    closed: threading.Event,
) -> None:
    """Make elements until the stream ends, fails or is closed; on a thread."""
    specs = [type_.spec for type_ in source.types]
    share = whole_share(source.name, [s.shape for s in specs], [s.dtype for s in specs])
    shardings = [type_.sharding for type_ in source.types]
    feeder = Feeder(source.make, structure(source.tree), source.makes_part, source.room)
    number, rows = position
    note = None if rows is None else note_of(rows[0])
    while not closed.is_set():
        element: tuple[Any, Note] | BaseException
        try:
            leaves, new_note = feeder.element(share, number, position.number, note)
            # A copy: the generator may keep its arrays, and change them.
            arrays = [] if new_note.ended else put([np.array(leaf) for leaf in leaves], shardings)
            element = arrays, new_note
        except BaseException as error:  # noqa: BLE001 - the caller of `next` gets it
            element = error
        number += 1
        while not closed.is_set():
            try:
                elements.put(element, timeout=_LOOK_S)
                break
            except queue.Full:
                continue
        if isinstance(element, BaseException) or element[1].ended:
            return
        del element
