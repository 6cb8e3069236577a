"""Programs of views: what is refused, what hosts get of them, and what schedulers count for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pw.client.connection.views import KEPT, Views
from pw.core.errors import ArgumentError, PlacementError, ShardingError
from pw.core.programs.lower import lower, lower_with_memory
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.programs.program_checks import check_program
from pw.core.programs.views import view_program
from pw.core.sharding import ArraySpec, Binding, DeviceAddress, Placement, Sharding
from pw.devices.host.program import HostProgram
from pw.sched.island.memory import DeviceMemory


def on_one(spec: ArraySpec, position: int) -> ArraySpec:
    """The spec of one shard of `spec` as an array of its own."""
    place = Placement(spec.placement.slice, (spec.placement.devices[position],))
    shape = spec.sharding.shard_shape(spec.shape)
    return ArraySpec(shape, spec.dtype, Sharding(("_",), (1,), ()), place)


def stacked(spec: ArraySpec, devices: Sequence[int]) -> ArraySpec:
    """The spec of arrays like `spec`, one on each of the devices, side by side in dimension 0."""
    place, count = Placement(spec.placement.slice, tuple(devices)), len(devices)
    shape = (count * spec.shape[0], *spec.shape[1:])
    return ArraySpec(shape, spec.dtype, Sharding(("_",), (count,), (("_",),)), place)


def lying(
    devices: Sequence[int], shape: tuple[int, ...] = (8,), dtype: str = "float32"
) -> ArraySpec:
    """An array split over these devices of slice 1."""
    return ArraySpec(
        shape, dtype, Sharding(("x",), (len(devices),), (("x",),)), Placement(1, tuple(devices))
    )


FOUR = lying((0, 1, 2, 3))
PIECES = tuple(on_one(FOUR, at) for at in range(4))


@pytest.mark.parametrize(
    ("inputs", "outputs", "shards", "kind", "words"),
    [
        ([FOUR], [], [], ArgumentError, "no outputs"),
        ([FOUR], [PIECES[1]], [[(0, 0)]], PlacementError, "lies on device 0; a view moves nothing"),
        (
            [FOUR],
            [msgspec.structs.replace(PIECES[0], memory="pinned_host")],
            [[(0, 0)]],
            PlacementError,
            "in pinned_host, and input 0, .*, in that of its devices; a view moves nothing",
        ),
        ([lying((0,), (2,), "int32")], [PIECES[0]], [[(0, 0)]], ShardingError, r"int32\[2\]"),
        ([FOUR], [lying((0,), (4,))], [[(0, 0)]], ShardingError, r"shards of float32\[4\]"),
        ([FOUR], [PIECES[0]], [[(1, 0)]], ShardingError, "there are 1 inputs"),
        ([FOUR], [PIECES[0]], [[(0, 4)]], ShardingError, "which has 4 shards"),
        ([FOUR], [PIECES[0]], [[(0, -1)]], ShardingError, "which has 4 shards"),
        ([FOUR], [FOUR], [[(0, 0)]], ShardingError, "has 4 shards, and 1 are named"),
        ([FOUR], [FOUR], [], ShardingError, "makes 1 arrays, and names the shards of 0"),
        ([FOUR], [lying((0, 1, 2), (8,))], [[(0, 0)] * 3], ShardingError, "does not divide"),
        (
            [ArraySpec((2,), "float32", Sharding((), ()), Placement(2, (0,)))],
            [PIECES[0]],
            [[(0, 0)]],
            PlacementError,
            "another slice",
        ),
    ],
)
def test_a_wrong_view_is_refused(
    inputs: Any, outputs: Any, shards: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        view_program(inputs, outputs, shards)


HOSTS = Binding.of(1, "i", tuple(DeviceAddress(f"h{n // 2}", n % 2) for n in range(4)))


def test_a_host_makes_its_part_alone_and_compiles_nothing() -> None:
    body = view_program([FOUR], PIECES[2:], [[(0, 2)], [(0, 3)]])
    plan = lower(body, {1: HOSTS})
    assert [part.host for part in plan.hosts] == ["h1"], "h0 has none of the results"
    both = view_program([FOUR], [FOUR], [[(0, at) for at in range(4)]])
    plan = lower(both, {1: HOSTS})
    assert [segment.reporters for segment in plan.segments] == [2], "each host for itself"
    for part in plan.hosts:
        program = HostProgram.of(1, 1, both, part)
        assert (program.keys, program.gangs) == ((None,), set())


def test_a_view_is_a_program_of_its_own() -> None:
    view = view_program([FOUR], [FOUR], [[(0, at) for at in range(4)]])
    doubled = Computation("doubled", b"digest", FOUR.placement, (FOUR,), (FOUR,))
    mixed = Program(
        "mixed",
        (*view.computations, doubled),
        (*view.nodes, Node(1, (ValueRef(0, 0),))),
        (FOUR,),
        (Output(ValueRef(1, 0), FOUR),),
    )
    with pytest.raises(ArgumentError, match="'mixed' makes a view and does something else"):
        check_program(mixed)


class Counted:
    """The device memory of an island of four devices, each with 100 bytes."""

    def __init__(self) -> None:
        self.memory = DeviceMemory("i", 100)
        self.programs = itertools.count(1)

    def program(self, body: Program) -> int:
        _, (needs,) = lower_with_memory(body, {1: HOSTS})
        number = next(self.programs)
        self.memory.install(number, body.name, needs)
        return number

    def view(
        self, sources: Sequence[int], given: Sequence[ArraySpec], made: Any, shards: Any, *ids: int
    ) -> None:
        claim = self.memory.reserve(self.program(view_program(given, made, shards)), sources, ids)
        assert claim
        self.memory.end(claim)

    @property
    def used(self) -> list[int]:
        return [self.memory.used_bytes(device) for device in HOSTS.devices]


def computing(spec: ArraySpec, donates: bool = False) -> Program:
    taken = (0,) if donates else ()
    one = Computation("f", b"digest", spec.placement, (spec,), (spec,), taken)
    output = Output(ValueRef(0, 0), spec)
    return Program("f", (one,), (Node(0, (ValueRef(-1, 0),)),), (spec,), (output,), taken)


APART: Any = ([FOUR], PIECES, [[(0, at)] for at in range(4)])


def test_a_shard_counts_once_until_the_last_array_that_names_it_is_gone() -> None:
    counted = Counted()
    counted.memory.place(1, HOSTS.devices, 8)
    counted.view([1], *APART, 2, 3, 4, 5)
    counted.view([2, 3], PIECES[:2], [stacked(PIECES[0], (0, 1))], [[(0, 0), (1, 0)]], 6)
    assert counted.used == [8, 8, 8, 8]
    counted.memory.release(1)
    assert counted.used == [8, 8, 8, 8]
    counted.memory.release(4)
    assert counted.used == [8, 8, 0, 8], "nothing names the shard on device 2"
    counted.memory.release(2)
    assert counted.used == [8, 8, 0, 8]
    counted.memory.release(6)
    assert counted.used == [0, 8, 0, 8]
    counted.memory.release(3)
    counted.memory.release(5)
    assert counted.used == [0, 0, 0, 0]


def test_a_view_of_a_result_in_flight_is_part_of_its_reservation() -> None:
    counted = Counted()
    counted.memory.place(1, HOSTS.devices, 8)
    maker = counted.memory.reserve(counted.program(computing(FOUR)), (1,), (2,))
    assert maker
    counted.view([2], *APART, 3, 4, 5, 6)
    counted.memory.release(2)
    counted.memory.release(3)
    assert counted.used == [16, 16, 16, 16]
    counted.memory.end(maker)
    assert counted.used == [8, 16, 16, 16], "the view of device 0 is gone"
    for array in (1, 4, 5, 6):
        counted.memory.release(array)
    assert counted.used == [0, 0, 0, 0]


def test_a_donation_of_a_viewed_array_needs_room_for_a_copy() -> None:
    counted = Counted()
    counted.memory.place(1, HOSTS.devices, 40)
    forty = lying((0, 1, 2, 3), (40,))
    counted.view([1], [forty], [forty], [[(0, at) for at in range(4)]], 2)
    claim = counted.memory.reserve(counted.program(computing(forty, donates=True)), (2,), (3,))
    assert claim
    assert counted.used == [80] * 4
    counted.memory.end(claim)
    assert counted.used == [80] * 4
    counted.memory.release(1)
    assert counted.used == [40] * 4


def test_the_programs_of_views_are_registered_once_and_released_when_unused() -> None:
    registered: list[Program] = []
    released: list[int] = []

    def register(program: Program, artifacts: object) -> int:
        assert not artifacts
        registered.append(program)
        return len(registered)

    views = Views(register, lambda program, args, results: [program], released.append)
    specs = [lying((0,), (size,)) for size in range(1, KEPT + 3)]
    for spec in (*specs[:KEPT], specs[0], *specs[KEPT:]):
        views.view([(1, spec)], [spec], [[(0, 0)]])
    assert len(registered) == KEPT + 2
    assert released == [2, 3], "the first was used again"
