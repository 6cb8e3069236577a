"""Which slices move so that another one has room, or so that devices are shared evenly."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from pw.core import messages as msg
from pw.core.errors import InsufficientDevices
from pw.core.ids import CONTROL
from pw.core.sharding import DeviceAddress
from pw.sched.cluster.moves import PlannedMove
from tests.sched.test_shapes import Shapes, at


def request(*shape: int, devices: int = 0, **how: Any) -> msg.AllocateSlice:
    count = devices
    if shape:
        count = 1
        for size in shape:
            count *= size
    return msg.AllocateSlice(0, count, None, how.pop("island", None), shape or None, **how)


def carried_out(bench: Shapes, moves: tuple[PlannedMove, ...]) -> None:
    """Move slices as a client that is suspended and resumed does."""
    for move in moves:
        (piece,) = [
            one
            for island in bench.manager.inventory.islands.values()
            for one in bench.manager.slices.on(island)
            if one.request.slice == move.slice
        ]
        asked = msg.AllocateSlice(
            move.slice,
            piece.request.devices,
            None,
            piece.request.island,
            piece.request.topology,
            formerly=move.island,
            former_devices=move.devices,
            exclusive=piece.request.exclusive,
            waits=True,
        )
        bench.release(move.slice)
        bench.say(CONTROL, asked)
        assert bench.news(msg.SliceBound)[-1].devices == move.devices


def occupied(bench: Shapes) -> dict[str, Any]:
    islands = bench.manager.inventory.islands
    return {
        name: (dict(+one.bound), set(one.exclusive), dict(+one.promised))
        for name, one in islands.items()
    }


def plan(
    bench: Shapes, wanted: msg.AllocateSlice | None, sizes: Mapping[int, int]
) -> tuple[PlannedMove, ...]:
    """Plan, and look that a plan changes nothing."""
    before = occupied(bench)
    try:
        return bench.manager.plan_moves(wanted, sizes)
    finally:
        assert occupied(bench) == before


def test_the_block_with_the_fewest_bytes_is_left() -> None:
    bench = Shapes()
    bench.island("a", 2, 4)
    cells = {}
    for number in range(1, 9):
        cells[number] = at(bench.want(number, 1, 1, exclusive=True))[0]
    for number in (1, 3, 6, 8):
        bench.release(number)
    sizes = {2: 100, 4: 10, 5: 40, 7: 30}
    assert (2, 2) not in bench.free("a")
    moves = plan(bench, request(2, 2, exclusive=True), sizes)
    assert {move.slice for move in moves} == {4, 7}
    carried_out(bench, moves)
    assert len(at(bench.want(9, 2, 2, exclusive=True))) == 4
    with pytest.raises(InsufficientDevices, match="0 of 8 devices are free"):
        plan(bench, request(1, 2), sizes)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_moves_have_fewer_bytes(seed: int) -> None:
    random = Random(seed)
    bench = Shapes()
    bench.island("a", 3, 4)
    cells = {number: at(bench.want(number, 1, 1, exclusive=True))[0] for number in range(1, 13)}
    free = random.sample(range(1, 13), random.randint(4, 8))
    for number in free:
        bench.release(number)
    stay = set(random.sample(sorted(cells), 2)) - set(free)
    sizes = {n: random.choice((0, 1, 5, 20, 300)) for n in cells if n not in free and n not in stay}
    there = {cell: number for number, cell in cells.items() if number not in free}
    shape = random.choice(((2, 2), (3, 1), (1, 4), (1, 3)))
    least = None
    for rows, columns in {shape, shape[::-1]}:
        for row, column in itertools.product(range(4 - rows), range(5 - columns)):
            block = itertools.product(range(row, row + rows), range(column, column + columns))
            inside = [there[cell] for cell in block if cell in there]
            if all(number in sizes for number in inside):
                total = sum(sizes[number] for number in inside)
                least = total if least is None else min(total, least)
    if least is None:
        with pytest.raises(InsufficientDevices, match="nothing that may move would make room"):
            plan(bench, request(*shape, exclusive=True), sizes)
        return
    moves = plan(bench, request(*shape, exclusive=True), sizes)
    assert sum(sizes[move.slice] for move in moves) == least
    carried_out(bench, moves)
    assert at(bench.want(20, *shape, exclusive=True))


def test_devices_that_are_free_on_two_islands_come_together() -> None:
    bench = Shapes()
    for name in "abc":
        bench.island(name, 1, 4)
    for number, (island, devices) in enumerate(zip("aabbc", (2, 1, 1, 2, 4), strict=True), 1):
        bench.want(number, devices=devices, formerly=island, exclusive=True)
    assert {n: i.bound.total() for n, i in bench.manager.inventory.islands.items()} == {
        "a": 3,
        "b": 3,
        "c": 4,
    }
    sizes = {1: 1000, 2: 10, 3: 20, 4: 500, 5: 1}
    moves = plan(bench, request(devices=2, exclusive=True), sizes)
    assert [(move.slice, move.island) for move in moves] == [(2, "b")]
    with pytest.raises(InsufficientDevices):
        plan(bench, request(devices=3, exclusive=True), sizes)
    bench.release(5)
    assert plan(bench, request(devices=4, exclusive=True), sizes) == (), "island c is free"
    bench.want(6, devices=1, exclusive=True, island="c")
    moves = plan(bench, request(devices=4, exclusive=True), sizes | {6: 5})
    assert {move.slice for move in moves} == {3, 4}, "slice 6 names its island"


def test_slices_that_may_not_move_stay() -> None:
    bench = Shapes()
    bench.island("a", 1, 2)
    bench.island("b", 1, 1)
    for number in (1, 2):
        bench.want(number, devices=1, exclusive=True)
    with pytest.raises(InsufficientDevices, match="nothing that may move"):
        plan(bench, request(devices=2, exclusive=True), {})


def test_an_island_that_joined_gets_slices_with_few_bytes() -> None:
    bench = Shapes()
    bench.island("a", 1, 2)
    for number in range(1, 5):
        bench.want(number, devices=1)
    sizes = {1: 100, 2: 1, 3: 50, 4: 2}
    assert plan(bench, None, sizes) == ()
    bench.island("b", 1, 2)
    moves = plan(bench, None, sizes)
    assert [(move.slice, move.island) for move in moves] == [(2, "b"), (3, "b")], (
        "one of each device"
    )
    carried_out(bench, moves)
    assert plan(bench, None, sizes) == ()


def test_device_time_counts_before_the_number_of_slices() -> None:
    bench = Shapes()
    bench.island("a", 1, 2)
    bench.island("b", 1, 1)
    bound = {number: bench.want(number, devices=1, formerly="a") for number in (1, 2, 3)}
    both = [n for n in (1, 2, 3) if bound[n].devices == bound[1].devices]
    assert len(both) == 2
    bench.busy["a"] = {bound[1].devices[0]: 50.0}
    sizes = dict.fromkeys((1, 2, 3), 7)
    assert [(move.slice, move.island) for move in plan(bench, None, sizes)] == [(both[0], "b")]
    bench.busy["b"] = {DeviceAddress("b0", 0): 55.0}
    assert [(move.slice, move.island) for move in plan(bench, None, sizes)] == [(both[0], "a")]


def test_destinations_are_the_devices_that_slices_get_when_they_move() -> None:
    bench = Shapes()
    for name in "ab":
        bench.island(name, 2, 2)
    bench.want(1, 1, 2, island="a", exclusive=True)
    bench.want(2, 1, 1, island="a", exclusive=True)
    bench.want(3, 1, 1, island="b", exclusive=True)
    before = occupied(bench)
    places = bench.manager.destinations((1, 2), "b")
    assert occupied(bench) == before
    assert {place.slice for place in places} == {1, 2}
    devices = [device for place in places for device in place.devices]
    assert len(set(devices)) == 3
    (one,) = bench.manager.destinations((2,), "b", places[1].devices)
    assert one.devices == places[1].devices
    assert one.epoch == bench.manager.inventory.islands["b"].epoch
    assert not bench.manager.destinations((1,), "c")
    assert not bench.manager.destinations((99,), "b")
    for place, shape in zip(places, ((1, 2), (1, 1)), strict=True):
        bench.release(place.slice)
        bound = bench.want(place.slice, *shape, island="b", exclusive=True)
        assert bound.devices == place.devices
