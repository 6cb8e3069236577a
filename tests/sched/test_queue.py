"""`pw why --queue`: who waits for whom, in which order, since when, and when it goes on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pw.client.looking.queue import ClusterQueue
from pw.core import messages as msg
from pw.core.errors import ErrorReport, HostLost
from pw.core.ids import client_id, client_of
from pw.core.programs.peak import IslandMemory
from pw.core.programs.plan import Execute, HostPlan, HostSegment
from pw.core.programs.program import Computation, Program
from pw.core.sharding import Binding, DeviceAddress, Placement
from pw.sched.island import forecast as forecasts
from pw.sched.island.forecast import Forecast, WaitingLaunch
from pw.sched.island.lease_states import LaunchLease
from pw.sched.island.policy import POLICIES
from tests.sched.test_quotas import Stage
from tests.sched.test_rebuild import Cluster, X
from tests.stages.scheduling import Bench, runs_on
from tests.stages.scripted import Client, chain, split

SHARES = {1: 1.0, 2: 2.0, 3: 4.0}
TIME_US = {1: 9000, 2: 6000, 3: 7000}


class Device:
    """One host whose device does what is launched, one after the other, by the clock of the test."""

    def __init__(self, policy: str) -> None:
        self.bench = Bench(policy, ("h0",))
        self.done = 0

    def submit(self, *clients: int) -> None:
        self.bench.tell(*[self.bench.submission(client) for client in clients])

    def measured(self, *clients: int) -> None:
        """One run of each of these clients ends, so that it is known how long it takes."""
        for client in clients:
            self.submit(client)
            self.work()

    def work(self) -> int:
        """End the oldest launch, when its time is over; return its run."""
        launch = self.bench.launches()[self.done]
        self.done += 1
        time_us = TIME_US[client_of(launch.run)]
        self.bench.world.now_s += time_us * 1e-6
        self.bench.end(launch, time_us)
        return launch.run

    def forecast(self) -> Forecast:
        return self.bench.scheduler.reports.forecast()

    def places(self) -> dict[int, WaitingLaunch]:
        return {place.task.here.stake.client: place for place in self.forecast().places}


# --- launches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ended", [0, 1, 4, 9])
def test_places_are_those_at_which_launches_begin(
    policy: str, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes later, and no device is kept for a client: the estimates and the order are exact."""
    monkeypatch.setattr(POLICIES[policy], "keeps_devices", False)
    device = Device(policy)
    for client, share in SHARES.items():
        device.bench.client(client, share, client, f"tenant {client % 2}", 1.0 + client % 2)
    device.measured(1, 2, 3)
    device.submit(*[1] * 9, *[2, 3] * 9)
    left = Counter({1: 9, 2: 9, 3: 9})
    left.subtract(client_of(device.work()) for _ in range(ended))
    begin_s = device.bench.world.now_s
    forecast = device.forecast()
    assert {place.task.here.stake.client for place in forecast.places} == set(+left)
    runs = [place.task.here.run for place in forecast.places]
    began_s: dict[int, float] = {}
    order: list[int] = []
    while not set(runs) <= began_s.keys():
        at_s = device.bench.world.now_s - begin_s
        run = device.work()
        began_s[run] = at_s
        order.append(run)
    assert runs == sorted(runs, key=order.index)
    for place in forecast.places:
        run = place.task.here.run
        assert place.left_s == pytest.approx(began_s[run])
        before = [client_of(one) for one in order[: order.index(run)]]
        assert place.in_front == {client: before.count(client) for client in dict.fromkeys(before)}
        assert place.more == left[client_of(run)] - before.count(client_of(run)) - 1


def test_a_client_that_waits_long_goes_before_a_higher_priority() -> None:
    device = Device("priority")
    device.bench.client(1, 1.0, 0)
    device.bench.client(2, 1.0, 9)
    device.measured(1, 2)
    device.submit(*[2] * 500, 1)
    left_s = device.places()[1].left_s
    assert left_s == pytest.approx(1.0, abs=0.1), "500 runs take 3 s, but a wait of 1 s is overlong"


