"""Lowered programs compute what they say, whatever order the islands and hosts run in."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.core.compact import Compact, Ranges
from pw.core.errors import ArgumentError, PlacementError, ProtocolError
from pw.core.messages import Install, RegisterProgram
from pw.core.programs.lower import lower
from pw.core.programs.plan import BoundProgram, Execute, Free, Instruction, Receive, Send
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.programs.program_checks import check_program
from pw.core.sharding import ArraySpec, Binding, DeviceAddress, Placement, Sharding
from pw.transport.links import codec
from tests.stages.interpreter import Interpreter, sequentially
from tests.stages.layouts import shards
from tests.stages.samples import examples

SHAPE = (4, 8)
A_HOSTS, B_HOSTS = ("a0", "a1"), ("b0", "b1")
A0, A1, B0, B1 = (
    tuple(DeviceAddress(host, ordinal) for ordinal in range(2)) for host in A_HOSTS + B_HOSTS
)
BINDINGS = {
    0: Binding.of(0, "a", A0 + A1),
    1: Binding.of(1, "b", B0 + B1),
    2: Binding.of(2, "a", (A1[1], A0[0], A1[0], A0[1])),
    3: Binding.of(3, "b", B1),
    4: Binding.of(4, "c", (DeviceAddress("c0", 0),)),
}
ROWS = Sharding(("x",), (4,), (("x",),))
COLUMNS = Sharding(("x",), (4,), ((), ("x",)))
GRID = Sharding(("x", "y"), (2, 2), (("x",), ("y",)))
HALVES = Sharding(("x", "y"), (2, 2), ((), ("y",)))
REPLICATED = Sharding(("x",), (4,))
ALSO_REPLICATED = Sharding(("x", "y"), (2, 2))
PAIR = Sharding(("x",), (2,), (("x",),))
PAIR_REPLICATED = Sharding(("x",), (2,))
ONE = Sharding((), ())


def lies(sharding: Sharding, slice_: int, devices: tuple[int, ...] | None = None) -> ArraySpec:
    """An array of the tests' one shape on the first devices of a slice, or on those named."""
    chosen = tuple(range(sharding.device_count)) if devices is None else devices
    return ArraySpec(SHAPE, "float64", sharding, Placement(slice_, chosen))


def in_host_memory(spec: ArraySpec) -> ArraySpec:
    return msgspec.structs.replace(spec, memory="pinned_host")


SPECS = [
    in_host_memory(lies(ROWS, 0)),
    in_host_memory(lies(PAIR, 1)),
    *(
        lies(sharding, slice_)
        for sharding in (ROWS, COLUMNS, GRID, HALVES, REPLICATED, ALSO_REPLICATED)
        for slice_ in (0, 1, 2)
    ),
    *(lies(sharding, slice_) for sharding in (PAIR, PAIR_REPLICATED) for slice_ in (0, 1, 2, 3)),
    lies(PAIR, 0, (2, 1)),
    *(lies(ONE, slice_) for slice_ in (0, 1, 4)),
]


def computation(
    spec: ArraySpec,
    inputs: int = 1,
    outputs: int = 1,
    donated: tuple[int, ...] = (),
    name: str = "f",
) -> Computation:
    return Computation(name, b"", spec.placement, (spec,) * inputs, (spec,) * outputs, donated)


