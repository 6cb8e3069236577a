"""Runs plans on simulated hosts, for the tests of lowering.

Slots hold numpy shards by device, islands launch their segments in order once what they depend on
has been launched (or, more strictly, completed), hosts run their instructions in order, and a
`Receive` waits for every `Send`. Which of them goes on next is drawn at random. Reading a slot that
is empty, freed, or given away by donation is an error.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque

import numpy as np

from pw.core.programs.plan import BoundProgram, Execute, Free, Instruction, Receive, Send
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, Binding, DeviceAddress
from tests.stages.layouts import pack, shards, unpack


def apply(args: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """What every computation under this interpreter does, on whole arrays or shard by shard."""
    total = sum((weight * arg for weight, arg in enumerate(args, 1)), np.float64(0.5))
    return [np.asarray(total + index) % 1009 for index in range(outputs)]


class Host:
    """One simulated host: its slots, and the instructions that have been launched."""

    def __init__(self, island: str) -> None:
        self.island = island
        self.slots: dict[int, dict[DeviceAddress, np.ndarray]] = {}
        self.ready: deque[tuple[int, Instruction]] = deque()
        self.executed: list[tuple[int, ...]] = []


class Interpreter:
    """Runs one plan once, choosing at random what happens next."""

    def __init__(
        self,
        program: Program,
        plan: BoundProgram,
        inputs: list[np.ndarray],
        seed: int,
        strict: bool,
    ) -> None:
        self.program, self.plan, self.strict = program, plan, strict
        self.random = random.Random(seed)
        self.parts = {(h.host, s.segment): s.instructions for h in plan.hosts for s in h.segments}
        self.launched: set[int] = set()
        self.remaining = {
            index: sum(len(self.parts[host, index]) for host in segment.hosts)
            for index, segment in enumerate(plan.segments)
        }
        self.waiting: defaultdict[str, deque[int]] = defaultdict(deque)
        for index, segment in enumerate(plan.segments):
            self.waiting[segment.island].append(index)
        self.wire: dict[tuple[int, str, str], bytes] = {}
        self.hosts: dict[str, Host] = {}
        self.bindings: dict[str, dict[int, Binding]] = {}
        for host_plan in plan.hosts:
            name = host_plan.host
            self.bindings[name] = {binding.slice: binding for binding in host_plan.bindings}
            self.hosts[name] = host = Host(plan.segments[host_plan.segments[0].segment].island)
            for number in host_plan.inputs:
                spec = program.inputs[number]
                pieces = dict(enumerate(shards(inputs[number], spec)))
                host.slots[number] = {
                    device: pieces[position]
                    for position, device in enumerate(self.located(name, spec))
                    if device.host == name
                }

    def located(self, host: str, spec: ArraySpec) -> tuple[DeviceAddress, ...]:
        return self.bindings[host][spec.placement.slice].located(spec.placement)

    def run(self) -> None:
        while True:
            actions = [("launch", island) for island in self.waiting if self.launchable(island)]
            actions += [("step", host) for host in self.hosts if self.can_step(host)]
            if not actions:
                break
            kind, name = self.random.choice(actions)
            self.launch(name) if kind == "launch" else self.step(name)
        assert not any(self.waiting.values()), "deadlock: segments that can never be launched"
        assert not any(host.ready for host in self.hosts.values()), "deadlock: a receive starves"
        assert not self.wire, "something was sent that no host received"

    def launchable(self, island: str) -> bool:
        if not self.waiting[island]:
            return False
        depends = self.plan.segments[self.waiting[island][0]].depends
        if self.strict:
            return all(index in self.launched and not self.remaining[index] for index in depends)
        return self.launched.issuperset(depends)

    def launch(self, island: str) -> None:
        index = self.waiting[island].popleft()
        self.launched.add(index)
        for host in self.plan.segments[index].hosts:
            assert self.hosts[host].island == island
            self.hosts[host].ready.extend((index, each) for each in self.parts[host, index])

    def can_step(self, name: str) -> bool:
        if not self.hosts[name].ready:
            return False
        instruction = self.hosts[name].ready[0][1]
        return not isinstance(instruction, Receive) or all(
            route.source_host == name or (instruction.edge, route.source_host, name) in self.wire
            for route in instruction.routes
        )

    def step(self, name: str) -> None:
        host = self.hosts[name]
        segment, instruction = host.ready.popleft()
        self.remaining[segment] -= 1
        match instruction:
            case Execute():
                self.execute(name, host, instruction)
            case Send(edge, slot, spec, route):
                assert route.source_host == name != route.destination_host
                held = self.by_position(name, spec, host.slots[slot])
                key = (edge, name, route.destination_host)
                assert key not in self.wire
                self.wire[key] = pack(route, spec, held)
            case Receive():
                self.receive(name, host, instruction)
            case Free(slots):
                for slot in slots:
                    del host.slots[slot]

    def execute(self, name: str, host: Host, execute: Execute) -> None:
        called = self.program.computations[execute.computation]
        host.executed.append((execute.computation, *execute.results))
        values = [host.slots[slot] for slot in execute.args]
        results: list[dict[DeviceAddress, np.ndarray]] = [{} for _ in execute.results]
        binding = self.bindings[name][called.placement.slice]
        for device in binding.located(called.placement):
            if device.host == name:
                made = apply([value[device] for value in values], len(results))
                if not values:
                    shape = called.outputs[0].sharding.shard_shape(called.outputs[0].shape)
                    made = [np.broadcast_to(each, shape).copy() for each in made]
                for result, shard in zip(results, made, strict=True):
                    result[device] = shard
        for position in execute.donated:
            assert position in called.donated
            assert execute.args.count(execute.args[position]) == 1
            for shard in values[position].values():
                shard[...] = np.nan
            host.slots[execute.args[position]] = {}
        for slot, result in zip(execute.results, results, strict=True):
            assert slot not in host.slots
            host.slots[slot] = result

    def receive(self, name: str, host: Host, receive: Receive) -> None:
        shape = receive.spec.sharding.shard_shape(receive.spec.shape)
        located = self.located(name, receive.spec)
        mine = [position for position, device in enumerate(located) if device.host == name]
        result = {position: np.zeros(shape) for position in mine}
        written = {position: np.zeros(shape, int) for position in mine}
        for route in receive.routes:
            assert route.destination_host == name
            if route.source_host == name:
                value = host.slots[receive.source_slot]
                data = pack(route, receive.source, self.by_position(name, receive.source, value))
            else:
                data = self.wire.pop((receive.edge, route.source_host, name))
            unpack(route, receive.source, data, result, written)
        assert all((count == 1).all() for count in written.values())
        assert receive.slot not in host.slots
        host.slots[receive.slot] = {located[position]: result[position] for position in mine}

    def by_position(
        self, name: str, spec: ArraySpec, value: dict[DeviceAddress, np.ndarray]
    ) -> dict[int, np.ndarray]:
        located = self.located(name, spec)
        return {p: value[device] for p, device in enumerate(located) if device.host == name}


def sequentially(program: Program, inputs: list[np.ndarray]) -> list[np.ndarray]:
    values = {-1: inputs}
    for number, node in enumerate(program.nodes):
        outputs = program.computations[node.computation].outputs
        made = apply([values[value.node][value.index] for value in node.args], len(outputs))
        values[number] = [
            np.broadcast_to(each, spec.shape) for each, spec in zip(made, outputs, strict=True)
        ]
    return [values[output.value.node][output.value.index] for output in program.outputs]