def test_what_is_not_known_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICIES["share"], "keeps_devices", False)
    device = Device("share")
    for client in (1, 2, 3):
        device.bench.client(client)
    device.measured(2)
    device.submit(1)
    device.submit(2)
    place = device.places()[2]
    assert place.in_front == {1: 1}
    assert place.left_s is None, "the run of client 1 is the first of its program"
    device.work()
    device.work()
    device.submit(1)
    device.submit(2)
    assert device.places()[2].left_s == pytest.approx(TIME_US[1] * 1e-6)
    device.bench.world.now_s += 0.005
    assert device.places()[2].left_s == pytest.approx(TIME_US[1] * 1e-6 - 0.005)
    device.bench.world.now_s += 0.01
    assert device.places()[2].left_s == 0.0, "it takes a little longer than expected"
    device.bench.world.now_s += 1.0
    assert device.places()[2].left_s is None
    device.bench.tell(device.bench.submission(3, awaits=(client_id(3, 77),)))
    place = device.places()[3]
    assert place.reasons == ("the upload of its arguments (array 77)",)
    assert place.left_s is None


def test_only_launches_on_the_same_devices_stand_in_front() -> None:
    bench = Bench("share", ("h0", "h1"))
    for client, at in ((1, (0, 1)), (2, (2, 3)), (3, (1, 2)), (4, (0,))):
        runs_on(bench, client, *at)
        hosts = tuple(sorted({f"h{number // 2}" for number in at}))
        bench.tell(bench.submission(client, hosts=hosts))
    places = bench.scheduler.reports.forecast().places
    fronts = {place.task.here.stake.client: place.in_front for place in places}
    assert fronts == {3: {1: 1, 2: 1}, 4: {1: 1}}


def test_a_launch_that_waits_for_its_input_from_another_island_has_no_time() -> None:
    device = Device("fifo")
    device.bench.client(1)
    device.bench.client(2)
    device.measured(1, 2)
    device.bench.tell(device.bench.submission(1, depends=(3,)))
    place = device.places()[1]
    assert place.reasons == ("part 3 of the same program to be launched on another island",)
    run = place.task.here.run
    device.bench.tell(msg.SegmentLaunched(run, 3))
    assert not device.places(), "it is in flight, with nothing before it"
    device.submit(2)
    assert device.places()[2].left_s is None, "the input may come late"


def test_who_waits_for_a_launch_lease_waits_for_its_holder() -> None:
    device = Device("fifo")
    device.bench.client(1)
    device.bench.client(2)
    lease = LaunchLease(1, 1, ("h0",), {}, 0, 8)
    device.bench.scheduler.leases.table.holders["h0"] = lease
    device.submit(2)
    place = device.places()[2]
    assert place.reasons == (forecasts.LENT,)
    assert place.in_front == {1: 0}


def test_who_waits_for_memory_waits_for_those_that_hold_it() -> None:
    bench = Bench("share", ("h0",))
    ended = ErrorReport.of(HostLost("h0"))
    bench.tell(msg.EpochEnded("i", 1, ended, "h0"), msg.IslandFormed("i", 2, ("h0",), 100))
    here = DeviceAddress("h0", 0)
    binding = Binding.of(7, "i", (here,))
    body = Program("p", (Computation("f", b"", Placement(7, (0,)), (), ()),), (), (), ())
    does = (HostSegment(7, (Execute(0, (), (), ()),)),)
    plan = HostPlan("h0", does, (), (), (binding,))
    needs = IslandMemory("i", ((here,),), (50,), (), (), (), ())
    for client in (1, 2):
        bench.tell(msg.AddClient(client, 1.0, 0))
        install = msg.InstallProgram(client_id(client, 1), body, (plan,), (), memory=needs)
        bench.tell(install)
    bench.tell(msg.ArrayPlaced(client_id(3, 5), (here,), 30))
    bench.tell(bench.submission(1), bench.submission(2))
    (place,) = bench.scheduler.reports.forecast().places
    assert place.task.here.stake.client == 2
    assert place.reasons == (forecasts.FOR_MEMORY,)
    assert (place.in_front, place.unit) == ({1: 50, 3: 30}, "bytes")
    assert place.left_s is None
    bench.end(bench.launches()[0])
    assert not bench.scheduler.reports.forecast().places


