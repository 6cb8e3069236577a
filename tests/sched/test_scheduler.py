"""Gangs on a whole fake cluster: one order everywhere, no circle of waiting, nothing left behind."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, RESOURCES, client_id, executor_of, scheduler_of
from pw.core.messages import copying
from pw.core.messages.copying import unpacked
from pw.core.programs.plan import HostPlan
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, Sharding
from pw.sched.control.accounts import ENTRIES_S
from pw.sched.island import window
from pw.sched.island.in_flight import LATE_S
from pw.sched.island.install_queues import AT_ONCE
from pw.sched.island.launching import UNKNOWN_AT_ONCE
from pw.sched.island.policy import POLICIES
from pw.sched.island.quarantine import STRIKES
from pw.testing.sim.census import held
from pw.transport.links import codec
from tests.stages.actors import FakeHost, World
from tests.stages.samples import parts
from tests.stages.scheduling import Bench, runs_on
from tests.stages.scripted import LARGE, SMALL, Client, chain, copy, join, split
from tests.stages.supervised import SupervisedHost

ISLANDS = ("a", "b")


def two_islands(seed: int, policy: str = "fifo") -> tuple[World, list[FakeHost]]:
    world = World(seed)
    world.controller(policy)
    hosts = [world.host(f"{island}{rank}", island, 2) for island in ISLANDS for rank in range(2)]
    world.settle()
    return world, hosts


def check_order(world: World) -> None:
    """G1 on what was sent: contiguous numbers, one relative order; G4: producers went first."""
    numbers: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    order: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    needed: dict[tuple[int, int], list[int]] = {}
    launched: set[tuple[int, int]] = set()
    for _, to, message in world.sent:
        if isinstance(message, msg.Submit):
            for segment, producers in zip(message.segments, message.depends, strict=True):
                needed[message.run, segment] = [producer for _, producer in producers]
        if isinstance(message, msg.Install | msg.Launch | msg.Discard | msg.Replicate):
            numbers[to.node, message.epoch].append(message.sequence)
        if isinstance(message, msg.Launch):
            order[to.node].append((message.run, message.segment))
            launched.add((message.run, message.segment))
            for producer in needed.get((message.run, message.segment), ()):
                assert (message.run, producer) in launched
    for got in numbers.values():
        assert got == list(range(len(got)))
    for one in order.values():
        for other in order.values():
            both = set(one) & set(other)
            assert [x for x in one if x in both] == [x for x in other if x in both]


def empty(hosts: list[FakeHost]) -> bool:
    return all(not any(host.census().values()) for host in hosts)


@pytest.mark.parametrize("seeds", parts(range(12), 6))
@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_opposite_directions_always_finish(seeds: list[int], policy: str, elements: int) -> None:
    """Two clients cross two islands in opposite directions, whatever the order of delivery (G1-G4)."""
    for seed in seeds:
        world, hosts = two_islands(seed, policy)
        clients = [join(world, name) for name in ("c1", "c2")]
        made: list[tuple[Client, int, Any]] = []
        for turn, client in enumerate(clients):
            on = [client.slice(2, island) for island in ISLANDS]
            world.settle()
            a, b = (split(number, 2, elements) for number in on)
            there, back = (a, b) if turn == 0 else (b, a)
            program = client.program(chain([there, back, there]))
            moved = client.program(copy(there, back))
            alone = client.program(chain([back]))
            world.steps(world.random.randrange(20))
            x = np.arange(elements) * (turn + 1)
            for _ in range(4):
                (y,) = client.run(program, x)
                (z,) = client.run(moved, y)
                (u,) = client.run(alone, z)
                made += [(client, y, x + 3), (client, z, x + 3), (client, u, x + 4)]
                world.steps(world.random.randrange(30))
        world.settle()
        check_order(world)
        for client, array, expected in made:
            np.testing.assert_array_equal(client.value(array), expected)
        assert world.control.runs.in_flight == {}
        for client in clients:
            assert client.credits == client.sent_runs == 12
            client.delete(*[array for owner, array, _ in made if owner is client])
            for program in client.outputs:
                client.release(program)
        world.settle()
        world.wait(60)
        assert empty(hosts), [host.census() for host in hosts]


@pytest.mark.parametrize("seeds", parts(range(40), 6))
def test_a_client_may_go_at_any_moment(seeds: list[int]) -> None:
    """What it launched ends, what it queued does not start, nothing of it stays, others go on."""
    for seed in seeds:
        world, hosts = two_islands(seed)
        gone, other = join(world, "gone"), join(world, "other")
        results = []
        for client in (gone, other):
            a, b = (split(client.slice(2, island), 2, LARGE) for island in ISLANDS)
            world.settle()
            program = client.program(chain([a, b, a]))
            x = np.arange(LARGE)
            world.steps(world.random.randrange(40))
            kept = client.upload(x, a, inline=bool(seed % 2))
            for _ in range(5):
                results.append((client, client.run(program, kept)[0]))
        world.steps(world.random.randrange(150))
        world.kill("gone")
        world.settle()
        world.wait(31)
        world.wait(ENTRIES_S)  # the accounts take what has ended late
        for client, array in results:
            if client is other:
                np.testing.assert_array_equal(client.value(array), np.arange(LARGE) + 3)
        other.delete(kept, *[array for client, array in results if client is other])
        other.release(program)
        world.settle()
        check_order(world)
        assert empty(hosts), [host.census() for host in hosts]
        assert not world.control.runs.in_flight
        for scheduler in world.schedulers.values():
            assert not scheduler.queued
            assert not scheduler.launched
            other_client = {"scheduler.queues.clients", "scheduler.window.group_of"}
            assert held("scheduler", scheduler).keys() <= other_client


@pytest.mark.parametrize("seeds", parts(range(20), 8))
def test_a_launch_that_is_missing_ends_the_epoch_of_its_island_only(seeds: list[int]) -> None:
    for seed in seeds:
        world, hosts = two_islands(seed)
        client = join(world, "c")
        a, b = (split(client.slice(2, island), 2) for island in ISLANDS)
        world.settle()
        here, there = client.program(chain([a])), client.program(chain([b]))
        world.settle()
        made = [client.run(here, np.arange(SMALL))[0] for _ in range(20)]
        (fine,) = client.run(there, np.arange(SMALL))
        world.drain("c")
        while (link := world.links["c", "controller"]) or not world.links["controller", "a1"]:
            world.deliver("c", "controller") if link else world.step()
        link = world.links["controller", "a1"]
        launches = [
            at for at, (_, _, message) in enumerate(link) if isinstance(message, msg.Launch)
        ]
        del link[world.random.choice(launches[:-1])]
        world.settle()
        (ended,) = world.to(RESOURCES, msg.EndEpoch)
        assert (ended.island, ended.epoch) == ("a", 1)
        assert [bool(host.stopped) for host in hosts] == [True, True, False, False]
        np.testing.assert_array_equal(client.value(fine), np.arange(SMALL) + 1)
        for host in hosts[:2]:
            host.restart()
        world.settle()
        client.known.clear()
        for array in made:
            np.testing.assert_array_equal(client.value(array), np.arange(SMALL) + 1)
        assert client.credits == client.sent_runs


# --- one scheduler alone -----------------------------------------------------------------------------


def test_a_consumer_waits_for_the_launch_of_its_producers_but_not_for_their_end() -> None:
    bench = Bench()
    bench.client(1)
    submit = bench.submission(1, depends=(3, 5))
    bench.tell(submit)
    bench.tell(msg.SegmentLaunched(submit.run, 3))
    assert not bench.launches()
    bench.tell(msg.SegmentLaunched(submit.run, 5))
    assert len(bench.launches()) == 1


def test_ready_work_of_another_client_goes_before_work_whose_inputs_are_late() -> None:
    """G3: although it is older."""
    bench = Bench()
    bench.client(1)
    bench.client(2)
    late = bench.submission(1, depends=(3,))
    bench.measure(2)
    bench.tell(late, msg.SegmentLaunched(late.run, 3), bench.submission(2), bench.submission(2))
    assert bench.owners()[1:] == [2, 2, 1]
    done = bench.submission(1, depends=(3,))
    bench.tell(
        done,
        msg.SegmentLaunched(done.run, 3),
        msg.SegmentDone(done.run, 3, 10),
        bench.submission(2),
    )
    assert bench.owners()[4:] == [1, 2]


def test_the_window_bounds_what_is_launched() -> None:
    bench = Bench()
    bench.client(1)
    bench.measure(1)
    bench.tell(*[bench.submission(1) for _ in range(window.SEGMENTS + 50)])
    assert bench.scheduler.launched == window.SEGMENTS
    contended = Bench()
    contended.client(1)
    contended.client(2)
    contended.measure(1, 2)
    contended.tell(*[contended.submission(1 + turn % 2) for turn in range(100)])
    assert contended.scheduler.launched == window.CONTENDED_SEGMENTS
    for launch in contended.launches()[2:]:
        contended.end(launch, 50_000)
    assert 2 <= contended.scheduler.launched < window.CONTENDED_SEGMENTS, "time counts, too"


def test_long_runs_do_not_delay_clients_on_other_devices() -> None:
    bench = Bench("fifo")
    bench.client(9)  # another client, so that there are several
    runs_on(bench, 1, 0)
    runs_on(bench, 2, 1)
    runs_on(bench, 3, 2, 3)
    runs_on(bench, 4, 0, 1)
    bench.measure(1, 2, 3, 4)
    for _ in range(5):  # of ten seconds each
        bench.tell(bench.submission(1))
        bench.end(bench.launches()[-1], 10_000_000)
    before = len(bench.launches())
    bench.tell(*[bench.submission(1) for _ in range(20)])
    assert bench.owners()[before:] == [1, 1]
    bench.tell(*[bench.submission(2) for _ in range(10)])
    bench.tell(*[bench.submission(3) for _ in range(10)])
    assert bench.owners()[before + 2 :] == [2] * 10 + [3] * 10
    bench.tell(bench.submission(4), *[bench.submission(2) for _ in range(10)])
    assert bench.owners()[before + 22 :] == [2] * 10, "its turn on the other device is far away"
    for ended in range(19):
        assert 4 not in bench.owners()[before:], "the others came first"
        long = [launch for launch in bench.launches()[before:] if launch.run >> 40 == 1]
        bench.end(long[ended], 10_000_000)
    assert 4 in bench.owners()[before:]


def test_little_is_launched_of_what_may_take_any_time() -> None:
    """A client that ran ahead while its program was compiled has not all its launches, of a second each,
    under way at once: deadlines count from the launch, and others want the island as well."""
    bench = Bench()
    bench.client(1)
    bench.tell(*[bench.submission(1) for _ in range(50)])
    assert len(bench.launches()) == UNKNOWN_AT_ONCE
    for index in range(50):
        bench.end(bench.launches()[index], 1_000_000)
        assert bench.scheduler.launched <= UNKNOWN_AT_ONCE
    assert len(bench.launches()) == 50
    bench.tell(*[bench.submission(1) for _ in range(50)])
    assert bench.scheduler.launched == 2, "what is known counts as what it is"


def test_what_is_short_is_launched_freely_as_soon_as_one_has_ended() -> None:
    bench = Bench()
    bench.client(1)
    bench.tell(*[bench.submission(1) for _ in range(100)])
    bench.end(bench.launches()[0], 0)
    assert len(bench.launches()) == 100


def test_what_runs_once_is_launched_freely() -> None:
    """Many programs, as operators make them, and the many parts of one."""
    bench = Bench()
    bench.client(1)
    many = bench.submission(1)
    for number in range(100):
        program = client_id(1, 10 + number)
        bench.tell(msg.InstallProgram(program, Program("p", (), (), (), ()), (), ()))
        bench.tell(msgspec.structs.replace(bench.submission(1), program=program))
    assert len(bench.launches()) == 100
    nothing = ((),) * 100
    bench.tell(
        msgspec.structs.replace(
            many,
            segments=tuple(range(100)),
            hosts=many.hosts * 100,
            reporters=many.reporters * 100,
            depends=nothing,
            notify=nothing,
        )
    )
    assert len(bench.launches()) == 200


def test_what_may_take_any_time_is_not_passed_by_others() -> None:
    """The policy decides, not what is known; and a new epoch knows what the old one had measured."""
    bench = Bench("priority")
    bench.client(1, priority=1)
    bench.client(2)
    bench.measure(2)
    bench.tell(*[bench.submission(1) for _ in range(2 * UNKNOWN_AT_ONCE)], bench.submission(2))
    assert bench.owners()[1:] == [1] * UNKNOWN_AT_ONCE
    bench.end(bench.launches()[1])
    assert bench.owners()[1:] == [1] * 2 * UNKNOWN_AT_ONCE + [2]
    bench.tell(
        msg.EpochEnded("i", 1, ErrorReport("HostLost", "gone")), msg.IslandFormed("i", 2, ("h0",))
    )
    bench.hosts = ("h0",)
    bench.tell(*[bench.submission(1) for _ in range(2 * UNKNOWN_AT_ONCE)])
    assert bench.scheduler.launched == 2 * UNKNOWN_AT_ONCE


def test_what_was_lost_with_an_epoch_does_not_count_as_under_way() -> None:
    bench = Bench()
    bench.client(1)
    bench.tell(*[bench.submission(1) for _ in range(UNKNOWN_AT_ONCE)])
    bench.tell(
        msg.EpochEnded("i", 1, ErrorReport("HostLost", "gone")),
        msg.IslandFormed("i", 2, bench.hosts),
    )
    bench.tell(bench.submission(1))
    assert bench.scheduler.launched == 1


def test_a_gap_ends_the_epoch_and_a_stale_one_does_not() -> None:
    bench = Bench()
    bench.tell(msg.LaunchGap(0, 1, 2), sender=executor_of("h1"))
    assert not bench.world.to(RESOURCES, msg.EndEpoch)
    bench.tell(msg.LaunchGap(1, 1, 2), sender=executor_of("h1"))
    (ended,) = bench.world.to(RESOURCES, msg.EndEpoch)
    assert "h1" in ended.reason
    assert "host h1 has not got all" in ended.reason


def test_a_broken_gang_ends_the_epoch_and_a_stale_one_does_not() -> None:
    bench = Bench()
    bench.tell(msg.GangBroken(0, "array 7 is not here"), sender=executor_of("h1"))
    assert not bench.world.to(RESOURCES, msg.EndEpoch)
    bench.tell(msg.GangBroken(1, "array 7 is not here"), sender=executor_of("h1"))
    (ended,) = bench.world.to(RESOURCES, msg.EndEpoch)
    assert (ended.island, ended.epoch) == ("i", 1)
    assert "h1" in ended.reason
    assert "array 7 is not here" in ended.reason


def test_what_a_lost_host_has_spoilt_is_told_as_such() -> None:
    bench = Bench()
    bench.client(1)
    submit = msgspec.structs.replace(bench.submission(1), notify=(("j",),))
    bench.tell(submit)
    (launch,) = bench.launches()
    lost = msg.Progress(1, (msg.Finished(launch.sequence, 5, True),))
    bench.tell(lost, sender=executor_of("h0"))
    for told in (CONTROL, scheduler_of("j")):
        assert bench.world.to(told, msg.SegmentDone) == [msg.SegmentDone(submit.run, 7, 5, True)]


def test_a_launch_ends_when_all_reporting_hosts_have_said_so() -> None:
    bench = Bench(hosts=("h0", "h1", "h2"))
    bench.client(1)
    submit = bench.submission(1, reporters=2)
    bench.tell(submit)
    (launch,) = bench.launches()
    reports = [bench.world.to(executor_of(host), msg.Launch)[0].report for host in bench.hosts]
    assert reports == [True, True, False]
    bench.end(launch, 7, host="h1")
    bench.end(launch, 7, host="h2")
    assert not bench.world.to(CONTROL, msg.SegmentDone)
    assert bench.scheduler.launched == 1
    bench.end(launch, 5)
    assert bench.world.to(CONTROL, msg.SegmentDone) == [msg.SegmentDone(submit.run, 7, 7)]
    assert bench.scheduler.launched == 0
    assert "scheduler.in_flight.reporting" not in held("scheduler", bench.scheduler)


def test_a_host_that_has_ended_its_part_is_not_at_it_any_more() -> None:
    """What hangs there now is ended in its time, and what crashes it is to blame."""
    bench = Bench()
    bench.client(1)
    bench.client(2)
    bench.tell(bench.submission(1, reporters=2))
    bench.end(bench.launches()[0])
    hangs = bench.submission(2, hosts=("h0",))
    bench.tell(hangs)
    bench.tell(msg.CancelRun(hangs.run, "overdue", 0.0))
    assert len(bench.world.to(RESOURCES, msg.EndEpoch)) == 1
    assert bench.scheduler.in_flight.programs_on("h0") == [client_id(2, 1)]
    for _ in range(STRIKES):
        bench.tell(msg.EpochEnded("i", 1, ErrorReport("HostLost", "gone"), "h0"))
        bench.tell(msg.IslandFormed("i", 1, bench.hosts), hangs)
    (refused,) = bench.world.to(CONTROL, msg.RunRefused)
    assert refused.run == hangs.run


@pytest.mark.parametrize("has_trees", [False, True])
def test_a_withdrawn_run_does_not_go_on_for_ever_where_orders_go_down_trees(
    has_trees: bool,
) -> None:
    """Its order may come when a host of another island, for which it waits, has left and come back."""
    bench = Bench()
    bench.scheduler.members.trees = msg.Trees(over=1 if has_trees else 64)
    bench.client(1)
    run = bench.submission(1)
    bench.tell(run)
    bench.tell(msg.CancelRun(run.run))
    assert not bench.world.to(RESOURCES, msg.EndEpoch)
    bench.world.wait(LATE_S)
    assert len(bench.world.to(RESOURCES, msg.EndEpoch)) == has_trees


def test_the_program_that_began_last_is_blamed_for_a_crash() -> None:
    """What its host was at on another device is likelier: it has only begun."""
    bench = Bench()
    for client, at in ((1, 0), (2, 1), (3, 1), (4, 2)):
        runs_on(bench, client, at)
    on_h0 = [bench.submission(client, hosts=("h0",)) for client in (1, 2, 3)]
    bench.tell(on_h0[0])
    bench.world.now_s += 100
    bench.tell(*on_h0[1:])
    bench.world.now_s += 100
    bench.end(bench.launches()[1])
    bench.world.now_s += 100
    bench.tell(bench.submission(4, hosts=("h1",)))
    at_work = bench.scheduler.in_flight.programs_on("h0")
    assert at_work == [client_id(3, 1), client_id(1, 1)]


def test_a_launch_that_waits_for_an_input_is_behind_those_that_pass_it() -> None:
    """What hangs there now is ended in its time, and what crashes it is to blame."""
    bench = Bench(hosts=("h0",))
    for client in (1, 2, 3):
        bench.client(client)
    waits, hangs, behind = (bench.submission(client) for client in (1, 2, 3))
    bench.tell(waits, hangs, behind)
    scheduler, held = bench.scheduler, executor_of("h0")
    at_work = scheduler.in_flight.programs_on
    assert at_work("h0") == [client_id(1, 1)]
    bench.tell(msg.PassedLaunches(1, ((waits.run, 7),), ()), sender=held)
    assert at_work("h0") == [client_id(2, 1)]
    bench.tell(msg.PassedLaunches(1, (), ((waits.run, 7),)), sender=held)
    assert at_work("h0") == [client_id(2, 1)]
    bench.tell(msg.PassedLaunches(2, ((hangs.run, 7),), ()), sender=held)  # of another epoch
    bench.tell(msg.CancelRun(hangs.run, "overdue", 0.0))
    assert len(bench.world.to(RESOURCES, msg.EndEpoch)) == 1
    for launch in bench.launches():
        bench.end(launch)
    assert scheduler.launched == 0
    assert [done.run for done in bench.world.to(CONTROL, msg.SegmentDone)] == [
        waits.run,
        hangs.run,
        behind.run,
    ]


def test_others_are_launched_where_a_new_program_has_no_part() -> None:
    bench = Bench()
    bench.client(1)
    bench.client(2)
    bench.measure(2)
    new = [bench.submission(1, hosts=("h0",)) for _ in range(UNKNOWN_AT_ONCE + 1)]
    bench.tell(*new)
    elsewhere, here = (bench.submission(2, hosts=(host,)) for host in ("h1", "h0"))
    bench.tell(elsewhere, here)
    assert [m.run for m in bench.world.to(executor_of("h1"), msg.Launch)][1:] == [elsewhere.run]
    assert here.run not in [launch.run for launch in bench.launches()]


def test_copies_are_made_between_the_runs_before_and_after_them() -> None:
    """Although what is dropped in the same turn is told at its end."""
    bench = Bench()
    bench.client(1)
    spec = split(1, 1)
    copies = [msg.ArrayCopy(array, spec, (), (0,)) for array in (5, 6, 7)]
    made = msg.CopyArrays(
        1, (("h0", copies[0]), ("h1", copies[1]), ("h0", copies[2]), ("x", copies[0]))
    )
    before = bench.submission(1, depends=(3,))
    bench.tell(before, msg.Release(1, (9,), (("h0",),)), made, bench.submission(1))
    assert not bench.world.to(executor_of("h0"), msg.Replicate)
    bench.tell(msg.SegmentLaunched(before.run, 3))
    orders = [m for m in bench.world.to(executor_of("h0")) if hasattr(m, "sequence")]
    assert [type(order) for order in orders] == [msg.Launch, msg.Replicate, msg.Launch, msg.Discard]
    assert [order.sequence for order in orders] == [0, 1, 2, 3]
    assert unpacked(orders[1]).copies == (copies[0], copies[2])
    (other,) = bench.world.to(executor_of("h1"), msg.Replicate)
    assert (other.epoch, other.sequence) == (1, 1)
    assert unpacked(other).copies == (copies[1],)


def test_copies_of_many_arrays_on_many_devices_fit_into_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what does not fit into one comes in several, with numbers of their own."""
    bench = Bench()
    bench.client(1)
    devices = tuple(DeviceAddress(f"h{at // 4}", at % 4) for at in range(256))
    copies = []
    for array in range(1400):
        there = Placement(1 + array % 2, tuple(range(256)))
        spec = ArraySpec((256, 8), "float32", Sharding(("x",), (256,), (("x",),)), there)
        copies.append(msg.ArrayCopy(array, spec, devices, (0, 1, 2, 3)))
    names = tuple(f"['layer {array}']" for array in range(1400))
    file = msg.CopyFile("0123456789abcdef", "/x", False, "f", names, tuple(copies))
    made = msg.CopyArrays(1, tuple(("h0", copy) for copy in copies), (("h0", file), ("h1", file)))
    bench.tell(made, bench.submission(1))
    (order,) = bench.world.to(executor_of("h0"), msg.Replicate)
    assert len(codec.encode_message(order)) < 1 << 18
    assert unpacked(order).copies == tuple(copies)
    assert unpacked(order).files == (file,)
    monkeypatch.setattr(copying, "OBJECTS", 20_000)
    bench.tell(made, bench.submission(1))
    orders = [m for m in bench.world.to(executor_of("h0")) if hasattr(m, "sequence")][2:]
    assert [order.sequence for order in orders] == list(range(2, 2 + len(orders)))
    parts = [unpacked(order) for order in orders[:-1]]
    assert len(parts) > 1
    assert [copy for part in parts for copy in part.copies] == copies
    assert [whole for part in parts for whole in part.files] == [file], "a file is not divided"
    for order in orders[:-1]:
        assert copying.weight_of(order.copies) <= 20_000


