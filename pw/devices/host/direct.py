"""The short way of a launch that is one computation here: no edge, guard, view or unsettled result.

Such a launch needs no lane if nothing waits on this host, and all its arguments are here without an error.
Then it is done at once, with the effects that the ordinary way has (`HostExecutor` begins the run,
`Interpreter` goes through its instructions). The backend may compute it before `launch` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import ref

from pw.core.messages import Launch
from pw.devices.host.backend import Backend, Execute
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.interpreter import Interpreter
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.program import HostProgram, Inline
from pw.devices.host.store import ObjectStore
from pw.devices.host.value import Value
from pw.devices.host.work import HostLaunch, HostRun


@dataclass(eq=False, repr=False)
class Direct:
    """Does launches of one computation at once."""

    order: LaunchOrder
    interpreter: Interpreter
    store: ObjectStore
    coordinator: ShardCoordinator
    backend: Backend
    inline: Callable[[bytes, Inline], Value]
    """Makes the value of an argument that came with the launch."""
    may: Callable[[], bool] | None = None
    """Test of whether this launch may go the direct way: tests compare both ways."""

    def launch(self, message: Launch, program: HostProgram) -> bool | None:
        """Do a launch, and return whether its results are there; None if it has to go the ordinary way.

        Then nothing has happened.
        """
        single, arguments, interpreter = program.single, message.arguments, self.interpreter
        if (
            single is None
            or arguments is None
            or single.segment != message.segment
            or interpreter.lanes.of_clients
            or message.run in interpreter.runs
            or not (self.may is None or self.may())
        ):
            return None
        arrays, arriving = self.store.arrays, interpreter.arriving
        values: dict[int, Value] = {}
        for index in program.plan.inputs:
            arg = arguments.args[index]
            if isinstance(arg, int):
                entry = arrays.get(arg)
                if entry is None:
                    return None
                value = entry.value
                if value.error is not None or value.is_away or value in arriving:
                    return None
                values[index] = value
        for index in program.plan.inputs:
            arg = arguments.args[index]
            if isinstance(arg, bytes):
                values[index] = self.inline(arg, program.inline(index))
        self.coordinator.runs.passes(message.run)
        if program.body.donated:
            self.store.drop_donated(program.body, arguments.args)
        outputs = []
        results = []
        for result in single.results:
            value = Value()
            results.append(value)
            if result is not None:
                array = arguments.results[result.output]
                arrays.expect(array, value, result.spec, result.devices)
                outputs.append((array, value))
        run = HostRun(message.run, program, {}, arguments.results, 0)
        steps = program.segments[single.segment]
        last = (ref(value),)
        interpreter.recent.append((message.run, message.segment, program, last))
        launch = HostLaunch(message, run, steps, last=last)
        if steps.together:
            interpreter.pace.joins(launch)
        op = Execute(
            single.key,
            tuple(map(values.__getitem__, single.args)),
            tuple(results),
            single.kept,
            partial(self.order.break_gang, run) if steps.together else None,
            not launch.is_watched and single.position in steps.unread,
            noted=launch.noted,
        )
        return interpreter.do(launch, op, single.computation, outputs)
