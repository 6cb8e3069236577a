"""Devices that have failed their test: islands go on without them, as the resource manager does it."""

from __future__ import annotations

from typing import Any

from pw.core import messages as msg
from pw.core.ids import CONTROL
from pw.core.waits import MOVE_S
from pw.sched.cluster.slices import RESUME_S
from tests.sched.test_shapes import Shapes, refused


class Failing(Shapes):
    """Islands with devices that fail."""

    def fail(self, node: str, *ordinals: int) -> None:
        """Say that these devices of a host have failed, and all others are well."""
        sick = tuple(msg.SickDevice(at, msg.SickState.FAILED, "wrong bits") for at in ordinals)
        self.say(CONTROL, msg.DevicesFailed(node, sick))

    def devices(self, number: int) -> list[tuple[str, int]]:
        """Return the devices that a slice has."""
        bound = [one for one in self.news(msg.SliceBound) if one.slice == number]
        return [(device.host, device.ordinal) for device in bound[-1].devices]

    def info(self, name: str) -> msg.IslandInfo:
        """Return the status of an island."""
        (info,) = [one for one in self.manager.status({}) if one.name == name]
        return info


def test_no_slice_gets_a_failed_device_and_no_epoch_ends_without_a_slice_on_it() -> None:
    bench = Failing()
    bench.island("a", 2, 4)
    assert bench.want(1, devices=1)
    bench.fail("a1", 2)
    assert not bench.news(msg.EpochEnded)
    bench.want(2, devices=7)
    assert ("a1", 2) not in bench.devices(2)
    refused(bench.want(3, devices=8), "device 2 of host a1 has failed its test (wrong bits)")
    refused(bench.want(4, devices=8), "pw-worker --spare", "drain a1", "pw doctor --devices")
    refused(bench.want(5, devices=8), "a (cpu, 8 devices on 2 hosts, 1 of them left out)")
    assert (bench.info("a").devices, bench.info("a").left_out) == (7, 1)
    assert "failed" not in bench.want(6, devices=9).error.message, "it would not fit a well island"


def test_a_slice_with_a_failed_device_gets_another_and_the_rest_stay() -> None:
    bench = Failing()
    bench.island("a", 2, 4)
    bench.want(1, devices=2)
    bench.want(2, devices=2)
    before = bench.devices(2)
    assert bench.devices(1) == [("a0", 0), ("a0", 1)]
    bench.fail("a0", 1)
    (ended,) = bench.news(msg.EpochEnded)
    assert "device 1 of host a0 has failed its test (wrong bits)" in ended.error.message
    assert all(bench.told(f"a{rank}", msg.LeaveIsland) for rank in range(2))
    bench.island("a", 2, 4, epoch=2)
    assert bench.devices(2) == before
    assert len(bench.devices(1)) == 2
    assert ("a0", 1) not in bench.devices(1)
    assert not bench.news(msg.SliceRefused)


def test_a_slice_without_room_moves_to_another_island() -> None:
    bench = Failing()
    bench.island("a", 1, 2)
    bench.want(1, devices=2)
    bench.island("b", 1, 2)
    bench.fail("a0", 0)
    bench.island("a", 1, 2, epoch=2)
    assert bench.devices(1) == [("b0", 0), ("b0", 1)]


def test_a_slice_that_fits_nowhere_is_refused_with_the_device() -> None:
    bench = Failing()
    bench.island("a", 1, 2)
    bench.want(1, devices=2)
    bench.fail("a0", 0)
    assert not bench.news(msg.SliceRefused), "its island has yet to be formed again"
    bench.island("a", 1, 2, epoch=2)
    (answer,) = bench.news(msg.SliceRefused)
    refused(answer, "device 0 of host a0 has failed its test (wrong bits)")


def one_waits() -> Failing:
    """An island of three devices, of which one has failed: slice 1 waits for the one that slice 2 has."""
    bench = Failing()
    bench.island("a", 1, 3)
    bench.want(1, devices=2, exclusive=True)
    bench.want(2, devices=1, exclusive=True)
    bench.fail("a0", 0)
    bench.island("a", 1, 3, epoch=2)
    return bench


def test_a_slice_waits_for_devices_that_others_keep() -> None:
    bench = one_waits()
    bench.release(2)
    assert bench.devices(1) == [("a0", 1), ("a0", 2)]
    bench.fail("a0", 0, 1)
    bench.island("a", 1, 3, epoch=3)
    refused(bench.news(msg.SliceRefused)[-1], "devices 0, 1 of host a0 have failed their test")


def test_a_slice_that_waits_in_vain_is_refused_with_the_device() -> None:
    bench = one_waits()
    bench.world.wait(MOVE_S + RESUME_S + 1)
    (answer,) = bench.news(msg.SliceRefused)
    refused(answer, "slices have device 2 of a0", "device 0 of host a0 has failed its test")


def test_a_device_that_passes_a_test_may_be_used_again() -> None:
    bench = Failing()
    bench.island("a", 1, 2)
    bench.fail("a0", 0)
    refused(bench.want(1, devices=2))
    assert bench.want(2, devices=2, waits=True) is None
    bench.fail("a0")
    assert bench.devices(2) == [("a0", 0), ("a0", 1)]
    assert not bench.news(msg.EpochEnded)
    assert bench.info("a").left_out == 0


