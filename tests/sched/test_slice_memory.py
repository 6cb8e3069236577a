"""What a slice may have on a device: where it is placed, and that its runs and arrays never take more."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import pw
from pw.core import messages as msg
from pw.core.ids import CONTROL, client_id, executor_of
from pw.core.messages.checks import objection
from pw.core.programs.lower import lower_with_memory
from pw.core.programs.peak import IslandMemory
from pw.core.programs.program import Output, Program, ValueRef
from pw.core.sharding import Binding
from pw.processes.daemons import LocalDaemon
from pw.sched.island.admission import PATIENCE
from pw.sched.island.lent_memory import LentMemory
from pw.sched.island.memory import DeviceMemory
from pw.testing.in_process import InProcessCluster
from tests.sched.test_memory import DEVICE, OTHER, MemoryBench, donating, needs
from tests.sched.test_residency import TierBench
from tests.sched.test_shapes import Shapes, refused
from tests.stages.actors import World
from tests.stages.daemons import until
from tests.stages.scripted import chain, join, split
from tests.stages.scripts import finish, start_client

MIB = 1 << 20
SLICE, OTHER_SLICE = client_id(1, 900), client_id(2, 900)


# --- what a run takes on a slice ---------------------------------------------------------------------


def test_what_a_run_takes_on_a_slice_is_that_of_its_values_there() -> None:
    """Two slices share one device: the run holds an array of each, one after the other."""
    bindings = {number: Binding.of(number, "a", (DEVICE,)) for number in (1, 2)}
    here, there = split(1, 1), split(2, 1)
    program = msgspec.structs.replace(chain([here, there, there]), donated=(0,))
    (memory,) = lower_with_memory(program, bindings, None, ("a",), (2,))[1]
    assert [part.slice for part in memory.slices] == [2]
    (part,) = memory.slices
    assert (part.inputs, part.donated, len(part.outputs)) == ((), (), 1)
    assert memory.outputs[0].slice == 2
    assert max(part.peaks()) == 2 * here.shard_bytes, "the value of stage 1, and that of stage 2"
    assert max(part.peaks((0, 0, 100))) == 2 * here.shard_bytes + 100
    assert max(part.peaks((100, 0, 0))) == 2 * here.shard_bytes, "stage 0 runs on the other slice"


def test_a_result_that_another_slice_computes_counts_on_its_own() -> None:
    """Slices with the same devices: the bytes do not move."""
    bindings = {number: Binding.of(number, "a", (DEVICE,)) for number in (1, 2)}
    program = chain([split(1, 1)])
    output = msgspec.structs.replace(program.outputs[0], spec=split(2, 1))
    program = msgspec.structs.replace(program, outputs=(output,))
    (memory,) = lower_with_memory(program, bindings, None, ("a",), (1, 2))[1]
    sizes = {part.slice: max(part.peaks()) for part in memory.slices}
    assert sizes == {1: split(1, 1).shard_bytes, 2: split(2, 1).shard_bytes}


def test_a_result_that_hosts_watch_counts_while_its_other_devices_compute_on() -> None:
    """The first stage is the last one on the other device, so its host watches the result."""
    both, one = split(1, 2), split(2, 1)
    bindings = {1: Binding.of(1, "a", (DEVICE, OTHER)), 2: Binding.of(2, "a", (DEVICE,))}
    (memory,) = lower_with_memory(chain([both, one]), bindings, None, ("a",))[1]
    peaks = dict(zip(memory.groups, memory.peaks(), strict=True))
    assert peaks[(OTHER,)] == both.shard_bytes
    assert peaks[(DEVICE,)] == both.shard_bytes + 2 * one.shard_bytes, "all three values"


def test_an_island_that_counts_nothing_counts_slices_with_a_bound() -> None:
    bindings = {number: Binding.of(number, "a", (DEVICE,)) for number in (1, 2)}
    program = chain([split(1, 1), split(2, 1)])
    assert lower_with_memory(program, bindings, None, ())[1] == ()
    (memory,) = lower_with_memory(program, bindings, None, (), (1,))[1]
    assert (memory.inputs, memory.outputs) == ((0,), ())
    assert memory.peaks() == memory.slices[0].peaks()


def test_a_host_value_that_is_donated_or_returned_counts_for_its_run() -> None:
    """No buffer has counted it before."""
    bindings = {1: Binding.of(1, "a", (DEVICE,))}
    spec = split(1, 1)
    donates = donating(msgspec.structs.replace(chain([spec]), donated=(0,)))
    returns = Program("p", (), (), (spec,), (Output(ValueRef(-1, 0), spec),))
    for body in (donates, returns):
        memory = DeviceMemory("i", 100)
        (needs_of_it,) = lower_with_memory(body, bindings, None, ("a",), (1,))[1]
        memory.bound_slice(1, 100)
        memory.install(1, "p", needs_of_it)
        claim = memory.reserve(1, (bytes(spec.shard_bytes),), (9,))
        assert claim is not None
        assert [int(total.used.max()) for total in memory.totals] == [spec.shard_bytes] * 2
        assert memory.reserve(1, (bytes(spec.shard_bytes),), (10,)) is None
        memory.end(claim)
        memory.settle()
        assert [int(total.used.max()) for total in memory.totals] == [spec.shard_bytes] * 2
        assert memory.programs[1].largest_bytes == spec.shard_bytes


# --- one scheduler -----------------------------------------------------------------------------------


def on_slice(memory: IslandMemory, slice_: int = SLICE) -> IslandMemory:
    """The same needs, all of them on a slice with a bound."""
    outputs = tuple(msgspec.structs.replace(one, slice=slice_) for one in memory.outputs)
    part = msgspec.structs.replace(memory, outputs=(), slice=slice_)
    return msgspec.structs.replace(memory, outputs=outputs, slices=(part,))


class SliceBench(MemoryBench):
    """A scheduler; a slice of client 1 may have 50 bytes of a device, which has a limit or none."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(2, capacity_bytes)
        self.bound(50)

    def bound(self, memory_bytes: int, slice_: int = SLICE) -> None:
        self.tell(msg.BoundMemory(slice_, memory_bytes))

    def put(self, array: int, size_bytes: int, slice_: int = SLICE, **how: Any) -> None:
        placed = msg.ArrayPlaced(array, (DEVICE,), size_bytes, slice=slice_, **how)
        self.tell(placed, msg.UploadEnded(array))

    def release(self, array: int) -> None:
        self.tell(msg.Release(array >> 40, (array,), (("h0",),), late=False))

    def refused_uploads(self) -> dict[int, Any]:
        return {one.array: one.error for one in self.world.to(CONTROL, msg.UploadRefused)}

    @property
    def has(self) -> int:
        """Bytes on the slice."""
        self.memory.settle()
        total = self.memory.totals.by_slice[SLICE]
        return int(total.used.max(initial=0))


