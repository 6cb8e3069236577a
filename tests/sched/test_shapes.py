"""Slices with a shape, exclusive slices, and placement by load, as the resource manager does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pw.core import messages as msg
from pw.core.coordinates import parse_coordinates
from pw.core.ids import CONTROL, RESOURCES, SERVICES, executor_of, session_of
from pw.core.sharding import DeviceAddress
from pw.core.waits import MOVE_S
from pw.sched.cluster.epochs import REJOIN_S
from pw.sched.cluster.fitting import STEP_S
from pw.sched.cluster.manager import ResourceManager
from pw.sched.cluster.slices import RESUME_S
from tests.sched.test_resources import Bench
from tests.stages.actors import TICKETS, Services, World


class Shapes(Bench):
    """Islands whose hosts have coordinates."""

    def __init__(self) -> None:
        self.world = World()
        self.busy: dict[str, Mapping[DeviceAddress, float]] = {}
        self.manager: ResourceManager = self.world.add(
            RESOURCES,
            lambda env: ResourceManager(
                env, TICKETS.public, busy=lambda island: self.busy.get(island, {})
            ),
        )
        self.world.add(SERVICES, Services)

    def place(self, node: str, island: str, hosts: int, devices: int, at: str, **how: Any) -> Any:
        """Register a host with coordinates; returns what it is told."""
        coords = parse_coordinates(at, devices)
        place = msg.RegisterHost(
            island, hosts, devices, "cpu", f"at {node}", 7, coords=coords, **how
        )
        self.say(executor_of(node), place)
        return next(iter(self.world.to(executor_of(node))[-1:]), None)

    def placed(
        self, name: str, *blocks: str, devices: int = 4, wraps: tuple[int, ...] = ()
    ) -> None:
        for rank, at in enumerate(blocks):
            self.place(f"{name}{rank}", name, len(blocks), devices, at, wraps=wraps)
        for rank in range(len(blocks)):
            self.joined(f"{name}{rank}", 1, devices, name)

    def want(self, number: int, *shape: int, devices: int = 0, **how: Any) -> Any:
        """Ask for a slice; returns the answer."""
        count = devices
        if shape:
            count = 1
            for size in shape:
                count *= size
        topology = shape or None
        island = how.pop("island", None)
        self.say(CONTROL, msg.AllocateSlice(number, count, None, island, topology, **how))
        answers = [*self.news(msg.SliceBound), *self.news(msg.SliceRefused)]
        mine = [one for one in self.world.to(CONTROL) if one in answers and one.slice == number]
        return mine[-1] if mine else None

    def release(self, number: int) -> None:
        self.say(CONTROL, msg.ReleaseSlice(number))

    def again(self, island: str, *hosts: str, devices: int = 4) -> None:
        """Have hosts join the newest epoch."""
        for host in hosts:
            self.joined(host, self.manager.inventory.islands[island].epoch, devices, island)

    def free(self, island: str) -> tuple[tuple[int, ...], ...]:
        (info,) = [one for one in self.manager.status({}) if one.name == island]
        return info.free_blocks


def at(bound: Any) -> list[tuple[int, ...]]:
    assert isinstance(bound, msg.SliceBound), bound
    return list(bound.coords)


def refused(answer: Any, *words: str) -> None:
    assert isinstance(answer, msg.SliceRefused), answer
    for each in words:
        assert each in answer.error.message


@pytest.mark.parametrize(
    "shape",
    [*((4, 1), (1, 4), (4,), (2, 1), (2, 2), (4, 2), (2, 4), (1, 1, 4), (2, 2, 2), (2, 1, 4))],
    ids=str,
)
def test_two_hosts_of_four_devices_have_these_shapes(shape: tuple[int, ...]) -> None:
    bench = Shapes()
    bench.island("a", 2, 4)
    bound = bench.want(1, *shape)
    assert len(set(at(bound))) == len(bound.devices)
    assert bound.topology == shape


@pytest.mark.parametrize("shape", [(8,), (8, 1), (3, 2), (2, 5), (9, 1)], ids=str)
def test_what_is_too_large_says_how_large_the_grid_is(shape: tuple[int, ...]) -> None:
    bench = Shapes()
    bench.island("a", 2, 4)
    words = "a is a grid of 2x4, which is too small" if shape != (3, 2) else "2x4"
    answer = bench.want(1, *shape)
    if shape == (3, 2):
        assert len(set(at(answer))) == 6, "it lies turned"
    else:
        refused(answer, words)


def test_the_axes_of_a_shape_lie_along_those_of_the_grid() -> None:
    bench = Shapes()
    bench.placed("a", "0,0:2x2", "0,2:2x2")
    assert at(bench.want(1, 2, 4)) == [(a, b) for a in range(2) for b in range(4)]
    assert at(bench.want(2, 4, 2)) == [(b, a) for a in range(4) for b in range(2)]


def test_blocks_go_around_the_end_only_where_it_is_declared() -> None:
    ring, row = Shapes(), Shapes()
    ring.placed("a", "0:4", "4:4", wraps=(8,))
    row.placed("a", "0:4", "4:4")
    for bench in (ring, row):
        bench.want(1, 6, exclusive=True)
        bench.want(2, 2, exclusive=True)
        bench.release(1)
        assert at(bench.want(3, 1, exclusive=True)) == [(0,)]
        bench.release(2)
        bench.release(3)
        bench.want(4, devices=1, hosts=("a0",), exclusive=True)
        bench.want(5, 2, exclusive=True)
        bench.release(4)
    assert at(ring.want(6, 6, exclusive=True)) == [(3,), (4,), (5,), (6,), (7,), (0,)]
    words = "free blocks are 5, 1; in the block of 6 at (2), slices have device"
    refused(row.want(6, 6, exclusive=True), words)


def test_exclusive_slices_share_with_no_slice() -> None:
    bench = Shapes()
    bench.island("a", 2, 4)
    bench.want(1, 2, 2, exclusive=True)
    assert at(bench.want(2, 2, 2, exclusive=True)) == [(0, 2), (0, 3), (1, 2), (1, 3)]
    refused(bench.want(3, devices=1), "a: 0 of 8 devices are free", "exclusive slices have")
    bench.release(1)
    assert bench.free("a") == ((2, 2),)
    bench.want(4, devices=1)
    refused(bench.want(5, 2, 2, exclusive=True), "free blocks are")
    refused(
        bench.want(6, devices=4, exclusive=True),
        "4 devices that no other slice has",
        "slices have device 0 of a0, device 2 of a0, device 3 of a0, device 2 of a1 and 1 more",
    )
    assert len(at(bench.want(7, devices=4))) == 4
    reader = bench.want(8, devices=4, like=2)
    assert reader.devices == bench.news(msg.SliceBound)[1].devices, "a slice like it may share"
    (info,) = bench.manager.status({})
    assert (info.grid, info.exclusive, info.free_blocks) == ((2, 4), 4, ())


def test_devices_of_an_exclusive_slice_stay_its_own_when_its_island_is_formed_again() -> None:
    bench = Shapes()
    bench.island("a", 2, 4)
    first = bench.want(1, 2, 2, exclusive=True)
    like = bench.want(2, devices=2, like=1)
    other = bench.want(3, devices=4)
    bench.lose("a1")
    bench.host("a0", "a", 2, 4, spare=True)
    bench.host("a1", "a", 2, 4, spare=True)
    bench.again("a", "a0", "a1")
    again = {one.slice: one.devices for one in bench.news(msg.SliceBound)[3:]}
    assert again == {1: first.devices, 2: like.devices, 3: other.devices}


def test_a_slice_moves_to_a_block_of_its_shape() -> None:
    bench = Shapes()
    bench.island("a", 2, 4)
    bench.island("b", 4, 2)
    bench.want(1, 2, 4, island=None)
    moved = bench.news(msg.SliceBound)[-1].island
    other = "b" if moved == "a" else "a"
    bench.lose(f"{moved}0")
    bench.world.wait(MOVE_S + 1)
    bound = bench.news(msg.SliceBound)[-1]
    grid = {"a": (2, 4), "b": (4, 2)}[other]
    assert (bound.island, bound.topology) == (other, (2, 4))
    places = [(a, b) for a in range(2) for b in range(4)]
    assert at(bound) == (places if grid == (2, 4) else [(b, a) for a, b in places])


def test_a_drain_counts_the_room_for_all_exclusive_slices_together() -> None:
    bench = Shapes()
    bench.island("a", 1, 4)
    bench.want(1, 2, exclusive=True)
    bench.want(2, 2, exclusive=True)
    bench.island("b", 1, 3)
    island = bench.manager.inventory.islands["a"]
    assert bench.manager.slices.stuck_on(island) == 1
    assert not +bench.manager.inventory.islands["b"].bound


def test_a_spare_at_another_place_breaks_blocks_and_not_slices_without_a_shape() -> None:
    bench = Shapes()
    bench.placed("a", "0:2", "2:2", devices=2)
    bench.want(1, 3)
    bench.want(2, devices=3)
    bench.want(3, 2)
    bench.place("s", "a", 0, 2, "9:2", spare=True)
    bench.lose("a1")
    bench.place("a0", "a", 2, 2, "0:2", spare=True)
    bench.world.wait(REJOIN_S + 1)
    assert bench.manager.inventory.islands["a"].ranks == ["a0", "s"]
    bench.again("a", "a0", "s", devices=2)
    (answer,) = bench.news(msg.SliceRefused)
    assert answer.slice == 1
    refused(answer, "a is a grid of 11", "in which no block of 3 is without a hole")
    before, after = bench.news(msg.SliceBound)[1:3], bench.news(msg.SliceBound)[3:]
    moved = {(2,): (9,), (3,): (10,)}
    for one, other in zip(before, after, strict=True):
        assert at(other) == [moved.get(place, place) for place in at(one)]


def test_a_host_is_not_drained_if_its_spare_would_break_a_block() -> None:
    bench = Shapes()
    bench.placed("a", "0:2", "2:2", devices=2)
    bench.want(1, 3)
    bench.host("s", "a", 0, 2, spare=True)
    bench.say(CONTROL, msg.DrainHost(5, "a1", "client"))
    (answer,) = bench.world.to(session_of("client"), msg.Answered)
    assert "spare host s has other coordinates, without which 1 slice" in answer.error.message
    island = bench.manager.inventory.islands["a"]
    assert island.state == "ready", "nothing was drained"
    spare = bench.manager.inventory.spares["s"]
    assert bench.manager.slices.displaced_by(spare, "a1", island) == 1
    bench.release(1)
    assert not bench.manager.slices.displaced_by(spare, "a1", island)


@pytest.mark.parametrize("place", [((0, 1), (1, 1)), ((5, 1), (6, 1))], ids=["same", "other"])
def test_a_spare_whose_coordinates_jax_will_tell_does_not_hinder_a_drain(place: Any) -> None:
    """What is at its place stays; a spare elsewhere breaks blocks, as where a host is lost."""
    bench = Shapes()
    places = {"a0": ((0, 0), (1, 0)), "a1": ((0, 1), (1, 1)), "s": place}

    def joined(node: str, epoch: int) -> None:
        answer = msg.IslandJoined("a", epoch, "kind", 2, None, places[node])
        bench.say(executor_of(node), answer)

    for node in ("a0", "a1"):
        bench.host(node, "a", 2, 2)
    for node in ("a0", "a1"):
        joined(node, 1)
    block = bench.want(1, 2, 2)
    row = bench.want(2, 2, exclusive=False)
    assert at(block) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    bench.host("s", "a", 0, 2, spare=True)
    bench.say(CONTROL, msg.DrainHost(5, "a1", "client"))
    assert not bench.world.to(session_of("client"), msg.Answered), "it is drained"
    bench.host("a0", "a", 2, 2)
    bench.host("a1", "a", 2, 2)
    for node in ("a0", "s"):
        joined(node, 2)
    again = bench.news(msg.SliceBound)[2:]
    if place == places["a1"]:
        assert [(one.slice, at(one)) for one in again] == [(1, at(block)), (2, at(row))]
        assert not bench.news(msg.SliceRefused)
    else:
        (answer,) = bench.news(msg.SliceRefused)
        assert (answer.slice, [one.slice for one in again]) == (1, [2])
        refused(answer, "no block of 2x2 is without a hole")


def test_the_least_busy_devices_are_chosen_and_of_equal_ones_those_with_the_fewest_slices() -> None:
    bench = Shapes()
    bench.island("a", 1, 4)
    bench.busy["a"] = {DeviceAddress("a0", n): s for n, s in enumerate((50.0, 0.0, STEP_S, 0.1))}
    assert at(bench.want(1, devices=2)) == [(0, 1), (0, 3)]
    assert at(bench.want(2, devices=1)) == [(0, 1)], "no device is less busy, and both have a slice"
    assert at(bench.want(3, devices=1)) == [(0, 3)]
    assert at(bench.want(4, 2)) == [(0, 1), (0, 2)]
    bench.island("b", 1, 4)
    assert bench.want(5, devices=4).island == "b"
    bench.busy["b"] = {DeviceAddress("b0", n): 60.0 for n in range(4)}
    assert bench.want(6, devices=4).island == "a", "all devices of the other one are busier"


def test_another_controller_gives_a_slice_its_former_devices() -> None:
    bench = Shapes()
    bench.island("a", 1, 4)
    former = (DeviceAddress("a0", 2), DeviceAddress("a0", 3))
    how: dict[str, Any] = {"resumed": True, "formerly": "a", "former_devices": former}
    assert bench.want(1, 2, exclusive=True, **how).devices == former
    assert bench.want(2, devices=2, **how | {"former_devices": ()}).devices == (
        DeviceAddress("a0", 0),
        DeviceAddress("a0", 1),
    )
    assert bench.want(3, 2, exclusive=True, **how) is None, "its devices have another slice"
    bench.release(1)
    assert bench.news(msg.SliceBound)[-1].slice == 3
    assert bench.want(4, 2, exclusive=True, **how) is None
    bench.world.wait(MOVE_S + RESUME_S + 1)
    (answer,) = bench.news(msg.SliceRefused)
    assert answer.slice == 4


@pytest.mark.parametrize(
    ("at_", "how", "words"),
    [
        ("", {}, "host a0 has coordinates and host a1 has none; give each its --coords"),
        ("0,1:1x2", {}, "hosts a0 and a1 both have a device at (0, 1)"),
        ("4:2", {}, "coordinates of host a0 have 2 numbers, and those of host a1 have 1"),
        ("1,0:1x2", {"wraps": (2, 0)}, "host a0 has another --wrap than host a1"),
    ],
)
def test_hosts_whose_coordinates_do_not_go_together_are_rejected(
    at_: str, how: dict[str, Any], words: str
) -> None:
    bench = Shapes()
    bench.place("a0", "a", 2, 2, "0,0:1x2")
    answer = bench.place("a1", "a", 2, 2, at_, **how)
    assert isinstance(answer, msg.HostRejected)
    assert words in answer.error.message


def test_a_host_with_coordinates_among_those_without_is_rejected() -> None:
    bench = Shapes()
    bench.host("a0", "a", 2, 2)
    answer = bench.place("a1", "a", 2, 2, "0:2")
    assert isinstance(answer, msg.HostRejected)
    assert "host a1 has coordinates and host a0 has none" in answer.error.message


def test_a_spare_at_the_place_of_a_host_waits_until_that_is_lost() -> None:
    bench = Shapes()
    bench.placed("a", "0:2", "2:2", devices=2)
    bench.want(1, 4)
    assert isinstance(bench.place("s", "a", 0, 2, "2:2", spare=True), msg.Directory)
    bench.lose("a1")
    bench.place("a0", "a", 2, 2, "0:2", spare=True)
    bench.world.wait(REJOIN_S + 1)
    bench.again("a", "a0", "s", devices=2)
    assert at(bench.news(msg.SliceBound)[-1]) == [(0,), (1,), (2,), (3,)]
    assert isinstance(bench.place("a1", "a", 2, 2, "2:2", spare=True), msg.Directory)
    assert "a1" in bench.manager.inventory.spares


def test_coordinates_of_jax_are_taken_where_they_differ() -> None:
    places: tuple[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]], ...] = (
        ("a", ((0, 0, 0), (1, 0, 0)), (2, 2, 1)),
        ("b", ((0, 0, 0), (0, 0, 1)), (2, 2)),  # both hosts say the same: these are no coordinates
    )
    for name, coords, sizes in places:
        bench = Shapes()
        bench.host("a0", "a", 2, 2)
        bench.host("a1", "a", 2, 2)
        for rank in range(2):
            own = tuple((x, y + rank * (name == "a"), z) for x, y, z in coords)
            joined = msg.IslandJoined("a", 1, "kind", 2, None, own)
            bench.say(executor_of(f"a{rank}"), joined)
        (info,) = bench.manager.status({})
        assert info.grid == sizes
        assert len(at(bench.want(1, 2, 2))) == 4