def test_what_names_hosts_of_an_older_epoch_is_dropped() -> None:
    bench = Bench()
    bench.client(1)
    bench.tell(bench.submission(1, hosts=("h0", "gone")), bench.submission(1))
    plan = HostPlan("gone", (), (), (), ())
    body = Program("p", (), (), (), ())
    bench.tell(msg.InstallProgram(client_id(1, 2), body, (plan,), ()))
    assert len(bench.launches()) == 1
    assert not bench.world.to(executor_of("gone"))
    assert bench.world.counters["messages_stale"] == 2


def test_a_program_that_no_message_to_a_host_can_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.client(1)
    post = bench.world.post

    def full(sender: Any, to: Any, message: object) -> None:
        if isinstance(message, msg.Install):
            raise codec.MessageTooLarge("no frame holds it")
        post(sender, to, message)

    monkeypatch.setattr(bench.world, "post", full)
    number, body = client_id(1, 2), Program("p", (), (), (), ())
    plans = tuple(HostPlan(host, (), (), (), ()) for host in bench.hosts)
    bench.tell(msg.InstallProgram(number, body, plans, (), install=3))
    (refused,) = bench.world.to(CONTROL, msg.ProgramInstalled)
    assert (refused.program, refused.install) == (number, 3)
    assert "no frame holds it" in refused.error.message
    assert not bench.scheduler.programs.installed[number].compiling


