"""Device memory: the needs of a run, the order of admission, and that no run waits for ever (G5)."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.core import messages as msg
from pw.core.errors import ErrorReport, TransferFailed
from pw.core.ids import CONTROL, client_id, executor_of, scheduler_of, store_of
from pw.core.programs.lower import lower_with_memory
from pw.core.programs.peak import IslandMemory, OutputMemory
from pw.core.programs.plan import (
    BoundProgram,
    Execute,
    Free,
    HostPlan,
    HostSegment,
    Instruction,
    Receive,
    Send,
)
from pw.core.programs.program import Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Binding, DeviceAddress
from pw.sched.control.programs import RegisteredProgram
from pw.sched.island.admission import PATIENCE
from pw.sched.island.memory import Claim, DeviceMemory
from pw.sched.island.memory_report import counted, never_fits, no_room
from pw.testing.sim.census import held
from tests.core.test_lower import BINDINGS, programs
from tests.stages.actors import World
from tests.stages.samples import examples, parts
from tests.stages.scheduling import Bench
from tests.stages.scripted import LARGE, SMALL, chain, copy, join, split

DEVICE = DeviceAddress("h0", 0)
OTHER = DeviceAddress("h1", 0)
PLAN = HostPlan("h0", (), (), (), ())
SHARD = SMALL * 8
LARGE_SHARD = LARGE * 8

# --- what a run takes --------------------------------------------------------------------------------

ONE_HOST = {1: Binding.of(1, "a", (DEVICE,)), 2: Binding.of(2, "b", (OTHER,))}


def donating(program: Program) -> Program:
    """The same program, whose computations may take over their arguments."""
    computations = tuple(msgspec.structs.replace(c, donated=(0,)) for c in program.computations)
    return msgspec.structs.replace(program, computations=computations)


def peaks(program: Program, temporary_bytes: tuple[int, ...] = ()) -> dict[str, int]:
    """What the one device of each island must have free."""
    return {
        memory.island: max(memory.peaks(temporary_bytes))
        for memory in lower_with_memory(program, ONE_HOST)[1]
    }


def test_arguments_count_as_nothing_and_values_until_their_last_use() -> None:
    here = split(1, 1)
    assert peaks(chain([here])) == {"a": SHARD}
    assert peaks(chain([here] * 2)) == {"a": 2 * SHARD}
    assert peaks(chain([here] * 9)) == {"a": 2 * SHARD}
    every = tuple(Output(ValueRef(node, 0), here) for node in range(9))
    all_kept = msgspec.structs.replace(chain([here] * 9), outputs=every)
    assert peaks(all_kept) == {"a": 9 * SHARD}


def test_what_takes_over_a_donated_argument_needs_no_memory() -> None:
    here = split(1, 1)
    assert peaks(donating(chain([here], donated=(0,)))) == {"a": 0}
    assert peaks(donating(chain([here] * 9, donated=(0,)))) == {"a": 0}
    assert peaks(donating(chain([here] * 9))) == {"a": SHARD}, "the argument stays"
    assert peaks(chain([here], donated=(0,))) == {"a": SHARD}, "given up, but not taken over"
    assert peaks(chain([here] * 9, donated=(0,))) == {"a": SHARD}, "and free from then on"


def test_what_arrives_from_another_island_counts_from_the_start_of_its_segment() -> None:
    here, there = split(1, 1), split(2, 1)
    assert peaks(chain([here, there])) == {"a": SHARD, "b": 2 * SHARD}
    assert peaks(copy(here, there)) == {"a": 0, "b": SHARD}
    stage = chain([there]).computations[0]
    nodes = (Node(0, (ValueRef(-1, 0),)), Node(0, (ValueRef(0, 0),)), Node(0, (ValueRef(-1, 1),)))
    outputs = (Output(ValueRef(1, 0), there), Output(ValueRef(2, 0), there))
    late = Program("late", (stage,), nodes, (here, here), outputs)
    assert peaks(late) == {"a": 0, "b": 3 * SHARD}, "the second arrives before the first is used"


def test_temporaries_come_on_top_of_the_computation_that_needs_them() -> None:
    here = split(1, 1)
    program = chain([here] * 3)
    assert peaks(program, (0, 0, 0)) == {"a": 2 * SHARD}
    assert peaks(program, (10, 0, 0)) == {"a": 2 * SHARD}, "its time is not the worst"
    assert peaks(program, (0, 10, 0)) == {"a": 2 * SHARD + 10}
    assert peaks(program, (1000, 10, 0)) == {"a": SHARD + 1000}


def test_what_lies_in_host_memory_takes_none_of_a_device() -> None:
    here = split(1, 1)
    aside = msgspec.structs.replace(here, memory="pinned_host")
    assert peaks(chain([aside] * 9)) == {"a": 0}
    assert peaks(copy(here, aside)) == {"a": 0}
    assert peaks(copy(aside, here)) == {"a": SHARD}
    assert peaks(copy(here, here)) == {"a": 0}, "nothing moves"
    from_host = msgspec.structs.replace(
        chain([here]).computations[0], inputs=(aside,), donated=(0,)
    )
    program = msgspec.structs.replace(
        chain([here], donated=(0,)), computations=(from_host,), inputs=(aside,)
    )
    assert peaks(program) == {"a": SHARD}, "a result cannot reuse a buffer of another memory"


def test_outputs_say_whose_buffer_they_are() -> None:
    here = split(1, 1)
    program = msgspec.structs.replace(
        chain([here]), outputs=tuple(Output(ValueRef(node, 0), here) for node in (0, -1, 0))
    )
    (memory,) = lower_with_memory(program, ONE_HOST)[1]
    assert [output.shard_bytes for output in memory.outputs] == [SHARD] * 3
    assert [(o.same_as_input, o.same_as_output) for o in memory.outputs] == [
        (-1, -1),
        (0, -1),
        (-1, 0),
    ]


@pytest.mark.parametrize(
    ("path", "limited", "counted", "admitting"),
    [
        ((1, 2), {"a", "b"}, {"a", "b"}, ("a", "b")),
        ((1, 2), {"b"}, {"b"}, ("a", "b")),
        ((1, 2), set(), set(), ()),
        ((1, 2), {"c"}, set(), ()),
        ((1, 1), {"a", "b"}, {"a"}, ()),
    ],
)
def test_islands_admit_a_run_together_if_any_of_several_has_a_limit(
    path: tuple[int, ...], limited: set[str], counted: set[str], admitting: tuple[str, ...]
) -> None:
    program = RegisteredProgram(1, chain([split(number, 1) for number in path]), ())
    installs = program.lower(ONE_HOST, limited)
    assert {island for island, install in installs if install.memory is not None} == counted
    for _, submit in program.submissions(2, (b"",), (3,), ()):
        assert submit.islands == admitting


def test_a_program_is_installed_again_as_before_on_the_same_devices() -> None:
    """A slice that is given back, and needed again, may be bound to the same devices."""
    program = RegisteredProgram(1, chain([split(1, 1)]), ())

    def is_as_before(*lowering: Any) -> bool:
        ((_, install),) = program.lower(*lowering)
        return install.again

    assert not is_as_before(ONE_HOST)
    assert is_as_before(ONE_HOST)
    anew = ONE_HOST | {1: msgspec.structs.replace(ONE_HOST[1])}
    assert is_as_before(anew)
    assert not is_as_before(anew, {"a"}), "runs need memory now"
    assert not is_as_before(anew, {"a"}, {1})
    assert is_as_before(anew, {"a"}, {1})
    assert not is_as_before(ONE_HOST, {"a"}, {1}), "the bound of the slice is a new one"
    assert not is_as_before(ONE_HOST | {1: ONE_HOST[2]})


def until_sent(segment: HostSegment) -> list[Instruction]:
    """The instructions of a segment; what it sends is freed at its end, as nothing says when it is read."""
    sent = {s for i in segment.instructions if isinstance(i, Send) for s in i.reads}
    done: list[Instruction] = []
    freed: list[int] = []
    for instruction in segment.instructions:
        if isinstance(instruction, Free):
            freed += sent.intersection(instruction.slots)
            done.append(Free(tuple(s for s in instruction.slots if s not in sent)))
        else:
            done.append(instruction)
    return [*done, Free(tuple(freed))]


def highest(program: Program, plan: BoundProgram) -> dict[DeviceAddress, int]:
    """The most that each device holds if every host simply goes through its list, from the plan alone."""
    specs: dict[int, ArraySpec] = dict(enumerate(program.inputs))
    for node in program.nodes:
        for spec in program.computations[node.computation].outputs:
            specs[len(specs)] = spec
    highest: defaultdict[DeviceAddress, int] = defaultdict(int)
    for host in plan.hosts:
        now: defaultdict[DeviceAddress, int] = defaultdict(int)

        def add(
            slot: int, sign: int, now: defaultdict[DeviceAddress, int] = now, name: str = host.host
        ) -> None:
            placement = specs[slot].placement
            for device in BINDINGS[placement.slice].located(placement):
                if device.host == name:
                    now[device] += sign * specs[slot].device_bytes

        held, sent = set(host.inputs), set[int]()
        for instruction in itertools.chain.from_iterable(map(until_sent, host.segments)):
            taken: list[int] = []
            match instruction:
                case Receive():
                    specs[instruction.slot] = instruction.spec
                    add(instruction.slot, 1)
                    held.add(instruction.slot)
                case Execute():
                    for slot in instruction.results:
                        add(slot, 1)
                        held.add(slot)
                    forms = [
                        specs[s].sharding.shard_shape(specs[s].shape) for s in instruction.results
                    ]
                    for position in instruction.donated:
                        slot = instruction.args[position]
                        form = specs[slot].sharding.shard_shape(specs[slot].shape)
                        if form in forms:
                            forms.remove(form)
                            taken += [] if slot in sent else [slot]
                case Send():
                    sent.update(instruction.reads)
                case Free():
                    for slot in held.intersection(instruction.slots):
                        add(slot, -1)
            for slot in taken:
                add(slot, -1)
            for device, size_bytes in now.items():
                highest[device] = max(highest[device], size_bytes)
            for slot in taken:
                add(slot, 1)
    return highest


@settings(max_examples=examples(300))
@given(programs())
def test_no_device_ever_holds_more_than_what_is_reserved(program: Program) -> None:
    plan, memories = lower_with_memory(program, BINDINGS)
    reserved = {
        device: peak
        for memory in memories
        for devices, peak in zip(memory.groups, memory.peaks(), strict=True)
        for device in devices
    }
    for device, size_bytes in highest(program, plan).items():
        assert size_bytes <= reserved.get(device, 0), device
    assert {memory.island for memory in memories} == {segment.island for segment in plan.segments}


# --- buffers -----------------------------------------------------------------------------------------


def needs(
    peak: int,
    inputs: int = 0,
    donated: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    same: dict[int, tuple[int, int]] | None = None,
) -> IslandMemory:
    """A program of one device and one computation: its peak, and the sizes of its outputs."""
    made = tuple(
        OutputMemory(number, (DEVICE,), size_bytes, *(same or {}).get(number, (-1, -1)))
        for number, size_bytes in enumerate(outputs)
    )
    computes = ((0, 0, peak),)
    return IslandMemory("i", ((DEVICE,),), (peak,), computes, tuple(range(inputs)), donated, made)


class Ledger:
    """The memory of one device."""

    def __init__(self, capacity_bytes: int = 100) -> None:
        self.memory = DeviceMemory("i", capacity_bytes)
        self.programs = 0

    def program(self, memory: IslandMemory, temporary_bytes: int = 0) -> int:
        self.programs += 1
        self.memory.install(self.programs, "p", memory)
        if temporary_bytes:
            self.memory.add_temporaries(self.programs, (temporary_bytes,))
        return self.programs

    def reserve(self, program: int) -> Claim:
        claim = self.memory.reserve(program, (), ())
        assert claim
        return claim

    @property
    def used(self) -> int:
        return self.memory.used_bytes(DEVICE)


def test_a_reservation_becomes_results_and_results_go_when_they_are_released() -> None:
    ledger = Ledger()
    program = ledger.program(needs(60, outputs=(20,)))
    claim = ledger.memory.reserve(program, (), (1,))
    assert claim
    assert ledger.used == 60
    assert ledger.memory.reserve(program, (), (2,)) is None
    ledger.memory.end(claim)
    assert ledger.used == 20
    second = ledger.memory.reserve(program, (), (2,))
    assert second
    ledger.memory.release(2)
    assert ledger.used == 80, "an unwanted result lasts until its run has ended"
    ledger.memory.end(second)
    ledger.memory.release(1)
    assert (ledger.used, ledger.memory.claims) == (0, 0)


def test_bytes_come_back_when_no_run_in_flight_can_read_them() -> None:
    ledger = Ledger()
    ledger.memory.place(1, (DEVICE,), 30)
    reader = ledger.memory.reserve(ledger.program(needs(0, inputs=1)), (1,), ())
    receiver = ledger.memory.reserve(
        ledger.program(needs(0, inputs=1, donated=(0,), outputs=(30,))), (1,), (2,)
    )
    assert reader
    assert receiver
    ledger.memory.release(1)
    assert ledger.used == 30
    ledger.memory.end(receiver)
    assert ledger.used == 60, "the reader has not ended"
    ledger.memory.end(reader)
    assert ledger.used == 30
    ledger.memory.release(2)
    assert ledger.used == 0


def test_runs_may_end_in_another_order_than_they_began() -> None:
    ledger = Ledger()
    maker = ledger.memory.reserve(ledger.program(needs(30, outputs=(30,))), (), (1,))
    reader = ledger.memory.reserve(ledger.program(needs(0, inputs=1, donated=(0,))), (1,), ())
    assert maker
    assert reader
    ledger.memory.end(reader)
    assert ledger.used == 30
    ledger.memory.end(maker)
    assert ledger.used == 0


def test_arrays_that_share_a_buffer_are_counted_once() -> None:
    ledger = Ledger()
    ledger.memory.place(1, (DEVICE,), 30)
    same = {0: (0, -1), 2: (-1, 1)}
    program = ledger.program(needs(20, inputs=1, outputs=(30, 20, 20), same=same))
    claim = ledger.memory.reserve(program, (1,), (2, 3, 4))
    assert claim
    ledger.memory.end(claim)
    assert ledger.used == 50
    ledger.memory.release(1)
    ledger.memory.release(3)
    assert ledger.used == 50
    ledger.memory.release(4)
    assert ledger.used == 30
    ledger.memory.release(2)
    assert ledger.used == 0


def test_a_donated_buffer_that_another_array_has_does_not_come_back() -> None:
    ledger = Ledger(50)
    same = {1: (-1, 0)}
    claim = ledger.memory.reserve(
        ledger.program(needs(20, outputs=(20, 20), same=same)), (), (1, 2)
    )
    assert claim
    ledger.memory.end(claim)
    ledger.memory.place(3, (DEVICE,), 20)
    taking = ledger.program(needs(0, inputs=1, donated=(0,), outputs=(20,)))
    assert ledger.memory.reserve(taking, (1,), (4,)) is None
    ledger.memory.release(2)
    assert ledger.memory.reserve(taking, (1,), (4,))


def test_a_run_that_is_withdrawn_has_taken_nothing() -> None:
    ledger = Ledger()
    ledger.memory.place(1, (DEVICE,), 30)
    program = ledger.program(needs(40, inputs=1, donated=(0,), outputs=(30,)))
    claim = ledger.memory.reserve(program, (1,), (2,))
    assert claim
    ledger.memory.withdraw(claim)
    assert (ledger.used, ledger.memory.claims) == (30, 0)
    again = ledger.memory.reserve(program, (1,), (2,))
    assert again
    ledger.memory.end(again)
    assert ledger.used == 30
    ledger.memory.forget(0)
    assert ledger.used == 0


def test_what_needs_nothing_fits_even_where_uploads_have_taken_too_much() -> None:
    ledger = Ledger()
    ledger.memory.place(1, (DEVICE,), 300)
    claim = ledger.memory.reserve(ledger.program(needs(0, inputs=1)), (1,), ())
    assert claim
    assert ledger.memory.reserve(ledger.program(needs(1)), (), ()) is None
    ledger.memory.end(claim)
    ledger.memory.place(1, (DEVICE,), 20)
    assert ledger.used == 20, "an array that is restored replaces what it was"


def test_temporaries_are_reserved_once_for_all_runs_in_flight() -> None:
    ledger = Ledger(60)
    program = ledger.program(needs(0), 25)
    claims = [ledger.reserve(program) for _ in range(256)]
    assert ledger.used == 25
    for claim in claims[1:]:
        ledger.memory.end(claim)
    assert ledger.used == 25
    ledger.memory.withdraw(claims[0])
    assert (ledger.used, ledger.memory.claims) == (0, 0)


def test_what_runs_keep_is_reserved_for_each_beside_the_temporaries_of_one() -> None:
    ledger = Ledger(60)
    program = ledger.program(needs(20), 25)
    first = ledger.reserve(program)
    assert ledger.memory.reserve(program, (), ()) is None
    assert ledger.used == 45
    assert never_fits(ledger.memory, program, ()) is None
    ledger.memory.end(first)
    assert (ledger.used, ledger.memory.claims) == (0, 0)


def test_the_largest_temporaries_in_flight_are_reserved() -> None:
    ledger = Ledger(60)
    small, large = ledger.program(needs(5), 10), ledger.program(needs(5), 30)
    few = ledger.program(needs(30))
    claims = [ledger.reserve(small), ledger.reserve(large), ledger.reserve(small)]
    assert ledger.used == 3 * 5 + 30
    assert ledger.memory.reserve(few, (), ()) is None
    ledger.memory.uninstall(large)
    assert ledger.used == 3 * 5 + 30
    ledger.memory.end(claims[1])
    assert ledger.used == 2 * 5 + 10
    claims[1] = ledger.reserve(few)
    assert ledger.used == 2 * 5 + 10 + 30
    for claim in claims:
        ledger.memory.end(claim)
    assert (ledger.used, ledger.memory.claims) == (0, 0)


def test_temporaries_that_become_known_count_for_the_runs_in_flight() -> None:
    """Also if they are too much: what has been admitted ends, and gives back what it took."""
    ledger = Ledger(60)
    program = ledger.program(needs(5))
    first = ledger.reserve(program)
    ledger.memory.add_temporaries(program, (20,))
    assert ledger.used == 25
    second = ledger.reserve(program)
    assert ledger.used == 30
    ledger.memory.add_temporaries(program, (70,))
    assert ledger.used == 80
    assert ledger.memory.reserve(program, (), ()) is None
    ledger.memory.end(first)
    ledger.memory.withdraw(second)
    assert (ledger.used, ledger.memory.claims) == (0, 0)
    error = never_fits(ledger.memory, program, ())
    assert error
    assert "needs 75 B" in str(error)


def test_temporaries_are_reserved_where_they_are_taken() -> None:
    """A run of two devices beside runs of one."""
    memory = DeviceMemory("i", 60)
    wide = IslandMemory("i", ((DEVICE,), (OTHER,)), (0, 0), ((0, 0, 0), (1, 1, 0)), (), (), ())
    memory.install(1, "wide", wide)
    memory.add_temporaries(1, (10, 40))
    memory.install(2, "narrow", needs(5))
    memory.add_temporaries(2, (30,))
    first, second = memory.reserve(2, (), ()), memory.reserve(1, (), ())
    assert first
    assert second
    assert (memory.used_bytes(DEVICE), memory.used_bytes(OTHER)) == (35, 40)
    memory.end(first)
    assert (memory.used_bytes(DEVICE), memory.used_bytes(OTHER)) == (10, 40)
    memory.end(second)
    assert (memory.used_bytes(DEVICE), memory.used_bytes(OTHER)) == (0, 0)


def test_a_run_without_room_for_its_temporaries_is_told_how_much_it_needs() -> None:
    ledger = Ledger(60)
    ledger.memory.place(client_id(2, 1), (DEVICE,), 50)
    program = ledger.program(needs(5), 10)
    assert ledger.memory.reserve(program, (), ()) is None
    assert never_fits(ledger.memory, program, ()) is None
    assert "needs 15 B more" in str(
        no_room(ledger.memory, ledger.memory.total, program, (), 1).error
    )


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32 - 1))
def test_the_count_is_right_whatever_happens(seed: int) -> None:
    """Never above the capacity by an admission, the largest temporaries in it, and nothing is left."""
    dice = random.Random(seed)
    ledger = Ledger(200)
    kinds = [needs(dice.randrange(80), outputs=(dice.randrange(20),)) for _ in range(3)]
    kinds += [needs(40, 1, (0,), (20, 40)), needs(30, 1, (), (20, 10), {0: (0, -1)})]
    chosen = [(ledger.program(kind), kind) for kind in kinds]
    known = dict.fromkeys((program for program, _ in chosen), 0)
    arrays: list[int] = []
    flying: list[tuple[int, Claim]] = []
    for number in range(60):
        action = dice.random()
        if action < 0.5:
            program, kind = dice.choice(chosen)
            if kind.inputs and not arrays:
                continue
            args = tuple(dice.choice(arrays) for _ in kind.inputs)
            results = tuple(1000 + 2 * number + k for k, _ in enumerate(kind.outputs))
            before = ledger.used
            claim = ledger.memory.reserve(program, args, results)
            assert ledger.used <= 200 or ledger.used == before
            if claim is None:
                assert ledger.used == before
                continue
            flying.append((program, claim))
            arrays = [a for a in arrays if a not in [args[k] for k in kind.donated]]
            arrays += results
        elif action < 0.8 and flying:
            ledger.memory.end(flying.pop(dice.randrange(len(flying)))[1])
        elif action > 0.93:
            program, _ = dice.choice(chosen)
            size_bytes = dice.randrange(60)
            ledger.memory.add_temporaries(program, (size_bytes,))
            known[program] = max(known[program], size_bytes)
        elif arrays:
            ledger.memory.release(arrays.pop(dice.randrange(len(arrays))))
        largest = max((known[program] for program, _ in flying), default=0)
        assert ledger.memory.total.temporaries.sum() == largest
        for told in counted(ledger.memory):
            parts = (told.arrays_bytes, *(size for _, size in told.reserved), told.temporary_bytes)
            assert sum(parts) == ledger.memory.used_bytes(told.device)
            assert told.arrays_bytes >= 0
    for _, claim in flying:
        ledger.memory.end(claim)
    for array in arrays:
        ledger.memory.release(array)
    assert (ledger.used, ledger.memory.claims) == (0, 0)


# --- one scheduler alone -----------------------------------------------------------------------------


class MemoryBench(Bench):
    """A scheduler whose devices have 100 bytes each; the test plays the controller."""

    def __init__(
        self, clients: int = 2, capacity_bytes: int | None = 100, *, counts_tenants: bool = False
    ) -> None:
        super().__init__(counts_tenants=counts_tenants)
        self.tell(msg.IslandFormed("i", 1, self.hosts, capacity_bytes))
        for client in range(1, clients + 1):
            self.client(client)
        self.programs = 100

    def program(self, client: int, memory: IslandMemory | None) -> int:
        self.programs += 1
        number = client_id(client, self.programs)
        body = Program(f"p{self.programs}", (), (), (), ())
        self.tell(msg.InstallProgram(number, body, (PLAN,), (), memory))
        return number

    def run(
        self, program: int, *args: int, results: tuple[int, ...] = (), **how: Any
    ) -> msg.Submit:
        submit = self.submission(program >> 40, **how)
        submit = msgspec.structs.replace(
            submit, program=program, args=args, results=results, islands=how.get("islands", ())
        )
        self.tell(submit)
        return submit

    def upload(self, array: int, size_bytes: int) -> None:
        self.tell(msg.ArrayPlaced(array, (DEVICE,), size_bytes), msg.UploadEnded(array))

    @property
    def memory(self) -> DeviceMemory:
        memory = self.scheduler.admission.memory
        assert memory is not None
        return memory

    @property
    def used(self) -> int:
        return self.memory.used_bytes(DEVICE)

    def launched(self) -> list[int]:
        return [launch.run for launch in self.launches() if launch.segment != msg.CANCELLED]

    def refused(self) -> list[msg.RunRefused]:
        return list(self.world.to(CONTROL, msg.RunRefused))


def test_a_run_waits_until_what_is_in_flight_has_ended() -> None:
    bench = MemoryBench()
    first = bench.run(bench.program(1, needs(60)))
    second = bench.run(bench.program(2, needs(60)))
    small = bench.run(bench.program(2, needs(10)))
    assert bench.launched() == [first.run]
    bench.end(bench.launches()[0])
    assert bench.launched() == [first.run, second.run, small.run]
    assert not bench.refused()


def test_a_run_that_does_not_fit_is_passed_by_others_but_not_for_ever() -> None:
    bench = MemoryBench(3)
    small = bench.program(1, needs(30))
    large = bench.program(2, needs(90))
    bench.run(small)
    big = bench.run(large)
    runs = [bench.run(small) for _ in range(3 * PATIENCE)]
    ended = 0
    while big.run not in bench.launched():
        bench.end(bench.launches()[ended])
        ended += 1
    passed = bench.launched().index(big.run) - 1
    assert PATIENCE <= passed <= PATIENCE + 2
    assert len(runs) > passed


def test_a_run_that_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = MemoryBench()
    bench.run(bench.program(2, needs(10)))
    array = client_id(1, 5)
    bench.tell(msg.ArrayPlaced(array, (DEVICE,), 60))
    run = bench.run(bench.program(1, needs(50, inputs=1)), array)
    (refused,) = bench.refused()
    assert refused.run == run.run
    assert refused.error.kind == "OutOfDeviceMemory"
    for words in (
        "needs 110 B on device 0 of host h0",
        "60 B of it for its arguments",
        "has 100 B",
    ):
        assert words in refused.error.message


def test_a_run_is_refused_when_nothing_in_flight_can_make_room() -> None:
    bench = MemoryBench()
    for client, size_bytes in ((1, 30), (1, 10), (2, 40)):
        bench.upload(client_id(client, 5 + size_bytes), size_bytes)
    running = bench.run(bench.program(2, needs(5)))
    bench.run(bench.program(1, needs(50)))
    assert not bench.refused(), "the other run may make room"
    bench.end(bench.launches()[0])
    (refused,) = bench.refused()
    assert bench.launched() == [running.run]
    message = refused.error.message
    for words in (
        "needs 50 B more",
        "40 B are held by 2 live",
        "40 B by 1 arrays of other clients",
    ):
        assert words in message


def test_the_queue_of_a_refused_run_stands_still_until_the_controller_has_cancelled_it() -> None:
    bench = MemoryBench()
    too_big = bench.run(bench.program(1, needs(200)))
    behind = bench.run(bench.program(1, needs(10)))
    other = bench.run(bench.program(2, needs(10)))
    assert len(bench.refused()) == 1
    assert bench.launched() == [other.run]
    bench.tell(msg.CancelRun(too_big.run))
    assert bench.launched()[-1] == behind.run
    assert "scheduler.admission.refused" not in held("scheduler", bench.scheduler)


def test_one_run_at_a_time_is_refused_for_what_others_hold() -> None:
    """What the first client drops then is what the second has waited for."""
    bench = MemoryBench()
    held = client_id(1, 5)
    bench.upload(held, 60)
    program = bench.program(1, needs(50))
    first = bench.run(program)
    bench.tell(msg.Release(1, (held,), (("h0",),)))
    assert len(bench.refused()) == 1
    second = bench.run(bench.program(2, needs(50)))
    assert len(bench.refused()) == 1
    bench.tell(msg.CancelRun(first.run))
    assert bench.launched() == [second.run]
    assert len(bench.refused()) == 1


@pytest.mark.parametrize("islands", [(), ("h", "i")])
@pytest.mark.parametrize("first", [1, 2])
def test_a_run_waits_for_an_upload_whose_array_goes_when_it_has_come(
    first: int, islands: tuple[str, ...]
) -> None:
    """It was deleted on its way. Whose work is looked at first makes no difference."""
    bench = MemoryBench()
    array = client_id(first, 5)
    bench.tell(msg.ArrayPlaced(array, (DEVICE,), 60))
    run = bench.run(bench.program(3 - first, needs(50)), islands=islands)
    if islands:
        bench.tell(msg.ReserveRun(run.run))
    later = client_id(first, 6)
    bench.tell(msg.ArrayPlaced(later, (DEVICE,), 10))
    assert not bench.launched()
    assert not bench.refused()
    bench.world.mailboxes["controller"] += [
        (bench.address, bench.address, msg.UploadEnded(array)),
        (bench.address, bench.address, msg.Release(first, (array,), (("h0",),))),
    ]
    bench.world.drain("controller")
    assert bench.launched() == [run.run]
    assert not bench.refused()


@pytest.mark.parametrize("seed", range(10))
def test_what_is_deleted_on_its_way_makes_room_for_what_its_client_does_next(seed: int) -> None:
    """Though that is handed over before the array has come; but not before what uses it."""
    world = cluster(seed, a=3 * LARGE_SHARD + 8)
    client = join(world, "c")
    spec = split(client.slice(1, "a"), 1, LARGE)
    world.settle()
    program = client.program(chain([spec]))
    world.settle()
    x = np.arange(LARGE)
    used = client.upload(x, spec)
    (y,) = client.run(program, used)
    unused = client.upload(x, spec)
    client.delete(used, unused)
    (z,) = client.run(program, y)
    world.steps(world.random.randrange(100))
    np.testing.assert_array_equal(client.value(y), x + 1)
    np.testing.assert_array_equal(client.value(z), x + 2)
    assert not client.failed
    client.delete(y, z)
    world.settle()
    check_memory_is_free(world)


def test_what_is_deleted_on_its_way_goes_behind_all_that_may_use_it() -> None:
    bench = MemoryBench()
    array, held = client_id(1, 5), client_id(1, 6)
    bench.upload(held, 60)
    bench.tell(msg.ArrayPlaced(array, (DEVICE,), 30))
    reader = bench.run(bench.program(1, needs(0, inputs=1)), array, awaits=(array,), depends=(3,))
    large = bench.program(1, needs(20))
    runs = [bench.run(large), bench.run(large)]
    bench.tell(msg.UploadEnded(array), msg.Release(1, (array,), (("h0",),), late=True))
    bench.tell(msg.Release(1, (held,), (("h0",),)))
    assert not bench.launched()
    bench.tell(msg.SegmentLaunched(reader.run, 3))
    assert bench.launched() == [reader.run]
    assert bench.used == 90
    orders = [
        m for m in bench.world.to(executor_of("h0")) if isinstance(m, msg.Launch | msg.Discard)
    ]
    assert [type(order) for order in orders] == [msg.Launch, msg.Discard]
    bench.end(bench.launches()[0])
    assert bench.launched() == [reader.run] + [run.run for run in runs]
    assert not bench.refused()


def test_a_run_waits_for_an_upload_that_others_wait_for() -> None:
    """What they do then may make room."""
    bench = MemoryBench()
    held, late = client_id(1, 5), client_id(1, 6)
    bench.upload(held, 60)
    bench.tell(msg.ArrayPlaced(late, (DEVICE,), 10))
    reader = bench.run(bench.program(1, needs(0, inputs=1)), late, awaits=(late,))
    bench.tell(msg.Release(1, (held,), (("h0",),)))
    run = bench.run(bench.program(2, needs(50)))
    assert not bench.refused()
    bench.tell(msg.UploadEnded(late))
    assert bench.launched() == [reader.run, run.run]
    assert not bench.refused()


def test_an_upload_that_has_ended_or_began_later_keeps_no_run_from_its_end() -> None:
    bench = MemoryBench(3)
    held, late = client_id(1, 5), client_id(1, 6)
    bench.upload(held, 60)
    bench.tell(msg.ArrayPlaced(late, (DEVICE,), 10))
    first = bench.run(bench.program(2, needs(50)))
    assert not bench.refused()
    bench.tell(msg.ArrayPlaced(client_id(1, 7), (DEVICE,), 10), msg.UploadEnded(late))
    assert [refused.run for refused in bench.refused()] == [first.run]
    bench.tell(msg.CancelRun(first.run))
    second = bench.run(bench.program(2, needs(90)))
    assert len(bench.refused()) == 1
    bench.upload(client_id(3, 5), 60)
    bench.tell(msg.RemoveClient(1))
    assert not bench.memory.arriving
    assert [refused.run for refused in bench.refused()] == [first.run, second.run]


def test_a_release_in_the_queue_makes_room_in_its_turn() -> None:
    bench = MemoryBench()
    program = bench.program(1, needs(60, outputs=(60,)))
    made = [client_id(1, 50 + k) for k in range(3)]
    runs = []
    for array in made:
        runs.append(bench.run(program, results=(array,)))
        bench.tell(msg.Release(1, (array,), (("h0",),)))
    assert bench.launched() == [runs[0].run]
    for index in range(3):
        assert bench.used == 60
        bench.end(bench.launches()[index])
    assert bench.launched() == [run.run for run in runs]
    assert (bench.used, bench.memory.claims) == (0, 0)
    assert not bench.refused()


def test_temporaries_are_reserved_as_soon_as_a_host_has_told_of_them() -> None:
    bench = MemoryBench()
    program = bench.program(1, needs(10))
    bench.tell(msg.Installed(1, program, None, (75,)), sender=executor_of("h0"))
    for _ in range(3):
        bench.run(program)
    assert bench.used == 95
    assert len(bench.launched()) == 2
    bench.end(bench.launches()[0])
    assert bench.used == 95
    assert len(bench.launched()) == 3
    assert not bench.refused()


def test_a_client_that_goes_gives_everything_back() -> None:
    bench = MemoryBench()
    bench.tell(msg.ArrayPlaced(client_id(1, 5), (DEVICE,), 20))
    program = bench.program(1, needs(50, outputs=(50,)))
    bench.run(program, results=(client_id(1, 6),))
    bench.run(program, results=(client_id(1, 7),))
    waiting = bench.run(bench.program(2, needs(80)))
    bench.tell(msg.RemoveClient(1))
    assert bench.used == 50, "what has been launched ends first"
    bench.end(bench.launches()[0])
    assert bench.launched()[-1] == waiting.run
    assert bench.used == 80


def test_a_new_epoch_starts_with_nothing_held() -> None:
    bench = MemoryBench()
    bench.tell(msg.ArrayPlaced(client_id(1, 5), (DEVICE,), 20))
    bench.run(bench.program(1, needs(50)))
    bench.run(bench.program(2, needs(50)))
    error = ErrorReport("HostLost", "gone")
    bench.tell(msg.EpochEnded("i", 1, error), msg.IslandFormed("i", 2, bench.hosts, 100))
    assert (bench.used, bench.memory.claims) == (0, 0)
    bench.run(bench.program(1, needs(100)))
    assert bench.used == 100
    assert not bench.refused()


def test_without_a_limit_nothing_is_counted() -> None:
    bench = MemoryBench(capacity_bytes=None)
    bench.tell(msg.ArrayPlaced(client_id(1, 5), (DEVICE,), 20))
    program = bench.program(1, needs(10**15))
    bench.run(program)
    assert bench.scheduler.admission.memory is None
    assert len(bench.launched()) == 1
    assert all(
        task.here.reservation is None for task in bench.scheduler.in_flight.launches.values()
    )


def test_memory_is_taken_only_when_everything_else_is_there() -> None:
    bench = MemoryBench()
    program = bench.program(1, needs(60))
    array = client_id(1, 9)
    late = bench.run(program, depends=(3,), awaits=(array,))
    other = bench.run(bench.program(2, needs(60)))
    assert bench.launched() == [other.run]
    bench.tell(msg.SegmentLaunched(late.run, 3), msg.UploadEnded(array))
    assert bench.used == 60
    bench.end(bench.launches()[0])
    assert bench.launched() == [other.run, late.run]
    bench.end(bench.launches()[1])
    bench.tell(msg.UninstallProgram(program, ("h0",)))
    assert not bench.refused()


def test_a_run_of_two_islands_is_admitted_in_the_order_of_their_names() -> None:
    first = MemoryBench()
    run = first.run(first.program(1, needs(60)), islands=("i", "j"))
    assert not first.used, "it may not be next in its queue on the other island"
    first.tell(msg.RunAtHead(run.run))
    assert first.used == 60
    assert first.world.to(scheduler_of("j"), msg.ReserveRun) == [msg.ReserveRun(run.run)]
    assert not first.launched()
    first.tell(msg.RunAdmitted(run.run))
    assert first.launched() == [run.run]

    last = MemoryBench()
    program = last.program(1, needs(60))
    ahead = last.run(program, depends=(3,))
    run = last.run(program, islands=("h", "i"))
    assert not last.world.to(scheduler_of("h"), msg.RunAtHead)
    last.tell(msg.SegmentLaunched(ahead.run, 3))
    assert last.world.to(scheduler_of("h"), msg.RunAtHead) == [msg.RunAtHead(run.run)]
    last.tell(msg.ReserveRun(run.run))
    assert last.launched() == [ahead.run], "there is no room yet"
    last.end(last.launches()[0])
    assert last.world.to(scheduler_of("h"), msg.RunAdmitted) == [msg.RunAdmitted(run.run)]
    assert last.launched() == [ahead.run, run.run]


def test_a_run_cancelled_between_its_two_islands_gives_its_reservation_back() -> None:
    bench = MemoryBench()
    array = client_id(1, 5)
    bench.tell(msg.ArrayPlaced(array, (DEVICE,), 20))
    program = bench.program(1, needs(60, 1, (0,), (20,)))
    run = bench.run(program, array, results=(client_id(1, 6),), islands=("i", "j"))
    bench.tell(msg.RunAtHead(run.run))
    assert bench.used == 80
    bench.tell(msg.CancelRun(run.run))
    assert (bench.used, bench.memory.claims) == (20, 0), "nor has it taken its argument"
    bench.tell(msg.RunAdmitted(run.run))
    assert not bench.launched()[1:]


# --- a whole cluster ---------------------------------------------------------------------------------


def cluster(seed: int, **capacity_bytes: int | None) -> World:
    """Islands of one host and one device each, named by their first letters."""
    world = World(seed)
    world.controller(("fifo", "share", "priority")[seed % 3])
    for island, limit in capacity_bytes.items():
        host_with(world, island, limit)
    world.settle()
    return world


def host_with(world: World, island: str, limit_bytes: int | None) -> None:
    """The one host of an island."""
    host = world.host(f"{island}0", island)

    def join(form: Any, joined: Any) -> None:
        joined(msg.IslandJoined(form.island, form.epoch, "fake", 1, limit_bytes))

    host.join = join  # type: ignore[method-assign]


def check_memory_is_free(world: World) -> None:
    for island, scheduler in world.schedulers.items():
        admission = scheduler.admission
        waiting = ("gathering", "blocked", "refused")
        assert not held("", scheduler).keys() & {f".admission.{name}" for name in waiting}
        if admission.memory is not None:
            assert admission.memory.claims == 0
            assert not admission.memory.arriving
            assert admission.memory.used_bytes(DeviceAddress(f"{island}0", 0)) == 0


@pytest.mark.parametrize("seeds", parts(range(30), 8))
@pytest.mark.parametrize("unlimited", ["", "a", "b", "c"])
def test_runs_that_need_all_the_memory_of_several_islands_always_finish(
    seeds: list[int], unlimited: str
) -> None:
    """Each island has room for one run. Runs cross in all directions, and none is refused."""
    for seed in seeds:
        limits = {i: None if i == unlimited else 2 * LARGE_SHARD + 8 for i in "abc"}
        world = cluster(seed, **limits)
        clients = [join(world, f"c{number}") for number in range(3)]
        for client in clients:
            on = [split(client.slice(1, island), 1, LARGE) for island in "abc"]
            world.settle()
            for _ in range(3):
                path = [world.random.choice(on) for _ in range(world.random.randrange(1, 5))]
                client.program(chain(path))
        world.settle()
        runs = clients * 6
        world.random.shuffle(runs)
        for client in runs:
            program = world.random.choice(list(client.outputs))
            client.delete(*client.run(program, np.arange(LARGE)))
            world.steps(world.random.randrange(10))
        world.settle()
        for client in clients:
            assert client.credits == client.sent_runs == 6
            assert not client.failed, client.failed
        assert not world.control.runs.in_flight
        check_memory_is_free(world)
        assert world.counters["runs_refused"] == 0


def test_what_is_counted_at_rest_is_what_is_alive() -> None:
    for seed in range(20):
        world = cluster(seed, a=10 * LARGE_SHARD, b=10 * LARGE_SHARD)
        client = join(world, "c")
        a, b = (split(client.slice(1, island), 1, LARGE) for island in "ab")
        world.settle()
        there = client.program(donating(chain([a, b], donated=(0,))))
        stay = client.program(chain([b]))
        x = client.upload(np.arange(LARGE), a, inline=bool(seed % 2))
        kept = client.upload(np.arange(LARGE), a)
        (y,) = client.run(there, x)
        (z,) = client.run(stay, y)
        np.testing.assert_array_equal(client.value(z), np.arange(LARGE) + 3)
        used = {
            island: scheduler.admission.memory.used_bytes(DeviceAddress(f"{island}0", 0))
            for island, scheduler in world.schedulers.items()
            if scheduler.admission.memory is not None
        }
        assert used == {"a": LARGE_SHARD, "b": 2 * LARGE_SHARD}
        client.delete(kept, y, z)
        world.settle()
        check_memory_is_free(world)


@pytest.mark.parametrize("deleted", [False, True])
def test_an_upload_that_fails_is_not_on_its_way_any_more(deleted: bool) -> None:
    """Whether it is sent again, or is not needed any more."""
    world = cluster(0, a=10 * LARGE_SHARD)
    client = join(world, "c")
    spec = split(client.slice(1, "a"), 1, LARGE)
    world.settle()
    array = client.id()
    client.tell(msg.CreateArray(array, spec))
    if deleted:
        client.delete(array)
    world.settle()
    memory = world.schedulers["a"].admission.memory
    assert memory is not None
    assert memory.arriving == {array}
    assert memory.used_bytes(DeviceAddress("a0", 0)) == LARGE_SHARD
    error = ErrorReport.of(TransferFailed("the link was cut"))
    world.post(store_of("a0"), CONTROL, msg.Uploaded(array, error))
    world.settle()
    assert not memory.arriving
    assert memory.used_bytes(DeviceAddress("a0", 0)) == (0 if deleted else LARGE_SHARD)


@pytest.mark.parametrize("seeds", parts(range(20), 8))
def test_a_run_without_room_fails_its_results_and_all_that_comes_of_them(seeds: list[int]) -> None:
    for seed in seeds:
        world = cluster(seed, a=3 * LARGE_SHARD, b=3 * LARGE_SHARD)
        client, other = join(world, "c"), join(world, "d")
        a, b = (split(client.slice(1, island), 1, LARGE) for island in "ab")
        theirs = split(other.slice(1, "b"), 1, LARGE)
        world.settle()
        held = [other.upload(np.arange(LARGE), theirs) for _ in range(2)]
        world.settle()
        program, back = client.program(chain([a, b])), client.program(copy(b, a))
        small = client.program(chain([b]))
        (y,) = client.run(program, np.arange(LARGE))
        (z,) = client.run(back, y)
        (u,) = client.run(small, y)
        (fine,) = client.run(small, np.arange(LARGE))
        world.settle()
        for array in (y, z, u):
            error = client.value(array)
            assert isinstance(error, ErrorReport)
            assert error.kind == "OutOfDeviceMemory"
            assert "arrays of other clients" in error.message
        np.testing.assert_array_equal(client.value(fine), np.arange(LARGE) + 1)
        assert client.credits == client.sent_runs
        other.delete(*held)
        world.settle()
        (again,) = client.run(program, np.arange(LARGE))
        np.testing.assert_array_equal(client.value(again), np.arange(LARGE) + 2)
        client.delete(y, z, u, fine, again)
        world.settle()
        check_memory_is_free(world)


@pytest.mark.parametrize("seeds", parts(range(40), 6))
def test_clients_and_hosts_may_go_at_any_moment(seeds: list[int]) -> None:
    """No reservation outlives its run, and no run waits for one that is gone."""
    for seed in seeds:
        world = cluster(seed, a=2 * LARGE_SHARD + 8, b=2 * LARGE_SHARD + 8)
        gone, other = join(world, "gone"), join(world, "other")
        for turn, client in enumerate((gone, other)):
            on = [split(client.slice(1, island), 1, LARGE) for island in "ab"]
            world.settle()
            path = [*on, on[0]] if turn else [*reversed(on), on[1]]
            program = client.program(chain(path))
            for _ in range(5):
                client.delete(*client.run(program, np.arange(LARGE)))
        world.steps(world.random.randrange(120))
        world.kill("gone" if seed % 2 else "a0")
        world.settle()
        if not seed % 2:
            host_with(world, "a", 2 * LARGE_SHARD + 8)
            world.settle()
        for client in (other,) if seed % 2 else (gone, other):
            assert client.credits == client.sent_runs == 5
        assert not world.control.runs.in_flight
        check_memory_is_free(world)