def check_run(program: Program, plan: BoundProgram, seed: int, strict: bool) -> None:
    """Run `plan` and compare its outputs, and what is left in its slots, with what they must be."""
    random_values = np.random.default_rng(seed)
    inputs = [random_values.integers(0, 100, SHAPE).astype(float) for _ in program.inputs]
    expected = sequentially(program, inputs)
    interpreter = Interpreter(program, plan, inputs, seed, strict)
    interpreter.run()
    plans = {host.host: host for host in plan.hosts}
    for number, output in enumerate(program.outputs):
        wanted = shards(expected[number], output.spec)
        located = BINDINGS[output.spec.placement.slice].located(output.spec.placement)
        for position, device in enumerate(located):
            slot = dict(plans[device.host].outputs)[number]
            actual = interpreter.hosts[device.host].slots[slot][device]
            np.testing.assert_array_equal(actual, wanted[position])
    for name, host_plan in plans.items():
        borrowed = {number for number in host_plan.inputs if number not in program.donated}
        kept = {slot for _, slot in host_plan.outputs}
        left = interpreter.hosts[name].slots
        assert set(left) == borrowed | kept, "a slot was freed too early or never"
        for number in borrowed:
            spec = program.inputs[number]
            wanted = shards(inputs[number], spec)
            for position, device in enumerate(interpreter.located(name, spec)):
                if device.host == name:
                    np.testing.assert_array_equal(left[number][device], wanted[position])
    for island_hosts in (A_HOSTS, B_HOSTS):
        orders = [interpreter.hosts[h].executed for h in island_hosts if h in interpreter.hosts]
        together = [set(order) for order in orders]
        common = set.intersection(*together) if together else set()
        assert len({tuple(c for c in order if c in common) for order in orders}) <= 1


def check_shape(plan: BoundProgram) -> None:
    """What must hold of every plan, whatever it computes."""
    parts = {(h.host, s.segment): s.instructions for h in plan.hosts for s in h.segments}
    launched: set[int] = set()
    islands: defaultdict[str, deque[int]] = defaultdict(deque)
    for index, segment in enumerate(plan.segments):
        islands[segment.island].append(index)
        assert segment.hosts
        assert all((host, index) in parts for host in segment.hosts)
        assert list(segment.depends) == sorted(set(segment.depends))
        assert all(plan.segments[other].island != segment.island for other in segment.depends)
    assert len(parts) == sum(len(segment.hosts) for segment in plan.segments)
    while any(islands.values()):
        ready = [
            q for q in islands.values() if q and launched.issuperset(plan.segments[q[0]].depends)
        ]
        assert ready, "segments wait for each other in a circle"
        for queue in ready:
            launched.add(queue.popleft())
    sent = {
        (each.edge, each.route.source_host, each.route.destination_host): index
        for (_, index), part in parts.items()
        for each in part
        if isinstance(each, Send)
    }
    for (name, index), part in parts.items():
        for first, second in itertools.pairwise(part):
            assert not (isinstance(first, Free) and isinstance(second, Free))
        for each in part:
            for route in each.routes if isinstance(each, Receive) else ():
                if route.source_host != name:
                    producer = sent[each.edge, route.source_host, name]
                    here, there = plan.segments[index], plan.segments[producer]
                    assert producer in here.depends or there.island == here.island