def test_hosts_get_a_few_programs_of_a_client_at_once() -> None:
    """The others wait until hosts have answered; one that is released meanwhile is never sent."""
    bench = Bench()
    bench.tell(msg.AddClient(1, 1.0, 0), msg.AddClient(2, 1.0, 0))
    body = Program("p", (), (), (), ())
    plans = tuple(HostPlan(host, (), (), (), ()) for host in bench.hosts)

    def sent() -> list[int]:
        return [m.program for m in bench.world.to(executor_of("h0"), msg.Install)]

    def answer(program: int, *hosts: str) -> None:
        for host in hosts:
            bench.tell(msg.Installed(1, program, None, install=1), sender=executor_of(host))

    theirs = [client_id(1, 100 + n) for n in range(AT_ONCE + 4)]
    for program in theirs:
        bench.tell(msg.InstallProgram(program, body, plans, (), install=1))
    assert sent() == theirs[:AT_ONCE]
    other = client_id(2, 1)
    bench.tell(msg.InstallProgram(other, body, plans, (), install=1))
    assert sent() == [*theirs[:AT_ONCE], other], "clients do not wait for one another"
    bench.tell(msg.UninstallProgram(theirs[AT_ONCE], ("h0", "h1")))
    bench.tell(msg.UninstallProgram(theirs[0], ("h0", "h1")))
    answer(theirs[0], "h0")
    assert len(sent()) == AT_ONCE + 1, "its other host compiles it"
    answer(theirs[0], "h1")
    assert sent()[AT_ONCE + 1 :] == [theirs[AT_ONCE + 1]], "the released one is not sent"
    bench.tell(msg.InstallProgram(theirs[-1], body, plans, (), install=2))
    answer(theirs[1], "h0", "h1")
    answer(theirs[2], "h0", "h1")
    installs = [(m.program, m.install) for m in bench.world.to(executor_of("h0"), msg.Install)]
    assert installs[AT_ONCE + 2 :] == [(theirs[-2], 1), (theirs[-1], 2)], "the newest of each"


