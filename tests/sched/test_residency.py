"""What leaves device memory for a run that has no room, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.client.connection import current
from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import client_id, executor_of
from pw.sched.island.buffers import Tier
from pw.sched.island.lease_states import LaunchLease, LeaseState
from pw.testing.in_process import InProcessCluster
from tests.sched.test_memory import DEVICE, OTHER, MemoryBench, needs

MIB = 1 << 20


class TierBench(MemoryBench):
    """Devices with 100 bytes each, and hosts with room for so many bytes of arrays that leave them."""

    def __init__(self, clients: int = 2, spill_bytes: int = 1000) -> None:
        super().__init__(clients)
        error = ErrorReport("HostLost", "gone")
        formed = msg.IslandFormed("i", 2, self.hosts, 100, spill_bytes=spill_bytes)
        self.tell(msg.EpochEnded("i", 1, error), formed)
        self.scheduler.residency.small_bytes = 1 << 20  # uploads go to the devices

    def spills(self, host: str = "h0") -> list[tuple[int, ...]]:
        """The arrays of each order to a host so far."""
        return [order.arrays for order in self.world.to(executor_of(host), msg.Spill)]

    def spilled(self, *arrays: int, kept: tuple[int, ...] = (), host: str = "h0") -> None:
        self.tell(msg.Spilled(2, arrays, kept), sender=executor_of(host))

    def tier(self, array: int) -> Tier:
        return self.memory.buffers[array].tier

    def read(self, client: int, array: int) -> msg.Submit:
        """A run that reads an array has ended."""
        run = self.run(self.program(client, needs(0, inputs=1)), array)
        self.end(self.launches()[-1])
        return run


def arrays_of(bench: TierBench, *sizes: int, client: int = 1) -> list[int]:
    """Upload arrays of these sizes."""
    arrays = [client_id(client, 5 + at) for at in range(len(sizes))]
    for array, size_bytes in zip(arrays, sizes, strict=True):
        bench.upload(array, size_bytes)
    return arrays


def test_the_least_recently_used_leaves_and_the_run_waits_for_the_copy() -> None:
    bench = TierBench()
    first, second = arrays_of(bench, 40, 40)
    bench.read(1, first)
    run = bench.run(bench.program(1, needs(50)))
    assert bench.spills() == [(second,)]
    assert (bench.tier(second), bench.used) == (Tier.LEAVING, 80)
    assert run.run not in bench.launched()
    bench.spilled(second)
    assert (bench.tier(second), bench.used) == (Tier.HOST, 90)
    assert bench.launched()[-1] == run.run
    assert not bench.refused()


def test_what_a_run_reads_comes_back_and_is_part_of_what_it_needs() -> None:
    bench = TierBench()
    first, second = arrays_of(bench, 40, 40)
    bench.run(bench.program(1, needs(50)))
    bench.spilled(first)
    bench.end(bench.launches()[-1])
    reader = bench.run(bench.program(1, needs(30, inputs=1)), first)
    assert reader.run not in bench.launched(), "70 bytes are needed, and 60 are free"
    assert bench.spills() == [(first,), (second,)]
    bench.spilled(second)
    assert bench.launched()[-1] == reader.run
    assert (bench.tier(first), bench.used) == (Tier.DEVICE, 70)
    bench.end(bench.launches()[-1])
    bench.tell(msg.Release(1, (first, second), (("h0",), ("h0",))))
    assert (bench.used, bench.memory.tiers.off) == (0, set())


def test_what_a_queued_run_reads_leaves_last() -> None:
    bench = TierBench()
    soon, later, old = arrays_of(bench, 30, 30, 30)
    reads, large = bench.program(2, needs(20, inputs=1)), bench.program(1, needs(100))
    upload = client_id(2, 99)
    bench.run(bench.program(2, needs(0)), awaits=(upload,))
    bench.run(reads, soon)
    bench.run(reads, later)
    bench.run(large)
    assert not bench.launched(), "the first run waits for an upload"
    assert bench.spills() == [(old, later, soon)]


def test_who_has_more_than_its_share_gives_first() -> None:
    bench = TierBench()
    mine = arrays_of(bench, 20)
    theirs = arrays_of(bench, 30, 30, client=2)
    bench.read(2, theirs[0])
    bench.read(2, theirs[1])
    bench.run(bench.program(1, needs(40)))
    assert bench.spills() == [(theirs[0],)], f"not {mine}, which was used before"


def test_nothing_leaves_that_runs_in_flight_or_the_run_itself_read() -> None:
    bench = TierBench()
    read, own, free = arrays_of(bench, 30, 30, 30)
    flying = bench.run(bench.program(2, needs(5, inputs=1)), read)
    bench.run(bench.program(1, needs(35, inputs=1)), own)
    assert bench.spills() == [(free,)]
    assert bench.launched() == [flying.run]


def test_what_cannot_make_enough_room_stays() -> None:
    bench = TierBench()
    read, small = arrays_of(bench, 60, 20)
    bench.run(bench.program(2, needs(5, inputs=1)), read)
    large = bench.run(bench.program(1, needs(90)))
    assert not bench.spills(), "20 bytes do not help as long as 60 are read"
    bench.end(bench.launches()[0])
    assert bench.spills() == [(small, read)]
    bench.spilled(small, read)
    assert bench.launched()[-1] == large.run


def test_what_its_client_has_in_host_memory_does_not_leave() -> None:
    bench = TierBench()
    _, large = arrays_of(bench, 0, 40)
    bench.run(bench.program(1, needs(70)))
    assert bench.spills() == [(large,)]


def test_a_host_that_cannot_copy_keeps_the_array_and_is_not_asked_again() -> None:
    bench = TierBench()
    first, second = arrays_of(bench, 40, 40)
    run = bench.run(bench.program(1, needs(50)))
    bench.spilled(kept=(first,))
    assert bench.spills() == [(first,), (second,)]
    bench.spilled(second)
    assert (bench.tier(first), bench.launched()[-1]) == (Tier.STAYS, run.run)


def test_a_run_is_refused_when_nothing_may_leave_and_its_error_says_why() -> None:
    bench = TierBench(spill_bytes=50)
    first, second = arrays_of(bench, 40, 40)
    bench.run(bench.program(1, needs(50)))
    bench.spilled(first)
    bench.run(bench.program(2, needs(70)))
    bench.end(bench.launches()[-1])
    (refused,) = bench.refused()
    assert bench.spills() == [(first,)], f"there is no room for {second} on the host"
    for words in ("40 B of 50 B", "--spill"):
        assert words in refused.error.message


def test_an_array_that_is_deleted_on_its_way_counts_until_it_has_left() -> None:
    bench = TierBench()
    first, _ = arrays_of(bench, 40, 40)
    run = bench.run(bench.program(1, needs(50)))
    bench.tell(msg.Release(1, (first,), (("h0",),)))
    assert bench.used == 80
    assert run.run not in bench.launched()
    bench.spilled(first)
    assert (bench.launched()[-1], bench.used, bench.memory.tiers.off) == (run.run, 90, set())


def test_all_hosts_of_an_array_have_copied_it_before_its_bytes_are_free() -> None:
    bench = TierBench()
    array = client_id(1, 5)
    bench.tell(msg.ArrayPlaced(array, (DEVICE, OTHER), 60), msg.UploadEnded(array))
    run = bench.run(bench.program(1, needs(50)))
    assert bench.spills("h0") == bench.spills("h1") == [(array,)]
    bench.spilled(array)
    bench.spilled(array)  # once more, which counts for nothing
    assert run.run not in bench.launched()
    bench.spilled(array, host="h1")
    assert bench.launched()[-1] == run.run


def test_large_uploads_stay_in_host_memory_until_a_run_reads_them() -> None:
    bench = TierBench()
    bench.scheduler.residency.small_bytes = 30
    small, large = arrays_of(bench, 20, 40)
    assert (bench.tier(small), bench.tier(large), bench.used) == (Tier.DEVICE, Tier.HOST, 20)
    assert bench.memory.tiers.have(1)
    assert not bench.memory.tiers.have(2)
    bench.read(1, large)
    assert (bench.tier(large), bench.used) == (Tier.DEVICE, 60)


def test_uploads_beyond_what_a_host_has_for_them_are_counted_on_the_devices() -> None:
    bench = TierBench(spill_bytes=50)
    bench.scheduler.residency.small_bytes = 30
    first, second = arrays_of(bench, 40, 40)
    assert (bench.tier(first), bench.tier(second), bench.used) == (Tier.HOST, Tier.DEVICE, 40)


def test_a_run_waits_for_uploads_that_may_leave_when_they_have_ended() -> None:
    bench = TierBench()
    first, second = client_id(1, 5), client_id(1, 6)
    bench.tell(msg.ArrayPlaced(first, (DEVICE,), 60))
    run = bench.run(bench.program(2, needs(50)))
    bench.tell(msg.ArrayPlaced(second, (DEVICE,), 60), msg.UploadEnded(first))
    assert not bench.refused(), f"{second} began later, and may leave as well"
    bench.tell(msg.UploadEnded(second))
    bench.spilled(first, second)
    assert bench.launched() == [run.run]


def test_a_run_is_not_refused_while_a_lease_ends_for_it() -> None:
    bench = TierBench()
    array = client_id(1, 5)
    bench.tell(msg.ArrayPlaced(array, (DEVICE, OTHER), 60), msg.UploadEnded(array))
    lease = LaunchLease(1, 1, ("h1",), {}, 0, 8)
    lease.state = LeaseState.CLOSING
    bench.scheduler.leases.table.numbered[1] = lease
    run = bench.run(bench.program(2, needs(50)))
    assert not bench.refused()
    assert not bench.spills(), f"{lease} may read the array"
    bench.scheduler.leases.table.numbered.clear()
    bench.memory.frees += 1
    bench.tell(msg.UploadEnded(client_id(2, 77)))
    assert bench.spills() == [(array,)]
    bench.spilled(array)
    bench.spilled(array, host="h1")
    assert bench.launched() == [run.run]


def test_host_memory_that_deleted_arrays_free_lets_others_leave() -> None:
    bench = TierBench(spill_bytes=50)
    first, second = arrays_of(bench, 40, 40)
    flying = bench.run(bench.program(1, needs(50)))
    bench.spilled(first)
    assert bench.launched() == [flying.run]
    waiting = bench.run(bench.program(2, needs(50)))
    assert bench.spills() == [(first,)], "its host has no room for another"
    bench.tell(msg.Release(1, (first,), (("h0",),)))
    assert bench.spills() == [(first,), (second,)]
    bench.spilled(second)
    assert bench.launched() == [flying.run, waiting.run]


def test_without_spill_nothing_leaves() -> None:
    bench = MemoryBench()
    bench.upload(client_id(1, 5), 60)
    bench.run(bench.program(1, needs(50)))
    assert not list(bench.world.to(executor_of("h0"), msg.Spill))
    assert len(bench.refused()) == 1
    assert "--spill" in bench.refused()[0].error.message


# --- in one process ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(
        devices_per_island=2, device_memory_bytes=8 * MIB, spill_bytes=1024 * MIB
    ) as cluster:
        yield cluster


def test_ten_times_the_memory_of_the_devices_with_equal_values(cluster: InProcessCluster) -> None:
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
    rows = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
    inputs = [np.full(MIB, number, np.float32) for number in range(40)]  # 4 MiB each
    arrays = [pw.put(value, sharding=rows) for value in inputs]

    @pw.jit(mesh=mesh)
    def step(x: Any, scale: Any) -> Any:
        return x * scale + 1

    for _ in range(2):
        arrays = [step(x, np.float32(3)) for x in arrays]
    for x, value in zip(arrays, inputs, strict=True):
        assert np.array_equal(np.asarray(x), (value * 3 + 1) * 3 + 1)
    stats = pw.stats()["host-0"]
    assert stats["bytes_spilled"] >= 20 * 4 * MIB
    assert stats["bytes_returned"] >= 40 * 4 * MIB


def test_two_clients_share_the_devices_and_donate(cluster: InProcessCluster) -> None:
    def work(start: int) -> list[Any]:
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
        rows = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
        step = pw.jit(lambda x: x * 2 - 1, mesh=mesh, donate_argnums=0)
        arrays = [pw.put(np.full(MIB, start + at, np.float32), sharding=rows) for at in range(6)]
        for _ in range(3):
            arrays = [step(x) for x in arrays]
        return [np.asarray(x) for x in arrays]

    mine = work(0)
    before = current.runtime()
    other = cluster.client()
    current.use(other)
    try:
        theirs = work(100)
    finally:
        current.use(before)
        other.close()
    assert [x[0] for x in mine] == [at * 8.0 - 7 for at in range(6)]
    assert [x[-1] for x in theirs] == [(100 + at) * 8.0 - 7 for at in range(6)]


# --- real processes ----------------------------------------------------------------------------------


def split_over_two() -> tuple[Any, Any]:
    """A mesh over two devices, and the sharding that splits an array's rows over them."""
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
    return mesh, pw.NamedSharding(mesh, pw.PartitionSpec("x"))