@pytest.mark.parametrize("capacity_bytes", [None, 100])
def test_a_run_waits_for_memory_of_its_slice_and_no_other_does(capacity_bytes: Any) -> None:
    bench = SliceBench(capacity_bytes)
    first = bench.run(bench.program(1, on_slice(needs(30))))
    second = bench.run(bench.program(1, on_slice(needs(30))))
    other = bench.run(bench.program(2, needs(60)))
    assert bench.launched() == [first.run, other.run]
    assert bench.has == 30
    bench.end(bench.launches()[0])
    assert bench.launched() == [first.run, other.run, second.run]
    assert not bench.refused()


def test_without_a_limit_only_what_lies_on_slices_with_a_bound_is_counted() -> None:
    bench = SliceBench()
    bench.put(client_id(1, 5), 20)
    bench.put(client_id(1, 6), 1000, OTHER_SLICE)
    bench.run(bench.program(2, None))
    assert (bench.has, bench.used) == (20, 20)
    assert client_id(1, 6) not in bench.memory.buffers


def test_nothing_is_counted_where_nothing_has_a_bound() -> None:
    bench = MemoryBench(1, None)
    assert bench.scheduler.admission.memory is None
    bench.tell(msg.BoundMemory(SLICE, 0))
    assert bench.scheduler.admission.memory is None


