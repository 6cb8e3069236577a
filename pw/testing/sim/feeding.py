"""Simulated streams: a user that is fed, and the generators on the hosts.

The hosts use the feeder of the real runtime on generators that can only be asked for their next element,
and end with their host. The user uses the real bound of elements ahead. The oracle knows each element by
its number, so an element that is lost, doubled or of another place is a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pw.client.session.thread_messages import Forget, Get, Tell
from pw.core.compact import Compact
from pw.core.errors import ArrayDeleted, ComputationFailed, ErrorReport
from pw.core.functions.feeding import NOTE_BYTES, REQUEST_BYTES, Feeder, note_of, request
from pw.core.functions.parts import whole_share
from pw.core.functions.prefetch import Ahead
from pw.core.messages import RegisterProgram, ReleaseProgram
from pw.core.programs.program import Computation, Kind, Output, ValueRef
from pw.core.programs.trees import PlainTree
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.devices.host import backend as ops
from pw.testing.sim.devices import COMPUTE_S, SimBackend
from pw.testing.sim.digests import STATE_ROOM, element_of, feeds, feeds_for
from pw.testing.sim.programs import Drafting, ProgramDraft
from pw.testing.sim.shards import Shards, SimInstalled, cut
from pw.testing.sim.world import Violation

MOST = 3
"""Number of elements that a simulated stream is ahead."""


# --- hosts -------------------------------------------------------------------------------------------


class Elements:
    """Iterator of a simulated generator; one that saves its state has the methods for that."""

    def __init__(self, artifact: bytes, outputs: tuple[ArraySpec, ...]) -> None:
        self._artifact = artifact
        self._outputs = outputs
        self._number = 0
        length, has_state = feeds_for(artifact)
        self._length = length
        if has_state:
            self.get_state = lambda: self._number
            self.set_state = self._go_to

    def _go_to(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Elements:
        return self

    def __next__(self) -> Any:
        if self._number >= self._length:
            raise StopIteration
        self._number += 1
        return element_of(self._artifact, self._number - 1, self._outputs)[0]


class Feeds:
    """The Python processes of one incarnation of a host."""

    def __init__(self, backend: SimBackend, bounds: dict[bytes, Ahead[Any]]) -> None:
        self.make_feeder: Callable[..., Feeder] = Feeder
        self._backend = backend
        self._world = backend.node.world
        self._bounds = bounds
        self._feeders: dict[bytes, Feeder] = {}
        self._free_s: dict[bytes, float] = {}
        self._random = self._world.streams(f"feeds/{backend.host}")

    def make(self, installed: SimInstalled, op: ops.Execute) -> None:
        """Make the element that an op asks for, after those before it."""
        world, backend = self._world, self._backend
        artifact, outputs = installed.artifact, installed.computation.outputs
        rate = 0.0 if world.calm else world.profile.computation_failure
        failure: ErrorReport | None = backend.poison(op)
        if failure is None and rate and self._random.random() < rate:
            words = world.ledger.failure(installed.name)
            failure = ErrorReport.of(ComputationFailed(words), backend.host)
        results: list[Shards] = []
        if failure is None:
            feeder = self._feeders.get(artifact)
            if feeder is None or (not world.calm and self._random.random() < 0.02):
                # A process may end.
                begin = partial(Elements, artifact, outputs)
                feeder = self.make_feeder(begin, PlainTree(0), False, STATE_ROOM)
                self._feeders[artifact] = feeder
            results = self._element(feeder, installed, [value.payload for value in op.args])
        delay_s = COMPUTE_S * backend.node.slowness * self._random.expovariate(1.0)
        at_s = max(world.now_s, self._free_s.get(artifact, 0.0)) + delay_s
        self._free_s[artifact] = at_s
        backend.fill_after(at_s - world.now_s, op.results, results, failure)
        op.args = op.results = ()  # callers may still refer to the op

    def _element(self, feeder: Feeder, installed: SimInstalled, args: list[Shards]) -> list[Shards]:
        computation = installed.computation
        asked, *states = (next(iter(shards.values())) for shards in args)
        number = int.from_bytes(asked.tobytes()[:8], "little")
        ahead = self._bounds.get(installed.artifact)
        if ahead is not None and number >= ahead.number + MOST:
            what = f"element {number} was made, and {ahead.number} were handed out"
            raise Violation("back-pressure", f"{what} of {installed.name!r}")
        *elements, _ = computation.outputs
        share = whole_share(
            installed.name, [one.shape for one in elements], [one.dtype for one in elements]
        )
        note = note_of(states[0]) if states else None
        base = int.from_bytes(asked.tobytes()[8:], "little")
        leaves, reply = feeder.element(share, number, base, note)
        rows = np.tile(reply.row(STATE_ROOM), (computation.outputs[-1].shape[0], 1))
        self._world.checked["elements"] += 1
        return [
            cut(array, place, self._backend.host)
            for array, place in zip([*leaves, rows], installed.layout.outputs, strict=True)
        ]


# --- users -------------------------------------------------------------------------------------------


class SimStream:
    """A stream of a simulated user (`pw.testing.sim.workload`)."""

    def __init__(self, user: Any, spec: ArraySpec) -> None:
        self._user = user
        self._spec = spec
        self.ahead: Ahead[tuple[int, int]] = Ahead(MOST)
        self._notes: dict[int, np.ndarray[Any, Any] | BaseException] = {}
        self._held: set[int] = set()
        """Notes of elements that were not handed out."""
        self.ended = False
        random = user.random
        name = f"{user.name}/stream {user._id() & 0xFFFF}"
        self._artifact = feeds(name.encode(), random.choice((0, 3, 9, 1000)), random.random() < 0.5)
        user.cluster.streams[self._artifact] = self.ahead
        devices = spec.placement
        replicated = Sharding(("x",), (len(devices.devices),))
        split = Sharding(("x",), replicated.axis_sizes, (("x",),))
        width = NOTE_BYTES + STATE_ROOM
        self._note = ArraySpec((len(devices.devices), width), "uint8", split, devices)
        asked = ArraySpec((REQUEST_BYTES,), "uint8", replicated, devices)
        self._drafts = [
            (user._id(), self._draft(name, devices, inputs))
            for inputs in ((asked,), (asked, self._note))
        ]
        for number, draft in self._drafts:
            user._post(Tell(RegisterProgram(number, Compact.of(draft.body), draft.artifacts)))

    @property
    def slice(self) -> int:
        """The slice of its elements."""
        return self._spec.placement.slice

    def _draft(self, name: str, devices: Placement, inputs: tuple[ArraySpec, ...]) -> ProgramDraft:
        outputs = (self._spec, self._note)
        program = Drafting(name)
        digest = program.artifact(self._artifact)
        element = Computation(name, digest, devices, inputs, outputs, kind=Kind.STREAM)
        results = program.add(element, [ValueRef(-1, index) for index in range(len(inputs))])
        return program.draft(inputs, list(map(Output, results, outputs)))

    def step(self) -> None:
        """Hand out an element if it has come, and begin others."""
        user = self._user
        while (due := self.ahead.due) is not None and user.credits > 0 and user.runs_left > 0:
            number, draft = self._drafts[due.states is not None]
            args = [request(due.number, due.base).tobytes()]
            if due.states is not None:
                args.append(due.states.tobytes())
            element, note = user._id(), user._id()
            user.oracle.run(draft, tuple(args), (element, note))
            user.credits -= 1
            user.runs_left -= 1
            user.world.checked["runs"] += 1
            user._call(user._id(), number, tuple(args), (element, note))
            promise = user._promise(f"note {note:x}", partial(self._note_came, note))
            user._post(Get(note, self._note, promise))
            self.ahead.begun((element, note))
            self._held.add(note)
        if not len(self.ahead) or self.ahead.first[1] not in self._notes:
            return
        element, note = self.ahead.first
        rows = self._notes[note]
        if isinstance(rows, BaseException):
            self._drop()
            return
        notes = [note_of(row) for row in rows]
        if notes[0].ended:
            self.ended = True
            self._drop()
            return
        self.ahead.hand_out(rows if notes[0].state is not None else None)
        del self._notes[note]
        self._held.discard(note)
        user._post(Forget((note,)))
        user.arrays[element] = self._spec
        user.fetch(element)

    def _note_came(self, note: int, parts: Any, error: BaseException | None) -> None:
        """The note of an element has come."""
        user, oracle = self._user, self._user.oracle
        user.world.checked["oracle"] += 1
        held = note in self._held
        if error is not None:
            if not held and isinstance(error, ArrayDeleted):
                return
            wrong = oracle.check_error(note, error, held=held)
            if wrong is not None and not (user.closing or user.session.closed is not None):
                raise Violation("oracle", f"{user.name}: the note of an element: {wrong}")
            self._notes[note] = error
            return
        wrong = oracle.check_value(note, parts)
        if wrong is not None:
            raise Violation("oracle", f"{user.name}: the note of an element: {wrong}")
        rows = np.zeros(self._note.shape, np.uint8)
        for box, part in parts:
            rows[tuple(slice(*side) for side in box)] = part
        self._notes[note] = rows

    def _drop(self) -> None:
        """Forget the elements that were not handed out."""
        dropped = [array for pair in self.ahead.drop() for array in pair]
        self._notes.clear()
        self._held.clear()
        if dropped:
            self._user._post(Forget(tuple(dropped)))

    def close(self) -> None:
        """Drop what was not handed out, and the programs."""
        self._drop()
        for number, _ in self._drafts:
            self._user._post(Tell(ReleaseProgram(number)))