def test_a_program_that_is_installed_again_stays_as_it_is() -> None:
    """Runs that were submitted before still wait; they could not go on while hosts compile it."""
    bench = Bench()
    bench.tell(msg.AddClient(1, 1.0, 0))
    body, number = Program("p", (), (), (), ()), client_id(1, 1)
    plans = tuple(HostPlan(host, (), (), (), ()) for host in bench.hosts)
    bench.tell(msg.InstallProgram(number, body, plans, (), install=1))
    for host in bench.hosts:
        bench.tell(msg.Installed(1, number, None, install=1), sender=executor_of(host))
    bench.tell(bench.submission(1, depends=(3,)), msg.UninstallProgram(number, ("h0", "h1")))
    bench.tell(msg.InstallProgram(number, body, plans, (), install=2, again=True))
    answers = [m.install for m in bench.world.to(CONTROL, msg.ProgramInstalled)]
    assert answers == [1, 2]
    assert len(bench.world.to(executor_of("h0"), msg.Install)) == 1, "hosts have it"
    bench.tell(msg.SegmentLaunched(client_id(1, 1001), 3))
    assert len(bench.launches()) == 1
    assert not bench.world.to(executor_of("h0"), msg.Discard), "it was wanted again"
    bench.tell(msg.UninstallProgram(number, ("h0", "h1")))
    (discard,) = bench.world.to(executor_of("h0"), msg.Discard)
    assert discard.programs == (number,)
    bench.tell(msg.InstallProgram(number, body, plans, (), install=3, again=True))
    assert len(bench.world.to(executor_of("h0"), msg.Install)) == 2, "hosts have forgotten it"


