"""Skips computations, and makes merges, as guards and predicates say (`pw.core.programs.guards`).

A predicate is read once in each run of a host. Until then the launch waits as for a value that has not arrived.
A predicate that was skipped itself, or has failed, is known without a read; so is one that comes from other
hosts and that nothing else reads. What comes for a branch is made on the devices only if the branch is taken.

A merge enqueues nothing: its result is the chosen value. Only a result of the program, which other work may
know already, is a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np

from pw.core.errors import INFRASTRUCTURE, ErrorReport
from pw.core.programs.guards import NOT_TAKEN, is_skipped, predicate_spec
from pw.core.programs.plan import Execute
from pw.core.programs.program import Computation
from pw.core.sharding import ArraySpec
from pw.devices.host.backend import Backend, Build, Read, relative
from pw.devices.host.launch_end import LaunchEnds
from pw.devices.host.value import Value
from pw.devices.host.views import ViewPart, view_op
from pw.devices.host.work import Arriving, GuardedResults, HostLaunch, HostRun, OpQueue


@dataclass(eq=False, repr=False)
class Guards:
    """Does the guarded instructions and the merges of one host."""

    host: str
    backend: Backend
    queue: OpQueue
    arriving: Arriving
    ends: LaunchEnds
    execute: Callable[[HostLaunch, Execute], bool]
    """Enqueues a computation; returns False if a value that it reads has not arrived."""
    note_result: Callable[[HostRun, int], None]
    """Notes that the op of a slot is in the queue, or that its value has an error."""
    break_gang: Callable[[HostRun, ErrorReport], bool]
    """Stops the host, and returns True, unless all hosts of a gang have the error."""
    advance: Callable[[], None]
    """Call that goes on with the work that waits."""

    def go(self, launch: HostLaunch, instruction: Execute) -> bool:
        """Do an instruction of a segment with guards or merges; return False if it must wait."""
        run = launch.run
        if launch.guarded_results is None:
            launch.guarded_results = GuardedResults()
        computation = run.program.body.computations[instruction.computation]
        if instruction.guard >= 0:
            predicate = self.decision(run, instruction.guard, computation)
            if predicate is None:
                return False
            if isinstance(predicate, ErrorReport):
                alone = run.slots[instruction.guard].may_be_elsewhere
                return self.poison(launch, instruction, predicate, alone=alone)
            if predicate is instruction.unless:
                return self.poison(launch, instruction, NOT_TAKEN)
        if computation.traits.predicates:
            return self._merge(launch, instruction, computation)
        if run.held:
            self._make_held(run, instruction.args)
        if not self.execute(launch, instruction):
            return False
        if instruction.results:
            last = run.slots[instruction.results[-1]]
            if last.error is None:
                devices = launch.segment.skips[launch.position]
                latest = launch.guarded_results.latest
                for subset in [subset for subset in latest if subset < devices]:
                    del latest[subset]
                latest[devices] = last
        return True

    def arrived(self, run: HostRun, slot: int, value: Value, build: Build) -> None:
        """Take a predicate as it has come, or keep what makes a value until a branch needs it."""
        if slot in run.program.held:
            run.held[value] = build
            return
        if run.decisions is None:
            run.decisions = {}
        run.decisions[value] = bool(build.parts[0][2])

    def _make_held(self, run: HostRun, slots: Iterable[int]) -> None:
        """Have received values made that are needed after all."""
        for slot in slots:
            build = run.held.pop(run.slots[slot], None)
            if build is not None:
                self.queue.ops.append(build)

    def freed(self, launch: HostLaunch, value: Value) -> None:
        """Watch a result when no slot has it any more, so that the launch does not hold its bytes."""
        latest = launch.guarded_results.latest if launch.guarded_results is not None else {}
        for devices in [devices for devices, last in latest.items() if last is value]:
            if value not in launch.run.slots.values():  # merges and holds give it other slots
                del latest[devices]
                self._watch(launch, (value,))

    def end(self, launch: HostLaunch) -> list[Value]:
        """Watch the last results of a launch on each device; return those that merges have made."""
        results, launch.guarded_results = launch.guarded_results or GuardedResults(), None
        if results.latest:
            self._watch(launch, tuple(results.latest.values()))
        launch.last += tuple(map(ref, results.merged))
        return results.merged

    def _watch(self, launch: HostLaunch, values: tuple[Value, ...]) -> None:
        launch.last += tuple(map(ref, values))
        if launch.is_watched:
            launch.to_watch = values
            self.ends.watch_results(launch)

    def poison(
        self, launch: HostLaunch, instruction: Execute, error: ErrorReport, *, alone: bool = False
    ) -> bool:
        """Give the results of an instruction an error in place of its op; later work must know it now.

        `alone`: other hosts may do the instruction, which a gang must not.
        """
        run = launch.run
        is_lost = error.kind in INFRASTRUCTURE
        is_joint = instruction.computation in run.program.gangs
        if is_joint and (alone or is_lost) and self.break_gang(run, error):
            return False
        if is_lost:
            launch.lost = error
        for slot in instruction.results:
            value = run.slots.get(slot)
            if value is None:
                value = run.slots[slot] = Value()
            value.fail(error, alone=alone)
            self.note_result(run, slot)
        return True

    def decision(
        self, run: HostRun, slot: int, computation: Computation
    ) -> bool | ErrorReport | None:
        """Return the predicate in a slot, or its error; None if it must be waited for."""
        if run.decisions is None:
            run.decisions = {}
        decisions, value = run.decisions, run.slots[slot]
        if value in decisions:
            return decisions[value]
        if value in self.arriving:
            return None
        if value.error is not None:
            return value.error
        placement = computation.placement
        spec, devices = predicate_spec(placement), run.program.at(placement)
        ready = self.backend.snapshot(value, spec, devices)
        if ready:
            decisions[value] = bool(ready[0][1])
            return decisions[value]
        decisions[value] = None

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            decisions[value] = views if isinstance(views, ErrorReport) else bool(views[0])
            self.advance()

        here = next(at for at, device in enumerate(devices) if device.host == self.host)
        boxes = [(here, relative(spec.box(here)))]
        self.queue.ops.append(Read(value, boxes, spec, devices, read, urgent=True))
        return None

    def _merge(self, launch: HostLaunch, merge: Execute, computation: Computation) -> bool:
        """Make the results of a merge as soon as the chosen values are here; the others do not matter."""
        run, slots = launch.run, launch.run.slots
        decision = self.decision(run, merge.args[0], computation)
        if decision is None:
            return False
        if isinstance(decision, ErrorReport) and not is_skipped(decision):
            return self.poison(launch, merge, decision, alone=slots[merge.args[0]].may_be_elsewhere)
        first = 1 if decision is True else 1 + len(merge.results)
        sources = range(first, first + len(merge.results))
        if self.arriving and any(slots[merge.args[at]] in self.arriving for at in sources):
            return False
        if run.held:
            self._make_held(run, [merge.args[at] for at in sources])
        for slot, at, spec in zip(merge.results, sources, computation.outputs, strict=True):
            source = slots[merge.args[at]]
            if slot in run.program.outputs_of_slot:
                self._view(launch, source, slot, spec)
            else:
                if at not in merge.donated:  # something else needs it as well
                    source.shared = True
                slots[slot] = source
        return True

    def _view(self, launch: HostLaunch, source: Value, slot: int, spec: ArraySpec) -> None:
        """Make a result of the program of a chosen value."""
        run = launch.run
        devices, result = run.program.devices(spec), run.slots[slot]
        here = tuple([(at, at) for at, one in enumerate(devices) if one.host == self.host])
        part = ViewPart(0, spec, devices, ((0, here),), ())
        self.queue.ops.append(view_op(part, (source,), result))
        if source.error is not None:  # later launches must know before the backend finds out
            result.fail(source.error, alone=source.alone)
            if source.error.kind in INFRASTRUCTURE:
                launch.lost = source.error
        assert launch.guarded_results is not None
        launch.guarded_results.merged.append(result)
        self.note_result(run, slot)
