"""The host executor: runs its part of every gang, in launch order.

Theory of operation. Launches have contiguous numbers. A gap means that the gang's order is lost:
the host stops and says so (`launch_order.py`). Launches of large gangs are passed on to other hosts
(`passing.py`). Each launch names a segment of an installed program.
The executor binds the arguments of a run, announces its results and expects its edges; then the
launch goes into its client's lane (`lanes.py`), the interpreter turns its instructions into ops
(`interpreter.py`), and its end is reported (`launch_end.py`).

A run lives here from its first launch to its last. Its values are in numbered slots; results are
also in the object store, under the ids that the client gave them.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.actors.actor import Actor, Env, handles
from pw.core.actors.watchdog import STALL_S, Watchdog
from pw.core.errors import ArrayLost, ErrorReport
from pw.core.ids import Address, client_of
from pw.core.messages.copying import unpacked
from pw.core.programs.plan import Receive
from pw.core.waits import RECONNECT_S
from pw.devices.host.backend import Backend, Build, Part
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.direct import Direct
from pw.devices.host.installs import Installs
from pw.devices.host.interpreter import Interpreter
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.leases import HostLeases
from pw.devices.host.membership import HostProcess, Membership
from pw.devices.host.passing import Passing
from pw.devices.host.program import NO_SEGMENT, HostProgram, Inline
from pw.devices.host.store import ObjectStore
from pw.devices.host.tiers import Spilling
from pw.devices.host.value import Value
from pw.devices.host.why import Explanations
from pw.devices.host.work import Forgetting, HostLaunch, HostRun, Replicating


class HostExecutor(Actor):
    """Takes the scheduler's orders for one host, in launch order."""

    def __init__(
        self,
        env: Env,
        registration: msg.RegisterHost,
        process: HostProcess,
        backend: Backend,
        store: ObjectStore,
        coordinator: ShardCoordinator,
        stall_s: float = STALL_S,
        reconnect_s: float = RECONNECT_S,
        tree_over: int = msg.TREES.over,
    ) -> None:
        super().__init__(env)
        self._store = store
        self._coordinator = coordinator
        self._watchdog = Watchdog(env, stall_s)
        self.order = LaunchOrder(env, tree_over)
        self.programs = Installs(env, backend, self.order, registration.python_tenants)
        self.interpreter = Interpreter(env, backend, store, coordinator, self.order, self._watchdog)
        self.membership = Membership(
            env,
            self.order,
            registration,
            process,
            store,
            coordinator,
            self.interpreter,
            reconnect_s,
        )
        self.explanations = Explanations(
            env, self.order, self.interpreter, coordinator, backend, self._watchdog, store.callbacks
        )
        self.leases = HostLeases(
            env,
            self.order,
            self.programs,
            store.clients,
            self._do,
            store.requests.send,
            store.requests.answer_launch,
            self.receive,
        )
        self.direct = Direct(
            self.order, self.interpreter, store, coordinator, backend, self._inline
        )
        self.passing = Passing(env, self.order, self.receive)
        store.health.is_busy = lambda: bool(self.interpreter.runs) or self.interpreter.ends.is_busy
        self.compose(
            self.leases,
            self.passing,
            self.interpreter,
            self.interpreter.ends,
            self.interpreter.pace,
            self.membership,
            self.explanations,
        )

    def turn_ended(self) -> None:
        """Follow the orders that had overtaken others, and whose turn has come."""
        if self.order.early:
            while (early := self.order.next_early()) is not None:
                self.receive(*early)

    def register(self) -> None:
        """Ask for a place in an island."""
        self.membership.register()

    def ask_to_leave(self) -> None:
        """Leave the cluster once all that this host holds is elsewhere."""
        self.membership.ask_to_leave()

    def census(self) -> dict[str, int]:
        """Count the programs, runs and waiting pieces of work on this host."""
        return {
            "programs": len(self.programs),
            "runs": len(self.interpreter.runs),
            "queue": len(self.interpreter.lanes),
            "early": len(self.order.early),
            "early launches": len(self.leases.early_launches()),
        }

    @handles(msg.Install)
    def _install(self, sender: Address, message: msg.Install) -> None:
        if self.leases.takes(sender, message):
            self.programs.install(sender, message)

    @handles(msg.Launch)
    def _launch(self, sender: Address, message: msg.Launch) -> None:
        if self.leases.takes(sender, message):
            self._do(message)

    def _do(self, message: msg.Launch) -> bool:
        """Do a launch that has been taken; return whether its results are there."""
        self.env.count("launches")
        interpreter = self.interpreter
        if message.arguments is not None:
            if message.run in interpreter.runs:
                message = replace(message, arguments=None)
            elif (program := self.programs.get(message.program)) is not None:
                is_there = self.direct.launch(message, program)
                if is_there is not None:
                    return is_there
                self._begin(message, program)
        run = interpreter.runs.get(message.run)
        if message.segment == msg.CANCELLED:
            self._decline(message, run)
            self._coordinator.drop_run(message.run)
            if run is None:
                return False
        if run is None:
            self.env.log("error", "launch of an unknown run", program=message.program)
            self.order.stop_at_gap(message.sequence, message.sequence)
            return False
        segment = run.program.segments.get(message.segment, NO_SEGMENT)
        if not interpreter.lanes:
            self._watchdog.went_on()
        # `_expect` may fail at once and let other work run, so this launch joins its lane last.
        for receive in segment.receives:
            self._expect(run, receive)
        run.launched = message.segment
        launch = HostLaunch(message, run, segment)
        if segment.together:
            interpreter.pace.joins(launch)
        interpreter.put(client_of(message.run), launch, segment.together)
        return False

    def _begin(self, message: msg.Launch, program: HostProgram) -> None:
        """Bind the arguments of a run at its first launch here, and announce its results."""
        assert message.arguments is not None
        arguments, results = message.arguments.args, message.arguments.results
        body = program.body
        began = self._coordinator.runs.begin(message.run)
        run = HostRun(message.run, program, {}, results, began)
        self.interpreter.runs[message.run] = run
        for index in program.plan.inputs:
            arg = arguments[index]
            if isinstance(arg, bytes):
                run.slots[index] = self._inline(arg, program.inline(index))
                continue
            entry = self._store.arrays.get(arg)
            if entry is not None and entry.value.is_away and entry.value.error is None:
                self.interpreter.queue.ops.append(self._store.tiers.bring_back(entry))
            value = None if entry is None else entry.value
            if value is None:
                lost = ArrayLost(
                    f"argument {index} of {body.name!r}, {body.inputs[index].short}, is not on this host "
                    "any more"
                )
                value = Value(ErrorReport.of(lost, self.order.host), alone=True)
            run.slots[index] = value
        self._store.drop_donated(body, arguments)
        for output, slot, spec, devices in program.results:
            value = run.slots.get(slot)
            if value is None:
                value = run.slots[slot] = Value()
            else:  # it is an argument, or another result as well
                value.shared = True
            self._store.arrays.expect(results[output], value, spec, devices)

    def _inline(self, data: bytes, inline: Inline) -> Value:
        """Return the value of an argument that came with the launch."""
        spec, devices, dtype, boxes = inline
        array = np.frombuffer(data, np.uint8).view(dtype).reshape(spec.shape)
        parts: list[Part] = [(positions, box, array[where]) for positions, box, where in boxes]
        value = Value()
        self.interpreter.queue.ops.append(Build(value, spec, devices, parts))
        return value

    def _expect(self, run: HostRun, receive: Receive) -> None:
        """Tell the coordinator where the bytes of an edge go, long before they are needed."""
        value = run.slots.setdefault(receive.slot, Value())
        if receive.edge in run.program.local_edges:
            return
        interpreter = self.interpreter
        interpreter.arriving[value] = []

        def arrived(build: Build | None) -> None:
            if build is not None:
                interpreter.arrived(run, receive.slot, value, build)
            interpreter.note_result(run, receive.slot)
            interpreter.arriving.arrive(value)
            interpreter.advance_soon()

        devices = run.program.devices(receive.spec)
        self._coordinator.receiving.expect(run.run, receive, value, devices, arrived)

    def _decline(self, message: msg.Launch, run: HostRun | None) -> None:
        """Tell the senders of a cancelled run which of its segments do not come here."""
        program = self.programs.get(message.program) if run is None else run.program
        launched = -1 if run is None else run.launched
        segments = {} if program is None else program.segments
        for index, segment in segments.items():
            if index > launched:
                for receive in segment.receives:
                    self._coordinator.receiving.decline(message.run, receive)

    @handles(msg.Replicate)
    def _replicate(self, sender: Address, message: msg.Replicate) -> None:
        if self.leases.takes(sender, message):
            value, order = self._store.value, unpacked(message)
            copies = tuple((copy, value(copy.array)) for copy in order.copies)
            files = tuple((j, tuple([value(c.array) for c in j.copies])) for j in order.files)
            named = (*order.copies, *(copy for file in order.files for copy in file.copies))
            client = next((client_of(copy.array) for copy in named), 0)  # all belong to one client
            self.interpreter.put(client, Replicating(client, copies, files))

    @handles(msg.Spill)
    def _spill(self, sender: Address, message: msg.Spill) -> None:
        if self.leases.takes(sender, message):
            of_clients: defaultdict[int, list[int]] = defaultdict(list)
            for array in message.arrays:
                of_clients[client_of(array)].append(array)
            for client, arrays in of_clients.items():
                work = Spilling(message.epoch, tuple(arrays), sender, message.to_files)
                self.interpreter.put(client, work)

    @handles(msg.Discard)
    def _discard(self, sender: Address, message: msg.Discard) -> None:
        if not self.leases.takes(sender, message, message.after):
            return
        for array in message.arrays:
            self._store.drop(array)
        for program in message.programs:
            self._uninstall(program)
        for client in message.clients:
            self._store.drop_client(client)
            self._coordinator.drop_client(client)
            all_runs = self.interpreter.runs
            runs = tuple(run for run in all_runs if client_of(run) == client)
            for run in runs:
                del all_runs[run]
            self.interpreter.put(client, Forgetting((), runs))
            for program in [p for p in self.programs if client_of(p) == client]:
                self._uninstall(program)

    def _uninstall(self, number: int) -> None:
        """Forget a program after the launches before have been enqueued."""
        installed = self.programs.pop(number, None)
        if installed is not None:
            self.interpreter.put(client_of(number), Forgetting(installed.compiled))