def test_deletes_never_overtake_runs() -> None:
    bench = Bench()
    bench.client(1)
    waiting = bench.submission(1, depends=(3,))
    program = client_id(1, 1)
    bench.tell(
        waiting, msg.Release(1, (5,), (("h0",),)), msg.UninstallProgram(program, ("h0", "h1"))
    )
    assert not bench.world.to(executor_of("h0"), msg.Discard)
    bench.tell(msg.SegmentLaunched(waiting.run, 3))
    kinds = [type(m) for m in bench.world.to(executor_of("h0")) if not isinstance(m, msg.Arguments)]
    assert kinds[-2:] == [msg.Launch, msg.Discard]
    (discard,) = bench.world.to(executor_of("h0"), msg.Discard)
    assert (discard.arrays, discard.programs) == ((5,), (program,))
    assert not bench.scheduler.programs.installed, "what is known of a program goes with it"


def test_what_all_hosts_of_a_gang_drop_in_a_turn_is_one_message() -> None:
    """It is encoded once for all of them; a host of several gangs gets one message."""
    bench = Bench(hosts=("h0", "h1", "h2"))
    bench.client(1)
    every_host, two = ("h0", "h1", "h2"), ("h1", "h2")
    bench.world.mailboxes["controller"] += [
        (bench.address, bench.address, msg.Release(1, (number,), (hosts,)))
        for number, hosts in ((5, every_host), (6, two), (7, every_host), (8, ("gone", "h0")))
    ]
    bench.world.drain("controller")
    (first,), (second,), (third,) = (
        bench.world.to(executor_of(h), msg.Discard) for h in every_host
    )
    assert (first.arrays, second.arrays) == ((5, 7, 8), (5, 7, 6))
    assert third is second
    assert not bench.world.to(executor_of("gone"), msg.Discard)