class Sweeps:
    """Twenty arrays of 4 MiB over two hosts; a sweep adds the next one, rolled, to each."""

    def __init__(self) -> None:
        mesh, rows = split_over_two()
        self.add = pw.jit(lambda x, y: x + jnp.roll(y, 1), mesh=mesh)
        self.values = [np.arange(MIB, dtype=np.float32) + at for at in range(20)]
        self.arrays = [pw.put(value, sharding=rows) for value in self.values]

    def sweep(self) -> None:
        """Compute all sums, on the devices and in numpy."""
        arrays, values = self.arrays, self.values
        self.arrays = [self.add(x, y) for x, y in zip(arrays, arrays[1:] + arrays[:1], strict=True)]
        rolled = [np.roll(value, 1) for value in values[1:] + values[:1]]
        self.values = [value + other for value, other in zip(values, rolled, strict=True)]

    def check(self) -> None:
        """Fail unless the arrays are what numpy says."""
        for x, value in zip(self.arrays, self.values, strict=True):
            assert np.array_equal(np.asarray(x), value)


@pytest.mark.processes
def test_gangs_of_two_hosts_spill_and_a_lost_host_changes_no_value() -> None:
    """Arrays over two hosts, five times their devices' memory; one host is killed."""
    with pw.LocalCluster(1, 2, spare_hosts=1, device_memory="8MiB", spill="512MiB") as local:
        sweeps = Sweeps()
        sweeps.sweep()
        pw.block_until_ready(sweeps.arrays)
        local.hosts[0].kill()
        sweeps.sweep()
        sweeps.check()
        use = pw.memory().devices
        assert all((one.arrays_bytes or 0) <= 8 * MIB for one in use)
        assert any(one.host_bytes for one in use)
