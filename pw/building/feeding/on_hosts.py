"""A stream whose generators run on the hosts of its devices.

Each element is a run of one computation, with the number of the element as its argument. So its place
among launches, its memory, its lineage and its owner are those of any run. The client begins
`prefetch` runs ahead of the element that it hands out. A host does them in the order of the client's
other work, so what the client begins after a step waits for that step.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import jax
import numpy as np

from pw.building.feeding.source import Position, StreamSource, notes_of
from pw.client.arrays.array import Array
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.signature import ArrayType
from pw.client.functions.host_function import pickled, structure
from pw.client.programs.writing.launch import Feed, Launch
from pw.core.errors import ResultMismatch
from pw.core.functions.feeding import NOTE_BYTES, REQUEST_BYTES, Feeder, request
from pw.core.functions.prefetch import Ahead
from pw.core.programs.program import Computation, Kind, Node, Output, Program, ValueRef


class _Begun(NamedTuple):
    arrays: list[Array]
    note: Array


class OnHosts:
    """Has hosts make the elements of a stream, from a position on."""

    def __init__(self, source: StreamSource, position: Position) -> None:
        mesh = source.mesh
        mesh.check_alive()
        self._source = source
        number, rows = position.fitting(mesh.size, source.room)
        self._ahead: Ahead[_Begun] = Ahead(source.prefetch, number, rows)
        feeder = Feeder(source.make, structure(source.tree), source.makes_part, source.room)
        artifact = pickled(feeder, f"the stream {source.name!r}")
        # The bytes are not the name: each stream has a process of its own.
        self._artifact = artifact + f"# {id(self)} {mesh.runtime._id()}".encode()
        everywhere = OwnSharding(mesh, PartitionSpec(mesh.axis_names))
        self._note = _bytes((mesh.size, NOTE_BYTES + source.room), everywhere)
        asked = _bytes((REQUEST_BYTES,), OwnSharding.replicated(mesh))
        self._begin = self._launch((asked,))
        self._begin_with = self._launch((asked, self._note))

    def _launch(self, inputs: tuple[ArrayType, ...]) -> Launch:
        source = self._source
        results = (*source.types, self._note)
        specs = tuple(type_.spec for type_ in inputs)
        computation = Computation(
            source.name,
            hashlib.sha256(self._artifact).digest(),
            source.mesh.placement,
            specs,
            tuple(type_.spec for type_ in results),
            kind=Kind.STREAM,
        )
        program = Program(
            source.name,
            (computation,),
            (Node(0, tuple(ValueRef(-1, index) for index in range(len(inputs)))),),
            specs,
            tuple(Output(ValueRef(0, at), type_.spec) for at, type_ in enumerate(results)),
            timeout_s=source.timeout_s,
        )
        session = source.mesh.runtime
        number = session.register_program(program, {computation.artifact: self._artifact})
        feeds = [Feed(index, None, type_) for index, type_ in enumerate(inputs)]
        return Launch(session, source.name, number, feeds, results, {})

    def fill(self) -> None:
        """Begin elements, up to the bound."""
        while (due := self._ahead.due) is not None:
            asked = request(due.number, due.base)
            if due.states is None:
                arrays = self._begin([asked])
            else:
                arrays = self._begin_with([asked, due.states])
            arrays[-1].start_fetch()
            self._ahead.begun(_Begun(arrays[:-1], arrays[-1]))

    @property
    def position(self) -> Position:
        """Return the position of the stream."""
        return Position(self._ahead.number, self._ahead.states)

    def next(self) -> list[Array]:
        """Return the leaves of the next element, once the hosts have it.

        Raises:
            StopIteration: the stream has ended on all hosts.
            ResultMismatch: it has ended on some.
            Error: what failed; the next call tries the same element again.
        """
        self.fill()
        try:
            rows = self._ahead.first.note.local()
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._ahead.drop()
            raise
        notes = notes_of(rows)
        ended = {note.part for note in notes if note.ended}
        if ended:
            self._ahead.drop()
            rest = {note.part for note in notes} - ended
            if rest:
                raise ResultMismatch(
                    f"the stream {self._source.name!r} ended after {self._ahead.number} elements in part "
                    f"{min(ended)} of {notes[0].parts}, and part {min(rest)} goes on; all parts must have "
                    "the same number of elements"
                )
            raise StopIteration
        has_state = all(note.state is not None for note in notes)
        begun = self._ahead.hand_out(rows if has_state else None)
        self.fill()
        return begun.arrays


def _bytes(shape: tuple[int, ...], sharding: OwnSharding) -> ArrayType:
    return ArrayType.of(jax.core.ShapedArray(shape, np.dtype(np.uint8)), sharding)