def test_a_run_that_its_slice_can_never_have_is_refused_with_the_numbers() -> None:
    bench = SliceBench()
    array = client_id(1, 5)
    bench.put(array, 20)
    bench.run(bench.program(1, on_slice(needs(40, inputs=1))), array)
    (error,) = [one.error for one in bench.refused()]
    assert error.kind == "OutOfDeviceMemory"
    for words in (
        "needs 60 B on device 0 of host h0",
        "20 B of it for its arguments",
        "slice 900 of this client (add_slice(memory=)) may have 50 B on each device",
        "ask for a slice with more memory",
    ):
        assert words in error.message


def test_a_run_is_refused_when_nothing_of_its_client_makes_room_though_others_go_on() -> None:
    bench = SliceBench(1000)
    array = client_id(1, 5)
    bench.put(array, 30)
    bench.run(bench.program(2, needs(10)))
    running = bench.run(bench.program(1, on_slice(needs(10))))
    bench.run(bench.program(1, on_slice(needs(40))))
    assert not bench.refused(), "the other run on the slice may make room"
    bench.end(next(one for one in bench.launches() if one.run == running.run))
    (one,) = bench.refused()
    assert "where slice 900 of this client (add_slice(memory=)) has 30 B and may have 50 B" in (
        one.error.message
    )
    assert "pw-worker --spill" in one.error.message
    assert one.holders == ((array, 30),)


def test_results_and_temporaries_count_for_the_slice() -> None:
    bench = SliceBench()
    result = client_id(1, 9)
    bench.run(bench.program(1, on_slice(needs(30, outputs=(30,)))), results=(result,))
    bench.end(bench.launches()[0])
    assert bench.has == 30
    waits = bench.run(bench.program(1, on_slice(needs(30))))
    assert [one.run for one in bench.refused()] == [waits.run]
    bench.tell(msg.CancelRun(waits.run))
    bench.release(result)
    assert bench.run(bench.program(1, on_slice(needs(50)))).run in bench.launched()
    other = bench.program(1, on_slice(needs(0)))
    bench.memory.add_temporaries(other, (20,))
    assert bench.memory.reserve(other, (), ()) is None, "temporaries count, too"


def test_a_run_on_two_slices_needs_room_on_both() -> None:
    bench = SliceBench()
    second = client_id(1, 901)
    bench.bound(20, second)
    both = on_slice(needs(60))
    both = msgspec.structs.replace(
        both,
        slices=tuple(
            msgspec.structs.replace(
                both.slices[0], slice=slice_, peak_bytes=(size,), executes=((0, 0, size),)
            )
            for slice_, size in ((SLICE, 40), (second, 20))
        ),
    )
    program = bench.program(1, both)
    first = bench.run(program)
    bench.run(program)
    assert bench.launched() == [first.run]
    totals = bench.memory.totals.by_slice
    assert [int(totals[one].used[0]) for one in (SLICE, second)] == [40, 20]
    bench.end(bench.launches()[0])
    bench.end(bench.launches()[1])
    assert [int(totals[one].used[0]) for one in (SLICE, second)] == [0, 0]
    assert bench.used == 0


def test_an_upload_waits_for_its_slice_and_runs_wait_for_it() -> None:
    bench = SliceBench()
    running = bench.run(bench.program(1, on_slice(needs(40))))
    array = client_id(1, 5)
    bench.put(array, 30)
    assert (bench.has, bench.used) == (40, 70), "its bytes are there, whatever the slice may have"
    reader = bench.run(bench.program(1, on_slice(needs(1, inputs=1))), array)
    assert bench.launched() == [running.run]
    bench.end(bench.launches()[0])
    assert bench.launched() == [running.run, reader.run]
    assert (bench.has, bench.used) == (31, 31)
    assert not bench.refused_uploads()