def check_reporters(program: Program, plan: BoundProgram) -> None:
    """Who says that a segment has ended sees the end of all that is computed and received there."""
    outputs = {slot for host in plan.hosts for _, slot in host.outputs}
    parts = {(h.host, s.segment): s.instructions for h in plan.hosts for s in h.segments}
    for index, segment in enumerate(plan.segments):
        teams: defaultdict[object, set[str]] = defaultdict(set)
        for host in segment.hosts:
            for each in parts[host, index]:
                if isinstance(each, Execute):
                    teams[program.computations[each.computation].placement].add(host)
                elif isinstance(each, Receive) and each.slot in outputs:
                    teams[each.spec.placement].add(host)
        reporters = set(segment.hosts[: segment.reporters])
        assert 1 <= len(reporters) <= max(1, len(teams))
        assert all(reporters & team for team in teams.values())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    specs = draw(st.lists(st.sampled_from(SPECS), min_size=1, max_size=4))
    inputs = tuple(draw(st.lists(st.sampled_from(specs), min_size=1, max_size=4)))
    computations = []
    for _ in range(draw(st.integers(1, 4))):
        arity = draw(st.integers(0, 3))
        donated = draw(st.sets(st.integers(0, arity - 1))) if arity else set()
        computations.append(
            computation(
                draw(st.sampled_from(specs)), arity, draw(st.integers(1, 2)), tuple(sorted(donated))
            )
        )
    values = [ValueRef(-1, index) for index in range(len(inputs))]
    nodes = []
    for number in range(draw(st.integers(0, 10))):
        chosen = draw(st.integers(0, len(computations) - 1))
        arity, outputs = len(computations[chosen].inputs), len(computations[chosen].outputs)
        # Recent values are likelier, so that chains that go back and forth are common.
        args = tuple(
            draw(st.sampled_from(values[-3:] if draw(st.booleans()) else values))
            for _ in range(arity)
        )
        nodes.append(Node(chosen, args))
        values += [ValueRef(number, index) for index in range(outputs)]
    donated_inputs = tuple(sorted(draw(st.sets(st.integers(0, len(inputs) - 1)))))
    program = Program("p", tuple(computations), tuple(nodes), inputs, (), donated_inputs)
    outputs = []
    for value in draw(st.lists(st.sampled_from(values), max_size=4)):
        own = program.spec_of(value)
        outputs.append(Output(value, own if draw(st.booleans()) else draw(st.sampled_from(SPECS))))
    return Program("p", tuple(computations), tuple(nodes), inputs, tuple(outputs), donated_inputs)


@settings(max_examples=examples(400))
@given(programs(), st.integers(0, 2**32 - 1), st.booleans())
def test_every_program_computes_what_it_says(program: Program, seed: int, strict: bool) -> None:
    plan = lower(program, BINDINGS)
    check_shape(plan)
    check_reporters(program, plan)
    check_run(program, plan, seed, strict)
    assert lower(program, BINDINGS) == plan


@given(programs())
def test_every_program_and_plan_comes_back_whole(program: Program) -> None:
    travelling = Compact.of(program)
    assert travelling.value() == program
    assert len(travelling.placements) == len(set(travelling.placements))
    for plan in lower(program, BINDINGS).hosts:
        assert Compact.of(plan).value() == plan


def test_equal_specs_are_one_object_when_they_come_back() -> None:
    spec = lies(ROWS, 0)
    f = computation(spec, 2, 2)
    again = Compact.of(Program("p", (f,), (), (spec, lies(ROWS, 1)), ())).value()
    assert again.inputs[0] is again.computations[0].inputs[1] is again.computations[0].outputs[0]
    assert again.inputs[1] is not again.inputs[0]


def test_a_thousand_arrays_on_two_thousand_devices_travel() -> None:
    devices = tuple(DeviceAddress(f"host-{number // 8}", number % 8) for number in range(2048))
    split = Sharding(("x",), (2048,), (("x",),))
    place = Placement(0, tuple(range(2048)))
    specs = tuple(ArraySpec((2048, 1 + n), "float32", split, place) for n in range(1000))
    step = Computation("step", b"", place, specs, specs)
    results = tuple(Output(ValueRef(0, index), spec) for index, spec in enumerate(specs))
    args = tuple(ValueRef(-1, index) for index in range(1000))
    program = Program("p", (step,), (Node(0, args),), specs, results)
    plan = lower(program, {0: Binding.of(0, "a", devices)}).hosts[7]
    body = Compact.of(program)
    size = len(codec.encode_message(RegisterProgram(1, body, ())))
    assert size < 200_000
    assert len(codec.encode_message(Install(1, 0, 1, body, Compact.of(plan), ()))) < size + 100_000


