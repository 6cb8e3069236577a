"""What a tenant may have on a device: its runs and uploads wait for its own memory, and others for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.ids import CONTROL, client_id
from pw.core.programs.peak import IslandMemory, OutputMemory
from pw.core.rights import NewRights, Rights, Size, TenantRights
from pw.sched.island.admission import PATIENCE
from pw.sched.island.lent_memory import LentMemory
from pw.sched.island.memory import DeviceMemory
from pw.sched.island.memory_totals import TenantBounds
from tests.sched.test_memory import DEVICE, MemoryBench, needs
from tests.stages.actors import World
from tests.stages.scripted import Client, chain, join, split

RED, BLUE = "red", "blue"
R1, R2, B1 = 1, 2, 3


class TenantBench(MemoryBench):
    """A scheduler with clients 1 and 2 of red and 3 of blue; red may have 50 bytes on a device."""

    def __init__(self, capacity_bytes: int | None = None, bound_bytes: int | None = 50) -> None:
        super().__init__(0, capacity_bytes, counts_tenants=True)
        for client in (R1, R2, B1):
            self.client(client)
        self.bound(bound_bytes)

    def bound(self, bound_bytes: int | None) -> None:
        for client in (R1, R2):
            added = msg.AddClient(client, 1.0, 0, RED, device_memory_bytes=bound_bytes)
            self.tell(added)
        self.tell(msg.AddClient(B1, 1.0, 0, BLUE))

    def end_all(self) -> None:
        for launch in self.launches():
            self.end(launch)

    def release(self, array: int) -> None:
        self.tell(msg.Release(array >> 40, (array,), (("h0",),), late=False))

    def refused_uploads(self) -> list[msg.UploadRefused]:
        return list(self.world.to(CONTROL, msg.UploadRefused))

    def of(self, tenant: str) -> int:
        return dict(self.scheduler.tenants_memory()).get(tenant, 0)


@pytest.mark.parametrize("capacity_bytes", [None, 100])
def test_a_run_waits_for_memory_of_its_tenant_and_others_do_not(capacity_bytes: Any) -> None:
    bench = TenantBench(capacity_bytes)
    first = bench.run(bench.program(R1, needs(30)))
    second = bench.run(bench.program(R2, needs(30)))
    third = bench.run(bench.program(B1, needs(60)))
    assert bench.launched() == [first.run, third.run]
    assert (bench.of(RED), bench.of(BLUE)) == (30, 60)
    bench.end(bench.launches()[0])
    assert bench.launched() == [first.run, third.run, second.run]
    assert not bench.refused()


def test_a_run_that_was_not_tried_since_memory_is_free_is_not_refused() -> None:
    """So it is where the window is closed at the moment at which the last run of the tenant ends."""
    bench = TenantBench()
    bench.run(bench.program(R1, needs(30)))
    second = bench.run(bench.program(R2, needs(30)))
    (claim,) = bench.memory.reserved
    bench.memory.end(claim)
    bench.scheduler.admission.go_on(set)
    assert not bench.refused()
    bench.tell(msg.UploadEnded(client_id(B1, 9)))
    assert second.run in bench.launched()


def test_a_run_that_its_tenant_can_never_have_is_refused_with_the_numbers() -> None:
    bench = TenantBench()
    array = client_id(R1, 5)
    bench.upload(array, 20)
    bench.run(bench.program(R1, needs(40, inputs=1)), array)
    (refused,) = bench.refused()
    assert refused.error.kind == "QuotaExceeded"
    for words in (
        "needs 60 B on device 0 of host h0",
        "20 B of it for its arguments",
        "tenant 'red' has 20 B there and may have 50 B on each device",
        "raise device_memory in pw-controller --tenants",
    ):
        assert words in refused.error.message
    assert refused.holders == ((array, 20),)


def test_a_run_is_refused_when_nothing_of_its_tenant_makes_room_though_others_go_on() -> None:
    bench = TenantBench()
    bench.upload(client_id(R1, 5), 30)
    bench.upload(client_id(B1, 5), 30)
    blue, red = bench.program(B1, needs(5)), bench.program(R1, needs(10))
    bench.run(blue)
    running = bench.run(red)
    bench.run(bench.program(R2, needs(40)))
    assert not bench.refused(), "a run of the tenant may make room"
    launch = next(one for one in bench.launches() if one.run == running.run)
    bench.end(launch)
    (refused,) = bench.refused()
    message = refused.error.message
    assert "needs 40 B more on device 0 of host h0 (island i)" in message
    assert "where tenant 'red' has 30 B and may have 50 B" in message
    assert [array for array, _ in refused.holders] == [client_id(R1, 5)], "not those of blue"


def test_a_run_that_waits_holds_back_runs_of_its_tenant_only() -> None:
    bench = TenantBench()
    small, large = bench.program(R1, needs(20)), bench.program(R2, needs(45))
    bench.run(small)
    big = bench.run(large)
    for _ in range(2 * PATIENCE):
        bench.run(small)
    ended = 0
    while big.run not in bench.launched():
        bench.end(bench.launches()[ended])
        ended += 1
    passed = bench.launched().index(big.run) - 1
    assert PATIENCE <= passed <= PATIENCE + 2
    blue = bench.program(B1, needs(1000))
    assert bench.run(blue).run in bench.launched()


def test_results_and_temporaries_count_for_the_tenant() -> None:
    bench = TenantBench()
    result = client_id(R1, 9)
    program = bench.program(R1, needs(30, outputs=(30,)))
    bench.run(program, results=(result,))
    bench.end_all()
    assert bench.of(RED) == 30
    waits = bench.run(bench.program(R2, needs(30)))
    (refused,) = bench.refused()
    assert refused.run == waits.run
    bench.tell(msg.CancelRun(waits.run))
    bench.release(result)
    assert bench.run(bench.program(R2, needs(50))).run in bench.launched()
    memory = bench.memory
    other = bench.program(R1, needs(0))
    memory.add_temporaries(other, (20,))
    assert memory.reserve(other, (), ()) is None, "temporaries count, too"


def test_an_upload_waits_until_its_tenant_has_room_and_runs_wait_for_it() -> None:
    bench = TenantBench()
    running = bench.run(bench.program(R1, needs(40)))
    array = client_id(R2, 5)
    bench.upload(array, 30)
    assert (bench.of(RED), bench.used) == (40, 70), "its bytes are there, whatever it may have"
    reader = bench.run(bench.program(R2, needs(1, inputs=1)), array)
    assert bench.launched() == [running.run]
    bench.end_all()
    assert bench.launched() == [running.run, reader.run]
    assert (bench.of(RED), bench.used) == (31, 31)
    assert not bench.refused_uploads()


def test_an_upload_is_refused_when_nothing_of_its_tenant_makes_room() -> None:
    bench = TenantBench()
    first, second, huge = (client_id(R1, number) for number in (5, 6, 7))
    bench.upload(first, 30)
    bench.upload(second, 30)
    bench.tell(msg.ArrayPlaced(huge, (DEVICE,), 51))
    refused = {one.array: one.error for one in bench.refused_uploads()}
    assert refused.keys() == {second, huge}
    assert {one.kind for one in refused.values()} == {"QuotaExceeded"}
    assert "needs 30 B on device 0 of host h0 (island i), where tenant 'red' has 30 B and may" in (
        refused[second].message
    )
    for array in (first, second, huge):
        bench.release(array)
    assert (bench.of(RED), bench.used) == (0, 0)


def test_an_upload_is_not_refused_while_one_before_it_may_start_a_run() -> None:
    bench = TenantBench()
    first, second = client_id(R1, 5), client_id(R1, 6)
    bench.tell(msg.ArrayPlaced(first, (DEVICE,), 30))
    run = bench.run(bench.program(R1, needs(1, inputs=1)), first, awaits=(first,))
    bench.release(first)  # behind the run
    bench.upload(second, 30)
    assert not bench.refused_uploads()
    bench.tell(msg.UploadEnded(first))
    assert bench.launched() == [run.run]
    bench.end_all()
    assert not bench.refused_uploads()
    assert bench.of(RED) == 30


def test_an_upload_that_is_deleted_or_whose_client_leaves_waits_no_more() -> None:
    bench = TenantBench()
    bench.run(bench.program(R1, needs(40)))
    first, second = client_id(R1, 5), client_id(R2, 5)
    for array in (first, second):
        bench.upload(array, 30)
    bench.release(first)
    bench.tell(msg.RemoveClient(R2))
    bench.end_all()
    assert not bench.scheduler.admission.are_bounds_short
    assert bench.used == 0


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_result_that_is_the_bytes_of_an_upload_counts_for_its_tenant(
    is_view: bool, leaves: bool
) -> None:
    """Only a client with a lease can launch what reads an upload that waits."""
    bench = TenantBench()
    running = bench.run(bench.program(R1, needs(40)))
    bench.run(bench.program(B1, needs(0)))
    array, result, program = (client_id(R2, number) for number in (5, 6, 7))
    bench.upload(array, 30)
    output = OutputMemory(0, (DEVICE,), 30, *((-1, -1, (0,)) if is_view else (0,)))
    returns = IslandMemory("i", ((DEVICE,),), (0,), (), (0,), (), (output,))
    bench.memory.install(program, "returns its argument", returns)
    claim = LentMemory(bench.memory, R2, (program,), 1).launched(program, (array,), (result,))
    bench.memory.end(claim)
    if leaves:  # and a client of blue has the result
        bench.memory.buffers[client_id(B1, 6)] = bench.memory.buffers.pop(result)
        bench.tell(msg.RemoveClient(R2))
    bench.release(array)
    bench.end(next(one for one in bench.launches() if one.run == running.run))
    assert not bench.scheduler.admission.are_bounds_short
    assert (bench.of(RED), bench.used) == (30, 30)


def test_a_lower_bound_takes_nothing_away_and_a_higher_one_lets_work_go_on() -> None:
    bench = TenantBench()
    array, late = client_id(R1, 5), client_id(R1, 6)
    bench.upload(array, 40)
    bench.bound(20)
    assert bench.of(RED) == 40
    running = bench.run(bench.program(R1, needs(0, inputs=1)), array)
    assert bench.launched() == [running.run], "it needs no more"
    bench.upload(late, 10)
    waits = bench.run(bench.program(R2, needs(5)))
    assert waits.run not in bench.launched()
    bench.bound(60)
    assert bench.launched() == [running.run, waits.run]
    assert bench.of(RED) == 55


def test_what_recovery_brings_back_counts_whatever_its_tenant_may_have() -> None:
    bench = TenantBench(bound_bytes=10)
    bench.tell(msg.ArrayPlaced(client_id(R1, 5), (DEVICE,), 40, is_back=True))
    assert bench.of(RED) == 40
    assert not bench.refused_uploads()


def test_a_lease_has_no_more_room_than_its_tenant() -> None:
    bounds = TenantBounds({R1: RED, B1: BLUE}, {RED: 400})
    memory = DeviceMemory("i", 1000, bounds)
    rooms = {}
    for client in (R1, B1):
        program = client_id(client, 1)
        memory.install(program, "p", needs(10))
        rooms[client] = LentMemory(memory, client, (program,), 256)
        rooms[client].widen()
    assert rooms[R1].granted_bytes == 200
    assert rooms[B1].granted_bytes == 400, "half of what the device has left"
    for room in rooms.values():
        room.end()
    memory.settle()
    assert not any(total.used.any() for total in memory.totals.by_tenant.values())


def test_a_shard_counts_for_the_tenant_that_made_it_while_another_one_names_it() -> None:
    bench = TenantBench()
    memory = bench.memory
    array, view = client_id(B1, 5), client_id(R1, 5)
    bench.upload(array, 60)
    buffer = memory.buffers[array]
    buffer.names += 1
    memory.buffers[view] = buffer
    bench.release(array)
    assert (bench.of(RED), bench.of(BLUE)) == (0, 60)
    memory.release(view)
    assert (bench.of(RED), bench.of(BLUE)) == (0, 0)


# --- with the controller and its hosts ------------------------------------------------------------


class Stage:
    """One host of four devices, clients `r1`, `r2` of red and `b1` of blue; `split(s, 1)` has 64 bytes."""

    def __init__(self, bound_bytes: int | None) -> None:
        self.world = World(1)
        self.world.controller(rights=self.rights(bound_bytes))
        self.host = self.world.host("h0", "i", 1, 4)
        self.world.tenants = dict.fromkeys(("r1", "r2"), RED) | {"b1": BLUE}
        self.world.settle()
        self.r1, self.r2, self.b1 = (join(self.world, name) for name in ("r1", "r2", "b1"))

    def rights(self, bound_bytes: int | None) -> TenantRights:
        bound = None if bound_bytes is None else Size(bound_bytes)
        return TenantRights(named={RED: Rights(device_memory=bound)}, have_file=True)

    def spec(self, client: Client) -> Any:
        number = client.slice(1)
        self.world.settle()
        return split(number, 1)

    def put(self, client: Client, spec: Any) -> int:
        array = client.upload(np.arange(8), spec)
        self.world.settle()
        return array

    def status(self) -> dict[str, Any]:
        self.r1.tell(msg.GetStatus(1))
        self.world.settle()
        (red,) = self.r1.of(msg.Status)[-1].tenants
        return {"has": red.amounts.get("device_memory"), "may": red.bounds.get("device_memory")}


def test_hosts_drop_a_refused_upload_and_what_needs_it_fails() -> None:
    stage = Stage(100)
    spec = stage.spec(stage.r1)
    first = stage.put(stage.r1, spec)
    program = stage.r1.program(chain([spec]))
    second = stage.r1.upload(np.arange(8), spec)
    (result,) = stage.r1.run(program, second)
    stage.world.settle()
    for array in (second, result):
        assert stage.r1.failed[array].kind == "QuotaExceeded"
        assert "The largest arrays there: 64 B int64[8]" in stage.r1.failed[array].message
    assert list(stage.host.store.arrays) == [first]
    assert stage.status() == {"has": 64, "may": 100}
    stage.r1.delete(first)
    stage.world.settle()
    third = stage.put(stage.r1, spec)
    assert np.array_equal(stage.r1.value(third), np.arange(8))
    stage.r1.delete(second, third)
    stage.world.settle()
    assert not stage.host.store.arrays
    assert stage.status() == {"has": None, "may": 100}


def test_new_rights_reach_the_schedulers() -> None:
    stage = Stage(None)
    spec = stage.spec(stage.r2)
    held = [stage.put(stage.r2, spec) for _ in range(3)]
    assert stage.status() == {"has": 192, "may": None}
    stage.world.post(CONTROL, CONTROL, NewRights(stage.rights(100)))
    stage.world.settle()
    assert not any(array in stage.r2.failed for array in held), "they stay"
    assert stage.put(stage.r2, spec) in stage.r2.failed
    blue = stage.spec(stage.b1)
    for _ in range(4):
        assert stage.put(stage.b1, blue) not in stage.b1.failed
    stage.world.kill("r2")
    stage.world.settle()
    assert stage.status() == {"has": None, "may": 100}