def test_an_upload_is_refused_when_nothing_makes_room_or_it_never_fits() -> None:
    bench = SliceBench()
    first, second, huge = (client_id(1, number) for number in (5, 6, 7))
    bench.put(first, 30)
    bench.put(second, 30)
    bench.put(huge, 51)
    errors = bench.refused_uploads()
    assert errors.keys() == {second, huge}
    assert {one.kind for one in errors.values()} == {"OutOfDeviceMemory"}
    assert "slice 900 of this client (add_slice(memory=)) has 30 B and may" in (
        errors[second].message
    )
    for array in (first, second, huge):
        bench.release(array)
    assert (bench.has, bench.used) == (0, 0)


def test_an_upload_is_refused_though_its_client_goes_on_elsewhere() -> None:
    """Runs of the client on other slices may free memory of this one, but only for so long."""
    bench = SliceBench(1000)
    bench.put(client_id(1, 5), 40)
    elsewhere = bench.program(1, needs(1))
    bench.run(elsewhere, awaits=(client_id(1, 77),))
    bench.put(client_id(1, 6), 30)
    runs = [bench.run(elsewhere) for _ in range(2 * PATIENCE)]
    bench.tell(msg.UploadEnded(client_id(1, 77)))
    ended = 0
    while not bench.refused_uploads():
        bench.end(bench.launches()[ended])
        ended += 1
    assert ended <= len(runs)


def test_what_recovery_brings_back_counts_whatever_the_slice_may_have() -> None:
    bench = SliceBench()
    bench.put(client_id(1, 5), 80, is_back=True)
    assert bench.has == 80
    assert not bench.refused_uploads()


def test_a_lease_has_no_more_room_than_its_slice() -> None:
    bench = SliceBench(1000)
    program = bench.program(1, on_slice(needs(2)))
    room = LentMemory(bench.memory, 1, (program,), 256)
    assert room.widen()
    assert room.granted_bytes == 25, "half of what the slice has left"
    claim = room.launched(program, (), ())
    assert (bench.has, bench.used) == (25, 25)
    bench.memory.end(claim)
    room.end()
    assert (bench.has, bench.used) == (0, 0)


def test_a_slice_that_is_given_back_bounds_nothing_and_nothing_stays_counted() -> None:
    bench = SliceBench(100)
    running = bench.run(bench.program(1, on_slice(needs(40))))
    waits = bench.run(bench.program(1, on_slice(needs(30))))
    late = client_id(1, 5)
    bench.put(late, 30)
    bench.bound(0)
    assert bench.launched() == [running.run, waits.run]
    for launch in bench.launches():
        bench.end(launch)
    bench.release(late)
    assert bench.used == 0
    assert not bench.memory.totals.by_slice
    bench.bound(50)
    bench.tell(msg.RemoveClient(1))
    assert not bench.memory.totals.by_slice
    assert not bench.scheduler.admission.are_bounds_short


def test_arrays_of_a_slice_leave_for_its_own_runs() -> None:
    bench = TierBench()
    bench.tell(msg.BoundMemory(SLICE, 50))
    mine, other = client_id(1, 5), client_id(1, 6)
    bench.tell(msg.ArrayPlaced(other, (DEVICE,), 10), msg.UploadEnded(other))
    bench.tell(msg.ArrayPlaced(mine, (DEVICE,), 40, slice=SLICE), msg.UploadEnded(mine))
    run = bench.run(bench.program(1, on_slice(needs(30))))
    assert bench.spills() == [(mine,)], "the other one would make no room on the slice"
    bench.spilled(mine)
    assert bench.launched() == [run.run]
    assert list(bench.world.to(executor_of("h0"), msg.Spill))
    assert not bench.refused()


# --- placement ---------------------------------------------------------------------------------------


class Memories(Shapes):
    """Islands whose devices have a limit."""

    def island_of(self, name: str, devices: int, memory_bytes: int | None, epoch: int = 1) -> None:
        if epoch == 1:
            self.host(f"{name}0", name, 1, devices)
        joined = msg.IslandJoined(name, epoch, "kind", devices, memory_bytes)
        self.say(executor_of(f"{name}0"), joined)

    def again_with(self, name: str, memory_bytes: int, epoch: int) -> dict[int, str]:
        """An island of one host comes back; return where slices are bound that were bound meanwhile."""
        before = len(self.news(msg.SliceBound))
        self.lose(f"{name}0")
        self.host(f"{name}0", name, 1, 1)
        self.island_of(name, 1, memory_bytes, epoch)
        return {one.slice: one.island for one in self.news(msg.SliceBound)[before:]}