def test_a_message_to_a_host_does_not_grow_with_the_devices_of_hosts() -> None:
    def install_bytes(devices: int) -> int:
        count = 64 * devices
        place = Placement(0, tuple(range(count)))
        spec = ArraySpec((count,), "float32", Sharding(("x",), (count,), (("x",),)), place)
        step = Computation("step", b"", place, (spec,), (spec,))
        node, output = Node(0, (ValueRef(-1, 0),)), Output(ValueRef(0, 0), spec)
        program = Program("p", (step,), (node,), (spec,), (output,))
        located = [DeviceAddress(f"host-{at // devices}", at % devices) for at in range(count)]
        plan = lower(program, {0: Binding.of(0, "a", located)}).hosts[7]
        install = Install(1, 0, 1, Compact.of(program), Compact.of(plan), ())
        return len(codec.encode_message(install))

    assert install_bytes(16) < install_bytes(2) + 50


@pytest.mark.parametrize("ranges", [(0,), (0, 0), (0, -1), (0, 4, 9, 0), (0, 2**40)])
def test_a_placement_with_a_wrong_range_cannot_be_whole(ranges: tuple[int, ...]) -> None:
    spec = msgspec.structs.replace(lies(ROWS, 0), placement=Placement(0, ()))
    with pytest.raises(ProtocolError, match="placement"):
        Compact(Program("p", (), (), (spec,), ()), (Ranges(0, ranges),)).value()


@pytest.mark.parametrize("number", [Placement(1, ()), Placement(-1, ()), Placement(0, (0,))])
def test_what_names_a_placement_that_was_not_said_cannot_be_whole(number: Placement) -> None:
    spec = msgspec.structs.replace(lies(ROWS, 0), placement=number)
    with pytest.raises(ProtocolError, match="does not have"):
        Compact(Program("p", (), (), (spec,), ()), (Ranges(0, (0, 4)),)).value()


def instructions(plan: BoundProgram, host: str) -> list[list[Instruction]]:
    return [
        list(part.instructions)
        for each in plan.hosts
        if each.host == host
        for part in each.segments
    ]


def kinds(plan: BoundProgram, host: str) -> list[str]:
    """One word for each segment of `host`: the initials of its instructions, Free left out."""
    initial = {Execute: "E", Send: "S", Receive: "R", Free: ""}
    return ["".join(initial[type(each)] for each in part) for part in instructions(plan, host)]


def test_a_pipeline_of_two_islands_needs_three_segments() -> None:
    first, second = lies(ROWS, 0), lies(ROWS, 1)
    count = 4
    forward = [Node(0, (ValueRef(-1, i),)) for i in range(count)]
    turn = [Node(1, (ValueRef(i, 0),)) for i in range(count)]
    backward = [Node(0, (ValueRef(count + i, 0),)) for i in range(count)]
    program = Program(
        "pipeline",
        (computation(first), computation(second)),
        (*forward, *turn, *backward),
        (first,) * count,
        tuple(Output(ValueRef(2 * count + i, 0), first) for i in range(count)),
    )
    plan = lower(program, BINDINGS)
    assert [(s.island, s.hosts, s.depends) for s in plan.segments] == [
        ("a", A_HOSTS, ()),
        ("b", B_HOSTS, (0,)),
        ("a", A_HOSTS, (1,)),
    ]
    assert kinds(plan, "a0") == ["ES" * count, "RE" * count]
    assert kinds(plan, "b1") == ["RES" * count]
    check_run(program, plan, 0, strict=True)


def test_inputs_from_two_islands_open_one_segment() -> None:
    a, b, c = lies(ROWS, 0), lies(ROWS, 1), lies(ONE, 4)
    program = Program(
        "join",
        (computation(a), computation(b), computation(c, inputs=2)),
        (
            Node(0, (ValueRef(-1, 0),)),
            Node(1, (ValueRef(-1, 1),)),
            Node(2, (ValueRef(-1, 2), ValueRef(-1, 2))),
            Node(2, (ValueRef(0, 0), ValueRef(1, 0))),
        ),
        (a, b, c),
        (Output(ValueRef(3, 0), c),),
    )
    plan = lower(program, BINDINGS)
    assert [(s.island, s.depends) for s in plan.segments] == [
        ("a", ()),
        ("b", ()),
        ("c", ()),
        ("c", (0, 1)),
    ]