def test_the_uploads_a_gone_client_waited_for_are_forgotten() -> None:
    bench = Bench()
    bench.client(1)
    bench.tell(bench.submission(1, awaits=(client_id(1, 9),)))
    bench.end(msg.Launch(1, 0, 0, 0, 0, None, True))
    bench.tell(msg.RemoveClient(1))
    assert not held("scheduler", bench.scheduler)
    (discard,) = bench.world.to(executor_of("h1"), msg.Discard)
    assert discard.clients == (1,)


@pytest.mark.parametrize("seeds", parts(range(20), 8))
def test_a_run_cut_short_by_another_island_leaves_its_hosts(seeds: list[int]) -> None:
    """A host whose first part of a run was launched is told that the rest will not come."""
    for seed in seeds:
        world = World(seed)
        world.controller()
        hosts = [
            SupervisedHost(world, f"{island}{rank}", island, 2)
            for island in ISLANDS
            for rank in range(2)
        ]
        world.settle()
        client = join(world, "c")
        a, b = (split(client.slice(2, island), 2, LARGE) for island in ISLANDS)
        world.settle()
        program = client.program(chain([b, a, b, a, b]))
        alone = client.program(chain([b]))
        world.settle()
        made = []
        for _ in range(4):
            made += client.run(program, np.arange(LARGE))
            made += client.run(alone, made[-1])
        world.steps(world.random.randrange(200))
        hosts[0].crash()
        for _ in range(10):
            world.wait(1)
        client.known.clear()
        for whole, then in zip(made[::2], made[1::2], strict=True):
            np.testing.assert_array_equal(client.value(whole), np.arange(LARGE) + 5)
            np.testing.assert_array_equal(client.value(then), np.arange(LARGE) + 6)
        client.delete(*made)
        client.release(program)
        client.release(alone)
        world.settle()
        check_order(world)
        world.wait(1300)
        assert empty([host.current for host in hosts])
        assert world.client(client.number).usage.runs == 0
        assert client.credits == client.sent_runs


def test_an_answer_for_an_earlier_installing_does_not_count() -> None:
    bench = Bench(hosts=("h0",))
    bench.client(1)
    program = client_id(1, 2)
    plan = HostPlan("h0", (), (), (), ())
    for install in (1, 2):
        bench.tell(
            msg.InstallProgram(program, Program("p", (), (), (), ()), (plan,), (), install=install)
        )
    for install in (1, 2):
        bench.tell(msg.Installed(1, program, None, install=install), sender=executor_of("h0"))
        told = bench.world.to(CONTROL, msg.ProgramInstalled)
        assert [m.install for m in told] == [2][: install - 1]


def test_a_client_that_leaves_while_hosts_compile_leaves_nothing() -> None:
    bench = Bench(hosts=("h0",))
    bench.client(1)
    plan = HostPlan("h0", (), (), (), ())
    program, body = client_id(1, 2), Program("p", (), (), (), ())
    bench.tell(msg.InstallProgram(program, body, (plan,), (), install=1), msg.RemoveClient(1))
    assert not bench.scheduler.programs.installed
    bench.tell(msg.Installed(1, program, None, install=1), sender=executor_of("h0"))
    assert not bench.world.to(CONTROL, msg.ProgramInstalled)