def test_bounds_of_slices_on_a_device_add_up_to_its_limit_at_most() -> None:
    bench = Memories()
    bench.island_of("a", 2, 100)
    first = bench.want(1, devices=1, memory_bytes=60)
    second = bench.want(2, devices=1, memory_bytes=60)
    assert set(first.devices).isdisjoint(second.devices)
    third = bench.want(3, devices=1, memory_bytes=40)
    refused(
        bench.want(4, devices=2, memory_bytes=40),
        "has 2 devices with 40 B of memory each for one slice",
        "of the 100 B of each device of a, slices with a bound leave 40 B on device 1 of a0, 0 B on device 0",
        "Ask for less memory, or give back slices",
    )
    assert isinstance(bench.want(5, devices=2), msg.SliceBound), "it has no bound"
    assert isinstance(bench.want(6, devices=1, like=1), msg.SliceBound), "it adds nothing"
    (info,) = bench.manager.status({})
    assert info.slice_memory_bytes == 100
    for number in (1, 3):
        bench.release(number)
    both = bench.want(7, devices=2, memory_bytes=40)
    assert set(both.devices) == {*first.devices, *second.devices}
    assert third is not None


def test_an_island_with_too_little_memory_is_not_chosen() -> None:
    bench = Memories()
    bench.island_of("a", 4, 100)
    bench.island_of("b", 1, 200)
    assert bench.want(1, devices=1, memory_bytes=150).island == "b"
    refused(
        bench.want(2, devices=1, memory_bytes=300),
        "devices of a have 100 B each",
        "devices of b have 200 B each",
    )
    bench.island_of("c", 1, None)
    assert bench.want(3, devices=1, memory_bytes=300).island == "c", "it has no limit"
    assert bench.want(4, devices=1, memory_bytes=300).island == "c"


def test_a_slice_keeps_its_memory_in_the_next_epoch_and_moves_if_there_is_less() -> None:
    bench = Memories()
    bench.island_of("a", 1, 100)
    bench.island_of("b", 1, 100)
    homes = {number: bench.want(number, devices=1, memory_bytes=60).island for number in (1, 2)}
    assert set(homes.values()) == {"a", "b"}
    assert bench.want(3, devices=1, memory_bytes=30, island="a").island == "a"
    moves = next(number for number, home in homes.items() if home == "a")
    assert bench.again_with("a", 100, epoch=2) == {moves: "a", 3: "a"}
    refused(bench.want(4, devices=1, memory_bytes=20, island="a"))
    assert bench.again_with("a", 50, epoch=3) == {3: "a"}, "b has 40 bytes left, and a has 50"
    bench.release(next(number for number, home in homes.items() if home == "b"))
    last = bench.news(msg.SliceBound)[-1]
    assert (last.slice, last.island) == (moves, "b")


def test_a_slice_like_another_one_has_no_memory_of_its_own() -> None:
    wrong = msg.AllocateSlice(SLICE, 1, None, None, None, like=OTHER_SLICE, memory_bytes=5)
    error = objection(wrong)
    assert error is not None
    assert error.kind == "ArgumentError"


# --- with the controller and its hosts ---------------------------------------------------------------


def test_the_controller_tells_schedulers_of_bounds_again_in_each_epoch() -> None:
    world = World(1)
    world.controller()
    world.host("h0", "i", 1, 4)
    world.settle()
    client = join(world, "c")
    number = client.id()
    client.tell(msg.AllocateSlice(number, 1, None, None, None, memory_bytes=100))
    world.settle()
    spec = split(number, 1)  # 64 bytes
    first = client.upload(np.arange(8), spec)
    second = client.upload(np.arange(8), spec)
    world.settle()
    assert client.failed[second].kind == "OutOfDeviceMemory"
    assert "slice 1 of this client" in client.failed[second].message
    assert np.array_equal(client.value(first), np.arange(8))
    memory = world.schedulers["i"].admission.memory
    assert memory is not None
    assert memory.totals.by_slice[number].bound_bytes == 100
    client.delete(first, second)
    client.tell(msg.ReleaseSlice(number))
    world.settle()
    assert not memory.totals.by_slice
    assert not memory.settled().any()


