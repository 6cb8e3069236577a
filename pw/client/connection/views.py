"""The view programs of a session: registered once each, and released when they have not been used for long."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pw.core.programs.program import Program
from pw.core.programs.views import Shards, view_program
from pw.core.sharding import ArraySpec

KEPT = 512
"""Programs that are kept, besides those in use."""

_Key = tuple[tuple[ArraySpec, ...], tuple[ArraySpec, ...], tuple[tuple[tuple[int, int], ...], ...]]


@dataclass(slots=True)
class _ViewProgram:
    """A registered program."""

    number: int
    users: int = 0
    """Number of calls that are about to run the program; it is not released before they have."""


class Views:
    """Makes views; from any thread.

    Args:
        register: announces a program without artifacts, and returns its number.
        run: runs a program on arrays, and returns the ids of so many results at once.
        release: takes the number of a program that is not run any more.
    """

    def __init__(
        self,
        register: Callable[[Program, Mapping[bytes, bytes]], int],
        run: Callable[[int, Sequence[int], int], list[int]],
        release: Callable[[int], None],
    ) -> None:
        self._register = register
        self._run = run
        self._release = release
        self._lock = threading.Lock()
        self._programs: OrderedDict[_Key, _ViewProgram] = OrderedDict()

    def view(
        self, arrays: Sequence[tuple[int, ArraySpec]], outputs: Sequence[ArraySpec], shards: Shards
    ) -> list[int]:
        """Make arrays of shards of other arrays, where they lie; returns their ids at once, as a run does.

        No bytes move, and no memory is taken. The arrays may be deleted in any order: a shard lives as long as
        an array that names it. A donation of such an array donates a copy.

        Args:
            arrays: the ids and specs of the sources, all on one slice.
            outputs: the specs of the new arrays.
            shards: for each output, the (source, mesh position there) of its shard at each mesh position.

        Raises what `pw.core.programs.views.view_program` raises. A source that was deleted or donated fails
        the new arrays with ArrayDeleted.
        """
        named = tuple([tuple([(source, at) for source, at in row]) for row in shards])
        key = (tuple([spec for _, spec in arrays]), tuple(outputs), named)
        program = self._use(key)
        try:
            return self._run(program.number, [array for array, _ in arrays], len(outputs))
        finally:
            with self._lock:
                program.users -= 1
                self._evict()

    def _use(self, key: _Key) -> _ViewProgram:
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = _ViewProgram(self._register(view_program(*key), {}))
            self._programs.move_to_end(key)
            program.users += 1
            return program

    def _evict(self) -> None:
        """Release the programs that were not used for longest."""
        excess = len(self._programs) - KEPT
        if excess > 0:
            idle = [key for key, program in self._programs.items() if not program.users]
            for key in idle[:excess]:
                self._release(self._programs.pop(key).number)