def test_consumers_share_an_edge() -> None:
    a, b = lies(ROWS, 0), lies(COLUMNS, 1)
    program = Program(
        "fan out",
        (computation(a), computation(b)),
        (Node(0, (ValueRef(-1, 0),)), *(Node(1, (ValueRef(0, 0),)) for _ in range(3))),
        (a,),
        (Output(ValueRef(0, 0), b),),
    )
    plan = lower(program, BINDINGS)
    assert kinds(plan, "a0") == ["ESS"]
    assert kinds(plan, "b0") == ["REEE"]
    assert dict(plan.hosts[2].outputs) == {0: 5}


def test_inputs_are_sent_at_the_start_of_the_first_segment() -> None:
    a, b = lies(ROWS, 0), lies(ROWS, 1)
    program = Program(
        "late",
        (computation(a), computation(b)),
        (Node(0, (ValueRef(-1, 0),)), Node(1, (ValueRef(-1, 1),))),
        (a, a),
        (Output(ValueRef(1, 0), b),),
    )
    plan = lower(program, BINDINGS)
    assert kinds(plan, "a0") == ["SE"]
    assert [(s.island, s.depends) for s in plan.segments] == [("a", ()), ("b", (0,))]
    only_sent = Program("only", program.computations[1:], (Node(0, (ValueRef(-1, 0),)),), (a,), ())
    plan = lower(only_sent, BINDINGS)
    assert kinds(plan, "a0") == ["S"]


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (lies(REPLICATED, 0), lies(ALSO_REPLICATED, 0)),
        (lies(REPLICATED, 0), lies(REPLICATED, 2)),
        (lies(ROWS, 0), lies(ROWS, 2, (1, 3, 2, 0))),
    ],
)
def test_specs_that_lie_alike_need_no_edge(own: ArraySpec, wanted: ArraySpec) -> None:
    program = Program(
        "alike",
        (computation(wanted),),
        (Node(0, (ValueRef(-1, 0),)),),
        (own,),
        (Output(ValueRef(0, 0), own),),
    )
    plan = lower(program, BINDINGS)
    assert kinds(plan, "a0") == kinds(plan, "a1") == ["E"]


def test_hosts_that_only_pass_arrays_through_hear_of_the_run() -> None:
    a, b = lies(ROWS, 0), lies(PAIR, 3)
    program = Program("identity", (), (), (a, b, b), (Output(ValueRef(-1, 0), a),), (1,))
    plan = lower(program, BINDINGS)
    assert [(s.island, s.hosts, s.depends) for s in plan.segments] == [
        ("a", A_HOSTS, ()),
        ("b", ("b1",), ()),
    ]
    assert [host.host for host in plan.hosts] == ["a0", "a1", "b1"]
    assert instructions(plan, "a0") == [[]]
    assert instructions(plan, "b1") == [[Free((1,))]]
    assert plan.hosts[0].outputs == ((0, 0),)
    assert plan.hosts[2].inputs == (1, 2)
    assert lower(Program("nothing", (), (), (a,), ()), BINDINGS) == BoundProgram((), ())


def test_what_may_be_taken_over() -> None:
    a = lies(ROWS, 0)
    two = computation(a, inputs=2, donated=(0, 1))
    x, y, z = (ValueRef(-1, i) for i in range(3))

    def donated(
        *nodes: Node, outputs: tuple[ValueRef, ...] = (), given: tuple[int, ...] = (0, 1, 2)
    ):
        program = Program("p", (two,), nodes, (a,) * 3, tuple(Output(v, a) for v in outputs), given)
        first = instructions(lower(program, BINDINGS), "a0")[0]
        return [each.donated for each in first if isinstance(each, Execute)]

    assert donated(Node(0, (x, y))) == [(0, 1)]
    assert donated(Node(0, (x, y)), given=(1,)) == [(1,)]
    assert donated(Node(0, (x, x))) == [()]
    assert donated(Node(0, (x, y)), Node(0, (y, z))) == [(0,), (0, 1)]
    assert donated(Node(0, (x, y)), outputs=(x,)) == [(1,)]
    assert donated(Node(0, (x, y)), Node(0, (ValueRef(0, 0), z)), given=()) == [(), (0,)]