# --- in one process ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(
        devices_per_island=2, device_memory_bytes=64 * MIB, spill_bytes=512 * MIB
    ) as cluster:
        yield cluster


@pytest.mark.usefixtures("cluster")
def test_arrays_of_a_slice_with_a_bound_leave_and_come_back_with_equal_values() -> None:
    slice_ = pw.make_virtual_device_set().add_slice(devices=2, memory="8MiB")
    assert slice_.memory == 8 * MIB
    assert "memory='8.00 MiB'" in repr(slice_)
    mesh = pw.Mesh(slice_.devices, ("x",))
    rows = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
    inputs = [np.full(MIB, number, np.float32) for number in range(12)]  # 2 MiB on each device
    arrays = [pw.put(value, sharding=rows) for value in inputs]
    step = pw.jit(lambda x, scale: x * scale + 1, mesh=mesh)
    arrays = [step(x, np.float32(3)) for x in arrays]
    for x, value in zip(arrays, inputs, strict=True):
        assert np.array_equal(np.asarray(x), value * 3 + 1)
    devices = pw.memory().devices
    assert [one.bound_bytes for device in devices for one in device.slices] == [8 * MIB] * 2
    assert all(one.used_bytes <= 8 * MIB for device in devices for one in device.slices)
    assert "may have" in str(pw.memory())
    assert "slices may have" in str(pw.status())


@pytest.mark.usefixtures("cluster")
def test_sizes_that_are_none_are_refused() -> None:
    devices = pw.make_virtual_device_set()
    for wrong in ("much", 0, -1, True, 1.5, "0GiB"):
        with pytest.raises(pw.ArgumentError, match='such as "24GiB"'):
            devices.add_slice(devices=1, memory=wrong)  # type: ignore[call-overload]
    with pytest.raises(pw.InsufficientDevices, match=r"devices of .* have 64.00 MiB each"):
        devices.add_slice(devices=1, memory="65MiB")


# --- real processes ----------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_slice_with_a_bound_on_real_processes() -> None:
    """Placement, waiting, refusal, a lost host, and the next epoch."""
    with pw.LocalCluster(1, 2, spare_hosts=1, device_memory="64MiB"):
        virtual = pw.make_virtual_device_set()
        slice_ = virtual.add_slice(devices=2, memory="40MiB")
        with pytest.raises(pw.InsufficientDevices, match=r"leave 24.00 MiB on device 0 of"):
            virtual.add_slice(devices=1, memory="30MiB")
        mesh = pw.Mesh(slice_.devices, ("x",))
        rows = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
        held = [pw.put(np.full(4 * MIB, at, np.float32), sharding=rows) for at in range(4)]
        pw.block_until_ready(held)  # 32 of 40 MiB on each device
        double = pw.jit(lambda x: x + x, mesh=mesh)
        with pytest.raises(pw.OutOfDeviceMemory, match=r"slice \d+ of this client .* may have 40"):
            pw.block_until_ready([double(held[0]), double(held[1])])
        gc.collect()
        more = pw.put(np.zeros(4 * MIB, np.float32), sharding=rows)
        too_much = pw.put(np.zeros(4 * MIB, np.float32), sharding=rows)
        with pytest.raises(pw.OutOfDeviceMemory, match="add_slice"):
            double(too_much).block_until_ready()
        del too_much, more
        gc.collect()
        free = pw.make_virtual_device_set().add_slice(devices=2)
        elsewhere = pw.NamedSharding(pw.Mesh(free.devices, ("x",)), pw.PartitionSpec("x"))
        beside = pw.put(np.ones(4 * MIB, np.float32), sharding=elsewhere)
        assert float(np.asarray(pw.jit(jnp.sum)(beside))) == 4 * MIB, "it has no bound"
        assert float(np.asarray(double(held[1]))[0]) == 2.0