def test_a_long_queue_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "COMPARISONS", 100)
    monkeypatch.setattr(forecasts, "CLIENTS_TOLD", 2)
    device = Device("fifo")
    for client in (1, 2, 3):
        device.bench.client(client)
    device.measured(1, 2, 3)
    device.submit(*[1] * 300, 2, 3)
    forecast = device.forecast()
    first, second = forecast.places
    assert first.task.here.stake.client == 1
    assert second.task.here.stake.client == 2
    assert second.left_s is None, "too much is in front to look at it"
    assert forecast.clients_left_out == 1


# --- at the controller ---------------------------------------------------------------------------------


def asked(stage: Any, client: Client) -> msg.Queue:
    client.tell(msg.GetQueue(99))
    stage.world.settle()
    (answer,) = (one for one in client.of(msg.Queue) if one.request == 99)
    client.received.remove(answer)
    return answer  # type: ignore[no-any-return]


def test_devices_wait_for_those_of_the_tenant_that_have_them() -> None:
    stage = Stage(devices=4)
    stage.slice(stage.r1, 3)
    stage.slice(stage.r2, 2)
    stage.world.wait(5.0)
    (wait,) = asked(stage, stage.r2).waits
    assert (wait.client, wait.name, wait.tenant) == (stage.r2.number, "r2", "red")
    assert wait.what == "2 devices; tenant 'red' may have 4 and has 3"
    assert wait.in_front == (msg.InFront(stage.r1.number, "r1", 3),)
    assert wait.waited_s == pytest.approx(5.0)
    assert wait.left_s is None
    shown = repr(ClusterQueue.of(asked(stage, stage.r1)))
    assert "3 devices of 1 (r1)" in shown
    assert "5.0 s" in shown
    other = asked(stage, stage.b1)
    assert (other.waits, other.hidden) == ((), 1)


def test_slices_that_no_island_has_and_names_are_in_the_table() -> None:
    stage = Stage(devices=100)
    stage.leave("h1")
    stage.slice(stage.r1, 8)
    stage.r2.tell(msg.Lookup(7, "base", 0, 0, 60.0))
    stage.world.settle()
    stage.world.wait(2.0)
    devices, name = asked(stage, stage.r1).waits
    assert (devices.kind, devices.what) == ("devices", "8 devices that no island has yet")
    assert (name.kind, name.what) == ("name", "a version of 'base'")
    assert devices.waited_s == pytest.approx(2.0)
    assert name.waited_s == pytest.approx(2.0)


def test_launches_of_other_tenants_have_a_place_and_no_name() -> None:
    stage = Stage()
    numbers = {}
    for client in (stage.r1, stage.b1):
        slice_ = stage.slice(client, 8)
        program = client.program(chain([split(slice_, 8)]))
        argument, run, result = client.id(), client.id(), client.id()
        client.sent_runs += 1
        client.tell(msg.CreateArray(argument, split(slice_, 8)))
        client.tell(msg.Run(run, program, (argument,), (result,)))
        stage.world.settle()
        numbers[client.number] = run
    own, other = asked(stage, stage.r1).waits
    assert (own.client, own.tenant) == (stage.r1.number, "red")
    assert own.what.startswith("run 1.")
    assert "of 'chain': the upload of its arguments" in own.what
    assert (other.client, other.name, other.tenant, other.run) == (0, "another tenant", "", "")
    assert other.what == "a run on i"
    waits = asked(stage, stage.b1).waits
    assert [one.client for one in waits] == [0, stage.b1.number]


def test_what_waits_for_an_island_that_is_away_says_since_when() -> None:
    cluster = Cluster()
    client = cluster.client
    program = client.program(chain([cluster.a]))
    (first,) = client.run(program, X)
    cluster.world.settle()
    assert not asked(cluster, client).waits
    cluster.hosts["a0"].waits = True
    cluster.world.kill("a0")
    cluster.world.settle()
    client.run(program, first)
    cluster.world.settle()
    cluster.world.wait(3.0)
    (wait,) = asked(cluster, client).waits
    assert wait.kind == "island"
    assert wait.what == "the island of 1 slice, which is away; 1 call of it wait"
    assert wait.waited_s == pytest.approx(3.0)
    cluster.hosts["a0"].waits = False
    cluster.hosts["a0"].start()
    cluster.world.settle()
    cluster.world.wait(5.0)
    assert not asked(cluster, client).waits
