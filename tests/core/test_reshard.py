"""Any sharding becomes any other: every element once, from the nearest replica."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.core.errors import ShardingError
from pw.core.programs.plan import BoxCopy, Route
from pw.core.programs.reshard import plan_routes, route_layout
from pw.core.sharding import ArraySpec, Box, DeviceAddress, Placement, Sharding, dtype_of
from tests.stages.layouts import divisible_shape, pack, shardings, shards, unpack
from tests.stages.samples import examples

Devices = tuple[DeviceAddress, ...]

REPLICATED = Sharding(("x",), (4,))
SPLIT = Sharding(("x",), (4,), (("x",),))


def machine(hosts: int, devices_per_host: int, name: str = "h") -> Devices:
    return tuple(
        DeviceAddress(f"{name}{host}", ordinal)
        for host in range(hosts)
        for ordinal in range(devices_per_host)
    )


def spec_of(sharding: Sharding, shape: tuple[int, ...], dtype: str = "float32") -> ArraySpec:
    return ArraySpec(shape, dtype, sharding, Placement(0, tuple(range(sharding.device_count))))


def part(box: Box, inner: Box) -> Box:
    """`inner`, relative to `box`, in the coordinates that `box` is in."""
    return tuple(
        (start + low, start + high) for (start, _), (low, high) in zip(box, inner, strict=True)
    )


def moved(array: np.ndarray, source: ArraySpec, destination: ArraySpec, routes: tuple[Route, ...]):
    """Carry the routes out on numpy arrays; the shards, and how often each element was written."""
    held = dict(enumerate(shards(array, source)))
    shape = destination.sharding.shard_shape(destination.shape)
    positions = range(len(destination.placement.devices))
    result = {position: np.zeros(shape, array.dtype) for position in positions}
    written = {position: np.zeros(shape, int) for position in positions}
    for route in routes:
        unpack(route, source, pack(route, source, held), result, written)
    return result, written


@st.composite
def moves(draw: st.DrawFn) -> tuple[ArraySpec, ArraySpec, Devices, Devices]:
    ndim = draw(st.integers(0, 4))
    sides = [draw(shardings(ndim, (1, 2, 3, 4, 6, 8, 12))) for _ in range(2)]
    shape = divisible_shape(draw, ndim, *sides)
    dtype = draw(st.sampled_from(["int8", "int32", "float64", "bfloat16"]))
    pool = machine(draw(st.sampled_from([1, 2, 3, 4])), 12)
    places = [draw(st.permutations(pool))[: side.device_count] for side in sides]
    if draw(st.booleans()):
        places[1] = (*places[0], *(d for d in places[1] if d not in places[0]))
    source, destination = (spec_of(side, shape, dtype) for side in sides)
    return source, destination, tuple(places[0]), tuple(places[1][: sides[1].device_count])


@settings(max_examples=examples(300))
@given(moves())
def test_any_layout_becomes_any_other(move: tuple[ArraySpec, ArraySpec, Devices, Devices]) -> None:
    source, destination, here, there = move
    array = np.arange(np.prod(source.shape, dtype=int)).reshape(source.shape)
    array = (array % 127).astype(dtype_of(source.dtype))
    routes = plan_routes(source, destination, here, there)
    result, written = moved(array, source, destination, routes)
    for position, expected in enumerate(shards(array, destination)):
        np.testing.assert_array_equal(result[position], expected)
        assert (written[position] == 1).all()


@settings(max_examples=examples(300))
@given(moves())
def test_the_nearest_replica_gives_and_nothing_crosses_twice(
    move: tuple[ArraySpec, ArraySpec, Devices, Devices],
) -> None:
    source, destination, here, there = move
    routes = plan_routes(source, destination, here, there)
    assert routes == plan_routes(source, destination, here, there)
    pairs = [(route.source_host, route.destination_host) for route in routes]
    assert len(set(pairs)) == len(pairs)
    assert {receiver for _, receiver in pairs} == {device.host for device in there}
    holders = defaultdict(set)
    for position, device in enumerate(here):
        holders[source.box(position)].add(device)
    arrived = defaultdict(set)
    for route in routes:
        for piece in route.pieces:
            sender = here[piece.source_device]
            receivers = {there[position] for position in piece.destination_devices}
            replicas = holders[source.box(piece.source_device)]
            assert sender.host == route.source_host
            assert {receiver.host for receiver in receivers} == {route.destination_host}
            if sender not in receivers:
                assert not receivers & replicas, "a device that holds the box must take its own"
            if sender.host != route.destination_host:
                assert route.destination_host not in {device.host for device in replicas}
                carried = part(source.box(piece.source_device), piece.source_box)
                assert carried not in arrived[route.destination_host]
                arrived[route.destination_host].add(carried)


def test_equal_boxes_move_as_one_whole_shard() -> None:
    here, there = machine(2, 2, "a"), machine(2, 2, "b")
    spec = spec_of(SPLIT, (8, 3))
    whole = ((0, 2), (0, 3))
    routes = plan_routes(spec, spec, here, there)
    assert [(r.source_host, r.destination_host) for r in routes] == [("a0", "b0"), ("a1", "b1")]
    assert routes[0].pieces == (BoxCopy(0, whole, (0,), whole), BoxCopy(1, whole, (1,), whole))
    assert route_layout(routes[0], spec) == ((0, 64), 64 + 24)


def test_one_copy_serves_all_devices_of_a_host() -> None:
    routes = plan_routes(
        spec_of(SPLIT, (4,)), spec_of(REPLICATED, (4,)), machine(4, 1, "a"), machine(1, 4, "b")
    )
    assert [route.pieces for route in routes] == [
        (BoxCopy(index, ((0, 1),), (0, 1, 2, 3), ((index, index + 1),)),) for index in range(4)
    ]


def test_replica_hosts_share_the_work() -> None:
    receivers = 8
    routes = plan_routes(
        spec_of(REPLICATED, (receivers,)),
        spec_of(Sharding(("x",), (receivers,), (("x",),)), (receivers,)),
        machine(4, 1, "a"),
        machine(receivers, 1, "b"),
    )
    assert sorted(r.source_host for r in routes) == [f"a{i}" for i in range(4) for _ in range(2)]


def test_hundreds_of_devices_make_no_more_pieces_than_overlaps() -> None:
    grid = Sharding(("x", "y"), (32, 32), (("x",), ("y",)))
    turned = Sharding(("x", "y"), (32, 32), (("y",), ("x",)))
    flat = Sharding(("x",), (1024,), ((), ("x",)))
    here, there = machine(128, 8, "a"), machine(128, 8, "b")
    for destination, pieces in ((grid, 1024), (turned, 1024), (flat, 32 * 1024)):
        routes = plan_routes(
            spec_of(grid, (2048, 2048)), spec_of(destination, (2048, 2048)), here, there
        )
        assert sum(len(route.pieces) for route in routes) == pieces


def test_an_empty_array_still_travels() -> None:
    here, there = machine(1, 4, "a"), machine(2, 2, "b")
    routes = plan_routes(spec_of(SPLIT, (0, 4)), spec_of(REPLICATED, (0, 4)), here, there)
    assert [r.destination_host for r in routes] == ["b0", "b1"]
    assert route_layout(routes[0], spec_of(SPLIT, (0, 4))) == ((0,), 0)


@pytest.mark.parametrize("other", [spec_of(SPLIT, (8,)), spec_of(SPLIT, (4,), "int32")])
def test_moving_changes_neither_shape_nor_dtype(other: ArraySpec) -> None:
    with pytest.raises(ShardingError, match="by moving it"):
        plan_routes(spec_of(SPLIT, (4,)), other, machine(1, 4), machine(1, 4))