@pytest.mark.processes
def test_a_bound_survives_a_lost_host() -> None:
    with pw.LocalCluster(1, 2, spare_hosts=1) as local:
        slice_ = pw.make_virtual_device_set().add_slice(devices=2, memory="40MiB")
        rows = pw.NamedSharding(pw.Mesh(slice_.devices, ("x",)), pw.PartitionSpec("x"))
        held = [pw.put(np.full(4 * MIB, at, np.float32), sharding=rows) for at in range(4)]
        pw.block_until_ready(held)
        local.hosts[0].kill()
        total = pw.jit(jnp.sum)
        assert [float(np.asarray(total(x))) for x in held] == [at * 4.0 * MIB for at in range(4)]
        late = [pw.put(np.zeros(4 * MIB, np.float32), sharding=rows) for _ in range(2)]
        with pytest.raises(pw.OutOfDeviceMemory, match="may have 40"):
            pw.block_until_ready([total(x) for x in late])


EMBEDDED = """
slices = pw.make_virtual_device_set()
large = slices.add_slice(devices=4, memory="48MiB")
small = slices.add_slice(devices=2, memory=4 << 20)
try:
    slices.add_slice(devices=4, memory="32MiB")
except pw.InsufficientDevices as error:
    print(error)
mesh = pw.Mesh(small.devices, ("x",))
rows = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
array = pw.put(np.ones(1 << 20, np.float32), sharding=rows)  # 2 MiB on each device
step = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
for _ in range(40):
    array = step(array)
print(float(np.asarray(array)[0]), small.memory >> 20)
try:
    print(np.asarray(pw.jit(lambda x: jnp.concatenate([x, x, x]), mesh=mesh)(array)).shape)
except pw.OutOfDeviceMemory as error:
    print(error)
"""


@pytest.mark.processes
def test_a_slice_with_a_bound_in_the_cluster_beside_a_script() -> None:
    body = "import jax.numpy as jnp\n" + EMBEDDED
    client = start_client("", body, PW_EMBEDDED_DEVICES="4", PW_EMBEDDED_DEVICE_MEMORY="64MiB")
    left, result, refusal = finish(client).strip().split("\n")
    assert (
        "of the 64.00 MiB of each device of embedded, slices with a bound leave 16.00 MiB on"
        in left
    )
    assert result == "41.0 4"
    assert "slice" in refusal
    assert "may have 4.00 MiB on each device" in refusal


@pytest.mark.processes
def test_a_bound_survives_another_controller() -> None:
    with pw.LocalCluster(1, log_level="warning", devices_per_host=2) as local:
        slice_ = pw.make_virtual_device_set().add_slice(devices=2, memory="40MiB")
        rows = pw.NamedSharding(pw.Mesh(slice_.devices, ("x",)), pw.PartitionSpec("x"))
        held = [pw.put(np.full(4 * MIB, at, np.float32), sharding=rows) for at in range(4)]
        pw.block_until_ready(held)
        daemons = local._children
        controller = daemons[0]
        os.kill(controller.pid, signal.SIGKILL)
        until(lambda: controller.exit_code() is not None, "the end of the controller")
        daemons[0] = LocalDaemon(
            "pw.cli.controller", ["--bind", str(local.address), "--log-level", "warning"]
        )
        total = pw.jit(jnp.sum)
        assert [float(np.asarray(total(x))) for x in held] == [at * 4.0 * MIB for at in range(4)]
        use = [one for device in pw.memory().devices for one in device.slices]
        assert [one.bound_bytes for one in use] == [40 * MIB] * 2
        late = [pw.put(np.zeros(4 * MIB, np.float32), sharding=rows) for _ in range(2)]
        with pytest.raises(pw.OutOfDeviceMemory, match="may have 40"):
            pw.block_until_ready([total(x) for x in late])