def test_a_device_that_passes_while_its_island_is_away_stays_with_its_slice() -> None:
    bench = Failing()
    bench.island("a", 1, 2)
    bench.want(1, devices=1)
    before = bench.devices(1)
    bench.fail("a0", 0)
    bench.fail("a0")
    bench.island("a", 1, 2, epoch=2)
    assert bench.devices(1) == before


def test_a_device_that_fails_while_its_island_is_formed_is_left_out_of_the_new_epoch() -> None:
    bench = Failing()
    bench.island("a", 2, 2)
    bench.want(1, devices=2)
    bench.lose("a1")
    for rank in range(2):
        bench.host(f"a{rank}", "a", 2, 2)
    bench.fail("a0", 0)
    assert len(bench.news(msg.EpochEnded)) == 1
    bench.again("a", "a0", "a1", devices=2)
    assert ("a0", 0) not in bench.devices(1)


def test_blocks_have_no_failed_device() -> None:
    bench = Failing()
    bench.island("a", 2, 4)
    bench.fail("a0", 1)
    bench.want(1, 2, 2)
    assert bench.devices(1) == [("a0", 2), ("a0", 3), ("a1", 2), ("a1", 3)]
    assert bench.free("a") == ((2, 1), (1, 1))
    bench.want(2, 4)
    assert bench.devices(2) == [("a1", at) for at in range(4)]
    bench.fail("a1", 1)
    bench.island("a", 2, 4, epoch=2)
    (answer,) = bench.news(msg.SliceRefused)
    refused(
        answer, "device 1 of host a0 has failed its test", "device 1 of host a1 has failed its test"
    )
    assert "hole" not in answer.error.message
    assert bench.devices(1) == [("a0", 2), ("a0", 3), ("a1", 2), ("a1", 3)]


def test_a_slice_that_names_a_host_is_refused_with_the_host_and_its_device() -> None:
    bench = Failing()
    bench.island("a", 2, 2)
    bench.want(1, devices=2, hosts=("a1",))
    bench.fail("a1", 1)
    bench.island("a", 2, 2, epoch=2)
    (answer,) = bench.news(msg.SliceRefused)
    refused(answer, "no island has 2 devices on a1", "device 1 of host a1 has failed its test")
    bench.want(2, devices=1, hosts=("a1",))
    assert bench.devices(2) == [("a1", 0)]
    bench.want(3, devices=2, hosts=("a0",))
    assert bench.devices(3) == [("a0", 0), ("a0", 1)]


def test_a_slice_on_the_devices_of_another_goes_where_that_goes() -> None:
    bench = Failing()
    bench.island("a", 1, 4)
    bench.want(1, devices=2)
    bench.want(2, devices=1, like=1)
    bench.fail("a0", 1)
    bench.island("a", 1, 4, epoch=2)
    assert bench.devices(1) == [("a0", 0), ("a0", 2)]
    assert bench.devices(2) == [("a0", 0)]


def test_a_well_spare_replaces_the_host_and_one_that_has_failed_does_not() -> None:
    bench = Failing()
    bench.island("a", 2, 2)
    bench.want(1, devices=4)
    bench.fail("s", 0)
    bench.host("s", "a", 0, 2, spare=True)
    bench.fail("a0", 1)
    assert bench.manager.inventory.draining == {}
    bench.island("a", 2, 2, epoch=2)
    refused(bench.news(msg.SliceRefused)[-1], "device 1 of host a0 has failed its test")
    bench.host("t", "a", 0, 2, spare=True)
    bench.fail("a0", 0, 1)
    assert bench.manager.inventory.draining.keys() == {"a0"}
    assert bench.manager.inventory.islands["a"].ranks == ["t", "a1"]
    assert bench.manager.inventory.islands["a"].failed_positions() == []


def test_the_failed_devices_of_a_host_are_not_those_of_the_spare_in_its_place() -> None:
    bench = Failing()
    bench.placed("a", "0:2", "2:2", "10:2", devices=2)
    bench.want(1, 3)
    bench.place("s", "a", 0, 2, "12:2", spare=True)
    bench.fail("a1", 0)
    assert bench.manager.inventory.draining.keys() == {"a1"}
    for node, place in (("a0", "0:2"), ("a2", "10:2")):
        bench.place(node, "a", 3, 2, place)
    bench.place("a1", "a", 3, 2, "2:2")
    bench.again("a", "a0", "a2", "s", devices=2)
    assert bench.devices(1) == [("a2", 0), ("a2", 1), ("s", 0)]


def test_moves_make_no_room_on_failed_devices() -> None:
    bench = Failing()
    bench.island("a", 2, 4)
    bench.want(1, devices=1, exclusive=True)
    bench.fail("a1", 3)
    wanted: Any = msg.AllocateSlice(9, 4, None, None, (2, 2), exclusive=True)
    bench.want(2, 1, 1, exclusive=True)
    moves = bench.manager.plan_moves(wanted, {1: 1, 2: 1})
    assert all((one.host, one.ordinal) != ("a1", 3) for move in moves for one in move.devices)
