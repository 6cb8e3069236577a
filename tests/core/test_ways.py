"""The planner chooses the way of each edge; all ways give the values that plain JAX gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import pw
from pw.core import platforms
from pw.core.costs import ACCELERATOR, CPU
from pw.core.errors import ArgumentError
from pw.core.platforms import platform_of
from pw.core.programs.lower import lower
from pw.core.programs.physical import Physical
from pw.core.programs.program import Computation, Kind, Node, Output, Program, ValueRef
from pw.core.programs.program_checks import check_program
from pw.core.programs.ways import EdgeWay, Way, edges_of, reshard, reshard_of, written
from pw.core.sharding import ArraySpec, Binding, DeviceAddress, Placement, Sharding
from pw.testing import InProcessCluster
from tests.core.test_lower import BINDINGS, check_reporters, check_shape, programs
from tests.stages.interpreter import apply
from tests.stages.samples import examples

MIB = 1 << 20
P = jax.sharding.PartitionSpec
KEEN_COSTS = CPU._replace(
    wire_byte_s=1e-3, stage_byte_s=1e-3, collective_byte_s=1e-6, compile_s=0.0, least_bytes=0
)
KEEN = platform_of("cpu")._replace(costs=KEEN_COSTS)
"""A platform on which everything goes another way than by transfers, if there is one."""


@pytest.fixture
def keen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", KEEN)
    monkeypatch.setitem(platforms.PLATFORMS, "", KEEN)


def binding(number: int, hosts: int = 4, platform: str = "cpu", machine: str = "") -> Binding:
    island = "abcdefghij"[number]
    devices = tuple(DeviceAddress(f"{island}{host}", 0) for host in range(hosts))
    return Binding.of(number, island, devices, platform, machine)


def lies(mib: float, slice_: int, *split: int, hosts: int = 4) -> ArraySpec:
    """Return a spec over a slice whose dimensions in `split` are divided, the others not."""
    axes = tuple(("x",) if dimension in split else () for dimension in range(2))
    shape = (64, round(mib * MIB / 4 / 64))
    sharding = Sharding(("x",), (hosts,), axes)
    return ArraySpec(shape, "float32", sharding, Placement(slice_, tuple(range(hosts))))


def step(spec: ArraySpec) -> Computation:
    return Computation("step", b"", spec.placement, (spec,), (spec,))


def chosen(program: Program, *bindings: Binding) -> tuple[list[EdgeWay], Program]:
    by_slice = {one.slice: one for one in bindings}
    physical = Physical(program, by_slice)
    edges = edges_of(program, physical)
    whole = written(program, edges)
    check_shape(lower(whole, by_slice, physical))
    assert edges_of(program, Physical(program, by_slice)) == edges, "the choice is a function"
    return edges, whole


def edge(source: ArraySpec, destination: ArraySpec, *bindings: Binding) -> EdgeWay:
    """Return the way of a result of one computation to the next one."""
    nodes = (Node(0, (ValueRef(-1, 0),)), Node(1, (ValueRef(0, 0),)))
    program = Program(
        "p",
        (step(source), step(destination)),
        nodes,
        (source,),
        (Output(ValueRef(1, 0), destination),),
    )
    (found,), _ = chosen(program, *bindings)
    return found


@pytest.mark.parametrize(
    ("mib", "source", "destination", "platform", "way"),
    [
        (16, (), (0,), "cpu", Way.TRANSFERS),
        (16, (), (1,), "cpu", Way.SLICES),
        (0.01, (), (0,), "cpu", Way.TRANSFERS),
        (16, (0,), (), "cpu", Way.TRANSFERS),
        (16, (0,), (1,), "cpu", Way.TRANSFERS),
        (16, (0,), (), "tpu", Way.COLLECTIVE),
        (16, (0,), (1,), "tpu", Way.COLLECTIVE),
        (0.01, (0,), (), "tpu", Way.TRANSFERS),
    ],
)
def test_re_shards_in_one_island(
    mib: float, source: tuple[int, ...], destination: tuple[int, ...], platform: str, way: Way
) -> None:
    there = binding(0, platform=platform, machine="m")
    found = edge(lies(mib, 0, *source), lies(mib, 0, *destination), there)
    assert found.way is way
    assert found.estimates[way] == min(found.estimates.values())


def test_slices_of_the_same_devices_are_one_place() -> None:
    other = Binding.of(1, "a", binding(0).devices, "cpu")
    assert edge(lies(16, 0), lies(16, 1, 1), binding(0), other).way is Way.SLICES
    turned = Binding.of(1, "a", binding(0).devices[::-1], "cpu")
    assert edge(lies(16, 0), lies(16, 1, 1), binding(0), turned).way is Way.TRANSFERS


def test_a_move_is_worth_less_compiling_than_a_step() -> None:
    moved = Program("pw.put", (), (), (lies(16, 0),), (Output(ValueRef(-1, 0), lies(16, 0, 1)),))
    (found,), _ = chosen(moved, binding(0))
    assert found.way is Way.TRANSFERS
    assert Way.SLICES in found.estimates


@pytest.mark.parametrize(("mib", "way"), [(0.01, Way.TRANSFERS), (64, Way.SPREAD)])
def test_a_large_value_for_all_hosts_of_an_island_is_spread(mib: float, way: Way) -> None:
    there = binding(1, 8, "tpu")
    source, destination = lies(mib, 0, hosts=1), lies(mib, 1, hosts=8)
    found = edge(source, destination, binding(0, 1, "tpu"), there)
    assert found.way is way


@pytest.mark.parametrize(
    ("mib", "machine", "parents"),
    [(64, "", [0, 0, 1, 0, 1, 2, 3]), (0.01, "", [0] * 7), (64, "m", [0] * 7)],
    ids=["large", "small", "one machine"],
)
def test_islands_pass_a_large_value_on(mib: float, machine: str, parents: list[int]) -> None:
    bindings = [binding(number, 1, "cpu", machine) for number in range(8)]
    specs = [lies(mib, number, hosts=1) for number in range(8)]
    outputs = tuple(Output(ValueRef(-1, 0), spec) for spec in specs[1:])
    edges, whole = chosen(Program("p", (), (), (specs[0],), outputs), *bindings)
    assert [specs.index(one.via or specs[0]) for one in edges] == parents
    passing = [whole.computations[node.computation].placement.slice for node in whole.nodes]
    assert sorted(passing) == sorted(set(parents) - {0})


def test_only_transfers() -> None:
    source, destination = lies(256, 0), lies(256, 0, 0)
    program = Program("p", (), (), (source,), (Output(ValueRef(-1, 0), destination),))
    edges = edges_of(program, Physical(program, {0: binding(0)}), only_transfers=True)
    assert [one.way for one in edges] == [Way.TRANSFERS]
    assert written(program, edges) is program


def test_what_xla_would_do_by_copying_the_whole_array_is_left_to_transfers() -> None:
    def grid(*axes: tuple[str, ...]) -> ArraySpec:
        return ArraySpec(
            (8, 8), "int8", Sharding(("x", "y"), (2, 2), axes), Placement(0, (0, 1, 2, 3))
        )

    assert reshard_of(grid(("x",), ("y",)), grid(("y",), ("x",))) is None
    assert reshard_of(grid(("x", "y")), grid(("y", "x"))) is None
    assert reshard_of(grid(("x", "y")), grid(("x",), ("y",))) is Way.COLLECTIVE
    assert reshard_of(grid(("x", "y")), grid(("x",))) is Way.COLLECTIVE
    assert reshard_of(grid(("x",)), grid(("x", "y"))) is Way.SLICES


def test_clients_make_no_re_shards() -> None:
    spec = lies(1, 0)
    program = Program("p", (reshard(spec, spec),), (), (spec,), ())
    with pytest.raises(ArgumentError, match="only the controller"):
        check_program(program)


def test_guards_and_counts_must_exist() -> None:
    """Otherwise lowering would fail in the controller, and not only for this client."""
    spec, nothing = lies(1, 0), ValueRef(-1, 3)
    call = Computation("f", b"", spec.placement, (spec,), (spec,))
    given = ValueRef(-1, 0)

    def check(node: Node, counts: ValueRef | None = None) -> None:
        output = Output(ValueRef(0, 0), spec, counts)
        check_program(Program("p", (call,), (node,), (spec,), (output,)))

    check(Node(0, (given,)))
    for node, words in (
        (Node(0, (given,), nothing), "does not exist"),
        (Node(0, (given,), ValueRef(0, 0)), "does not exist"),
        (Node(0, (given,), given), "no scalar boolean"),
        (Node(0, (given,), counted=((0, nothing),)), "does not exist"),
        (Node(0, (given,), counted=((1, given),)), "an argument that it does not have"),
    ):
        with pytest.raises(ArgumentError, match=words):
            check(node)
    with pytest.raises(ArgumentError, match="does not exist"):
        check(Node(0, (given,)), nothing)


def _results(program: Program, inputs: list[np.ndarray]) -> list[np.ndarray]:
    values = {(-1, number): value for number, value in enumerate(inputs)}
    for number, node in enumerate(program.nodes):
        called = program.computations[node.computation]
        given = [values[arg.node, arg.index] for arg in node.args]
        same = called.kind is Kind.RESHARD
        for index, value in enumerate(given if same else apply(given, len(called.outputs))):
            values[number, index] = value
    return [values[output.value.node, output.value.index] for output in program.outputs]


@settings(max_examples=examples(60))
@given(programs())
def test_every_program_computes_the_same(program: Program) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(platforms.PLATFORMS, "", KEEN)
        physical = Physical(program, BINDINGS)
        edges = edges_of(program, physical)
        whole = written(program, edges)
    plan = lower(whole, BINDINGS, physical)
    assert plan == lower(whole, BINDINGS), "it has only specs that are checked"
    check_shape(plan)
    check_reporters(whole, plan)
    inputs = [np.full((), number, float) for number, _ in enumerate(program.inputs)]
    for mine, other in zip(_results(whole, inputs), _results(program, inputs), strict=True):
        np.testing.assert_array_equal(mine, other)
    for node in whole.nodes:
        for arg, wanted in zip(node.args, whole.computations[node.computation].inputs, strict=True):
            given_ = whole.spec_of(arg)
            assert (given_.shape, given_.dtype) == (wanted.shape, wanted.dtype)


def test_accelerators_have_costs_of_their_own() -> None:
    assert platform_of("cuda").costs is platform_of("tpu").costs is ACCELERATOR
    assert platform_of("gpu").costs is ACCELERATOR, "devices of cuda call themselves so"


# --- on devices -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=4, devices_per_island=2) as cluster:
        yield cluster


def mesh_of(island: int) -> pw.Mesh:
    slices = pw.make_virtual_device_set()
    return pw.Mesh(np.array(slices.add_slice(devices=2, island=f"island-{island}").devices), ("x",))


@pytest.mark.usefixtures("cluster", "keen")
def test_arrays_are_re_sharded_by_xla() -> None:
    mesh = mesh_of(0)
    value = np.arange(64 * 6, dtype=np.float32).reshape(64, 6)
    shardings = [pw.NamedSharding(mesh, spec) for spec in (P(), P("x"), P(None, "x"))]
    for source, destination in itertools.permutations(shardings, 2):
        array = pw.put(value, sharding=source)
        moved = pw.put(array, sharding=destination)
        assert moved.sharding == destination
        np.testing.assert_array_equal(pw.get(moved), value)
        np.testing.assert_array_equal(pw.get(array), value)
        way = "slices" if source is shardings[0] else "collective"
        assert pw.plan("pw.put").edges[0].way == way


@pytest.mark.usefixtures("cluster", "keen")
def test_a_program_goes_all_ways_and_gives_what_jax_gives() -> None:
    meshes = [mesh_of(island) for island in range(4)]
    first = pw.jit(lambda x: x * 2, mesh=meshes[0], out_shardings=P("x"))
    receivers = [
        pw.jit(lambda x: x + 1, mesh=mesh, in_shardings=(P(),), out_shardings=P("x"))
        for mesh in meshes
    ]

    @pw.program
    def step(x: pw.Array) -> list[pw.Array]:
        y = first(x)
        return [take(y) for take in receivers]

    value = np.arange(32, dtype=np.float32)
    for result in step(value):
        np.testing.assert_array_equal(pw.get(result), value * 2 + 1)
    plan = pw.plan(step)
    assert [one.way for one in plan.edges] == ["collective", "transfers", "transfers", "relay"]
    assert plan == pw.plan("step")
    assert "relay" in repr(plan)
    assert {segment.island for segment in plan.segments} == {f"island-{n}" for n in range(4)}


@pytest.mark.usefixtures("cluster")
def test_what_has_no_plan() -> None:
    with pytest.raises(ArgumentError, match="called 'no-such-program'"):
        pw.plan("no-such-program")
    with pytest.raises(ArgumentError, match="once"):
        pw.plan(pw.jit(lambda x: x))