def test_a_buffer_that_one_host_still_needs_is_donated_by_none() -> None:
    everywhere, on_one_host = lies(REPLICATED, 0), lies(PAIR_REPLICATED, 0)
    taking = computation(everywhere, donated=(0,))
    program = Program(
        "uneven",
        (taking, computation(on_one_host)),
        (Node(0, (ValueRef(-1, 0),)), Node(1, (ValueRef(-1, 0),))),
        (everywhere,),
        (Output(ValueRef(0, 0), everywhere), Output(ValueRef(1, 0), on_one_host)),
        (0,),
    )
    plan = lower(program, BINDINGS)
    executes = [i for h in A_HOSTS for i in instructions(plan, h)[0] if isinstance(i, Execute)]
    assert [each.donated for each in executes] == [(), (), ()]
    check_run(program, plan, 0, strict=True)


def test_bindings_are_those_that_a_host_needs() -> None:
    a, b = lies(ROWS, 0), lies(PAIR, 3)
    program = Program("p", (computation(b),), (Node(0, (ValueRef(-1, 0),)),), (a,), ())
    named = {h.host: [b.slice for b in h.bindings] for h in lower(program, BINDINGS).hosts}
    assert named == {"a0": [0], "a1": [0], "b1": [0, 3]}


def rejected(called: Computation, *args: ValueRef, inputs: tuple[ArraySpec, ...] = ()) -> Program:
    return Program("wrong", (called,), (Node(0, args),), inputs, ())


TWICE = Placement(0, (0, 0))
OTHER_SHAPE = ArraySpec((8, 8), "float64", ROWS, Placement(0, (0, 1, 2, 3)))


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        (
            rejected(Computation("f", b"", TWICE, (), ())),
            PlacementError,
            "'f' .* are device 0 of its slice",
        ),
        (rejected(Computation("f", b"", Placement(0, ()), (), ())), PlacementError, "no device"),
        (rejected(Computation("f", b"", Placement(0, (4,)), (), ())), PlacementError, "device 4"),
        (
            rejected(
                Computation("f", b"", Placement(0, (0,)), (lies(ONE, 1),), ()),
                ValueRef(-1, 0),
                inputs=(lies(ONE, 1),),
            ),
            PlacementError,
            r"island a, but its input 0, float.*, lies on island b",
        ),
        (
            rejected(Computation("f", b"", Placement(0, (0,)), (), (lies(PAIR, 0),))),
            PlacementError,
            r"output 0, float.*, lies on other ones",
        ),
        (
            rejected(computation(lies(PAIR, 0, (0, 1, 2)))),
            PlacementError,
            "2 positions, but 3 devices",
        ),
        (
            rejected(computation(lies(PAIR, 0))),
            ArgumentError,
            "'f' takes 1 arguments, .* gives it 0",
        ),
        (
            rejected(computation(lies(PAIR, 0)), ValueRef(0, 0)),
            ArgumentError,
            "uses value 0.0 where it does not exist",
        ),
        (
            rejected(computation(lies(ROWS, 0)), ValueRef(-1, 0), inputs=(OTHER_SHAPE,)),
            ArgumentError,
            r"gets float64\[8, 8\] where it takes float64\[4, 8\]",
        ),
        (
            rejected(computation(lies(ONE, 9)), ValueRef(-1, 0), inputs=(lies(ONE, 9),)),
            KeyError,
            "9",
        ),
    ],
)
def test_a_program_that_cannot_run_says_why(
    program: Program, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_program(program)
        lower(program, BINDINGS)
