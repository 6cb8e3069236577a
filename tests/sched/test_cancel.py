"""Runs that are ended: overdue ones, cancelled ones, and those that fail on one host of a gang only.

All of it deterministic; what real processes make of it is in `tests/client/test_user_errors.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pw.cli.requests import parse
from pw.core import messages as msg
from pw.core.errors import Error, ErrorReport
from pw.core.ids import RESOURCES, client_id, executor_of, run_name, session_of
from pw.core.programs.program import Program
from pw.core.sharding import Placement
from pw.sched.control.run_ends import GRACE_S, LookAtDeadlines
from pw.sched.island import window
from pw.sched.island.in_flight import HEAD_S
from pw.sched.island.members import Members
from pw.sched.island.quarantine import STRIKES, Quarantine
from tests.sched.test_rebuild import Cluster, Survivor, X
from tests.stages.fake_devices import FakeBackend
from tests.stages.samples import some
from tests.stages.scripted import LARGE, SMALL, chain, split

TIMEOUT_S = 5.0


def timed(body: Program, timeout_s: float = TIMEOUT_S) -> Program:
    return msgspec.structs.replace(body, timeout_s=timeout_s)


def another_client(cluster: Cluster, name: str) -> Any:
    client: Survivor = cluster.world.add(session_of(name), Survivor)
    cluster.world.settle()
    number = client.slice(2, "a")
    cluster.world.settle()
    return client, split(number, 2, cluster.elements)


def promised(client: Any, spec: Any) -> int:
    """An upload that is announced, and whose bytes have yet to come."""
    array: int = client.id()
    client.specs[array], client.uploads[array] = spec, X
    client.tell(msg.CreateArray(array, spec))
    return array


def kind(found: Any) -> str:
    return found.kind if isinstance(found, ErrorReport) else "a value"


def ended_epochs(cluster: Cluster) -> list[msg.EndEpoch]:
    return cluster.world.to(RESOURCES, msg.EndEpoch)


def deadlines(cluster: Cluster) -> int:
    """Timers under way."""
    return sum(
        isinstance(alarm.note, LookAtDeadlines) and not alarm.cancelled
        for alarm in cluster.world.alarms
    )


def launched(cluster: Cluster, host: str = "a0") -> list[int]:
    """Runs of which something was launched on a host, ends of runs not counted."""
    launches = cluster.world.to(executor_of(host), msg.Launch)
    return [launch.run for launch in launches if launch.segment >= 0]


# --- timeouts ------------------------------------------------------------------------------------------


def test_a_run_that_never_ends_is_ended_and_all_others_go_on() -> None:
    for seed in range(10):
        cluster = Cluster(seed)
        client, world = cluster.client, cluster.world
        other, there = another_client(cluster, "d")
        endless = client.program(timed(chain([cluster.a], b"forever")), b"forever")
        add = client.program(chain([cluster.a]))
        theirs = other.program(chain([there]))
        (kept,) = client.run(add, X)
        world.settle()
        (stuck,) = client.run(endless, kept)
        (after,) = client.run(add, stuck)
        (beside,) = other.run(theirs, X)
        world.settle()
        assert deadlines(cluster) == 1
        world.wait(TIMEOUT_S - 0.1)
        assert not ended_epochs(cluster)
        world.wait(0.2)
        world.wait(2 * GRACE_S)
        for array in (stuck, after):
            error = client.value(array)
            assert error.kind == "ComputationTimeout", error
            for word in ("'chain'", "5 s", "a (a0, a1)"):
                assert word in error.message
        (ended,) = ended_epochs(cluster)
        assert ended.island == "a"
        np.testing.assert_array_equal(client.value(kept), X + 1)
        np.testing.assert_array_equal(other.value(beside), X + 1)
        (again,) = client.run(add, kept)
        np.testing.assert_array_equal(client.value(again), X + 2)
        (later,) = client.run(add, stuck)
        assert kind(client.value(later)) == "ComputationTimeout"
        assert not deadlines(cluster)
        assert client.credits == client.sent_runs
        assert cluster.hosts["b0"].incarnations == 1
        client.delete(kept, stuck, after, again, later), other.delete(beside)
        for program in (endless, add):
            client.release(program)
        other.release(theirs)
        cluster.idle()


def test_the_time_counts_from_the_launch_and_there_is_no_timer_without_a_run_in_flight() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    add = client.program(timed(chain([cluster.a])))
    (fine,) = client.run(add, X)
    world.settle()
    np.testing.assert_array_equal(client.value(fine), X + 1)
    assert not deadlines(cluster)
    upload = promised(client, cluster.a)
    (queued,) = client.run(add, upload)
    world.settle()
    world.wait(TIMEOUT_S + 1)
    assert not deadlines(cluster)
    assert queued not in client.failed
    client.send_again(upload, X, cluster.a)
    np.testing.assert_array_equal(client.value(queued), X + 1)
    world.wait(2 * TIMEOUT_S)
    assert queued not in client.failed


def test_a_timeout_does_not_end_the_epoch_for_what_waits_behind_others() -> None:
    """It fails all the same: the time is the user's, not the device's."""
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    other, there = another_client(cluster, "d")
    theirs = other.program(chain([there], b"forever"), b"forever")
    quick = client.program(timed(chain([cluster.a])))
    (long,) = other.run(theirs, X)
    world.settle()
    (behind,) = client.run(quick, X)
    world.settle()
    world.wait(TIMEOUT_S + 0.1)
    assert kind(client.value(behind)) == "ComputationTimeout"
    world.wait(10 * HEAD_S)
    assert not ended_epochs(cluster)
    assert long not in other.failed


def on_second_host(cluster: Cluster) -> Program:
    """A computation that never ends on a1, of an input that lies on a0."""
    number = cluster.a.placement.slice
    first = split(number, 1)
    second = msgspec.structs.replace(first, placement=Placement(number, (1,)))
    return msgspec.structs.replace(chain([second], b"forever"), inputs=(first,))


def test_what_another_host_than_the_first_computes_is_under_way_until_it_ends() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    endless = client.program(timed(on_second_host(cluster)), b"forever")
    (stuck,) = client.run(endless, X)
    world.settle()
    assert deadlines(cluster) == 1
    assert client.credits == 0
    world.wait(TIMEOUT_S + 0.1)
    world.wait(2 * GRACE_S)
    assert kind(client.value(stuck)) == "ComputationTimeout"
    patient = client.program(on_second_host(cluster), b"forever")
    (given_up,) = client.run(patient, X)
    world.settle()
    client.tell(msg.Cancel((given_up,)))
    world.settle()
    assert kind(client.value(given_up)) == "Cancelled"


def test_a_short_timeout_does_not_wait_for_a_longer_one() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    patient = client.program(timed(chain([cluster.a], b"forever"), 60.0), b"forever")
    hasty = client.program(timed(chain([cluster.b], b"forever")), b"forever")
    (long,) = client.run(patient, X)
    world.settle()
    (short,) = client.run(hasty, X)
    world.settle()
    assert deadlines(cluster) == 1
    world.wait(TIMEOUT_S + 1)
    assert kind(client.value(short)) == "ComputationTimeout"
    assert long not in client.failed
    assert deadlines(cluster) == 1
    world.wait(60)
    assert kind(client.value(long)) == "ComputationTimeout"
    assert not deadlines(cluster)


def test_a_run_that_is_repeated_has_its_time_again() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    endless = client.program(timed(chain([cluster.a], b"forever")), b"forever")
    (stuck,) = client.run(endless, X)
    world.settle()
    world.wait(TIMEOUT_S - 1)
    cluster.hosts["a1"].crash()
    world.wait(2)
    assert stuck not in client.failed
    world.wait(TIMEOUT_S)
    world.wait(1)
    assert kind(client.value(stuck)) == "ComputationTimeout"


# --- cancelling ----------------------------------------------------------------------------------------


def test_what_is_queued_never_starts() -> None:
    for seed in range(10):
        cluster = Cluster(seed)
        client, world = cluster.client, cluster.world
        add = client.program(chain([cluster.a]))
        over = client.program(chain([cluster.a, cluster.b]))
        missing = promised(client, cluster.a)
        (queued,) = client.run(add, missing)
        (after,) = client.run(over, queued)
        (fine,) = client.run(add, X)
        world.settle()
        client.tell(msg.Cancel((queued,)))
        world.settle()
        for array in (queued, after):
            error = client.value(array)
            assert error.kind == "Cancelled"
            assert "'chain'" in error.message
        np.testing.assert_array_equal(client.value(fine), X + 1)
        assert len(set(launched(cluster))) == 1
        assert not ended_epochs(cluster)
        assert client.credits == client.sent_runs
        client.send_again(missing, X, cluster.a)
        client.delete(queued, after, fine, missing)
        client.release(add), client.release(over)
        cluster.idle()


def test_what_ends_by_itself_ends_no_epoch() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    add = client.program(chain([cluster.a]))
    (done,) = client.run(add, X)
    world.settle()
    client.tell(msg.Cancel((done,)))
    world.settle()
    np.testing.assert_array_equal(client.value(done), X + 1)
    (running,) = client.run(add, X)
    while running not in cluster.hosts["a0"].current.store.arrays:
        world.steps(1)
    client.tell(msg.Cancel((running,)))
    world.wait(5 * GRACE_S)
    assert not ended_epochs(cluster)
    assert kind(client.value(running)) in ("Cancelled", "a value")


def test_what_never_ends_is_ended_after_its_grace() -> None:
    for seed in range(10):
        cluster = Cluster(seed)
        client, world = cluster.client, cluster.world
        endless = client.program(chain([cluster.a], b"forever"), b"forever")
        add = client.program(chain([cluster.a]))
        (stuck,) = client.run(endless, X)
        (after,) = client.run(add, stuck)
        (beside,) = client.run(add, X)
        world.settle()
        client.tell(msg.Cancel((stuck,)))
        world.settle()
        assert kind(client.value(after)) == kind(client.value(stuck)) == "Cancelled"
        assert not ended_epochs(cluster)
        world.wait(GRACE_S + 0.1)
        assert len(ended_epochs(cluster)) == 1
        np.testing.assert_array_equal(client.value(beside), X + 1)
        assert client.credits == client.sent_runs


def test_others_work_is_not_ended_for_what_waits_behind_it() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    other, there = another_client(cluster, "d")
    theirs = other.program(chain([there], b"forever"), b"forever")
    mine = client.program(chain([cluster.a], b"forever"), b"forever")
    (long,) = other.run(theirs, X)
    world.settle()
    (behind,) = client.run(mine, X)
    world.settle()
    client.tell(msg.Cancel((behind,)))
    for _ in range(10):
        world.wait(GRACE_S)
    assert kind(client.value(behind)) == "Cancelled"
    assert not ended_epochs(cluster)
    other.tell(msg.CancelRuns(1, other.number))
    world.settle()
    world.wait(2 * GRACE_S)
    assert len(ended_epochs(cluster)) == 1
    assert kind(other.value(long)) == "Cancelled"


def test_what_the_controller_still_holds_back_is_cancelled_as_well() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    add = client.program(chain([cluster.a]))
    (held,) = client.run(add, X)
    (after,) = client.run(add, held)
    (fine,) = client.run(add, X)
    client.tell(msg.Cancel((held,)))
    world.settle()
    assert kind(client.value(held)) == kind(client.value(after)) == "Cancelled"
    np.testing.assert_array_equal(client.value(fine), X + 1)
    assert client.credits == client.sent_runs


def test_what_was_donated_to_a_run_that_is_held_back_goes_when_it_has_been_made() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    make = client.program(chain([cluster.a]))
    eat = client.program(chain([cluster.a], donated=(0,)))
    (x,) = client.run(make, X)
    (y,) = client.run(eat, x)
    client.tell(msg.Cancel((y,)))
    world.settle()
    assert kind(client.value(y)) == "Cancelled"
    assert world.client(client.number).arrays.held.keys() == {y}
    client.delete(y)
    client.release(make), client.release(eat)
    cluster.idle()


def test_what_is_behind_a_run_that_is_held_back_goes_when_that_is_cancelled() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    quick = client.program(chain([cluster.a]))
    world.settle()
    slow = client.program(chain([cluster.a], b"2", donated=(0,)), b"2")
    (x,) = client.run(quick, X)
    (y,) = client.run(slow, x)
    (z,) = client.run(quick, X)
    while world.links["c", "controller"]:
        world.deliver("c", "controller")
    known = world.client(client.number)
    assert len(known.stream) == 2, "the second program is being compiled"
    client.tell(msg.Cancel((y,)))
    while world.links["c", "controller"]:
        world.deliver("c", "controller")
    assert not known.stream
    np.testing.assert_array_equal(client.value(z), X + 1)
    assert kind(client.value(y)) == "Cancelled"
    assert known.arrays.held.keys() == {y, z}


def test_what_is_lost_and_cancelled_is_not_made_again() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    add = client.program(chain([cluster.a]))
    endless = client.program(chain([cluster.a], b"forever"), b"forever")
    (kept,) = client.run(add, X)
    world.settle()
    (stuck,) = client.run(endless, kept)
    (after,) = client.run(add, stuck)
    world.settle()
    cluster.hosts["a1"].die()
    world.settle()
    assert world.client(client.number).arrays.held[stuck].is_lost
    before = launched(cluster)
    client.tell(msg.Cancel((stuck,)))
    world.settle()
    assert kind(client.failed[stuck]) == kind(client.failed[after]) == "Cancelled"
    cluster.hosts["a1"].finished = ""
    cluster.hosts["a1"].start()
    world.wait(1)
    np.testing.assert_array_equal(client.value(kept), X + 1)
    assert len(launched(cluster)) <= len(before) + 1


@pytest.mark.parametrize("seed", some(range(60), 6))
def test_a_run_may_be_cancelled_at_any_moment(seed: int) -> None:
    """Whatever it needs, wherever it is: its arrays are right or cancelled, and nothing is left."""
    elements = LARGE if seed % 2 else SMALL
    cluster = Cluster(seed, elements=elements)
    client, world, x = cluster.client, cluster.world, cluster.x
    there = client.program(chain([cluster.a, cluster.b]))
    back = client.program(chain([cluster.b, cluster.a], donated=(0,) if seed % 3 == 0 else ()))
    world.steps(world.random.randrange(60))
    start = client.upload(x, cluster.a)
    arrays, given = [start], set()
    for index in range(6):
        arrays += client.run(back if index % 2 else there, arrays[-1])
        if index % 2 and seed % 3 == 0:
            given.add(arrays[-2])
    world.steps(world.random.randrange(120))
    victim = world.random.randrange(1, len(arrays))
    client.tell(msg.Cancel((arrays[victim],)))
    if seed % 5 == 0:
        world.steps(world.random.randrange(30))
        cluster.hosts["a1"].crash()
    world.settle()
    for _ in range(6):
        world.wait(GRACE_S)
    cut = len(arrays)
    for index, array in enumerate(arrays):
        if array in given:
            continue
        found = client.value(array)
        if isinstance(found, ErrorReport):
            assert found.kind in ("Cancelled", "ArrayLost"), found
            cut = min(cut, index)
        else:
            assert index < cut, "a value that is made of what was cancelled"
            np.testing.assert_array_equal(found, x + 2 * index)
    assert client.credits == client.sent_runs
    client.delete(*[array for array in arrays if array not in given])
    client.release(there), client.release(back)
    cluster.idle()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("seed", some(range(20), 8))
def test_what_is_queued_at_one_end_only_leaves_no_edges_at_the_other(
    seed: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client will fetch them, and the client stays: a pipeline may be cancelled every second."""
    monkeypatch.setattr(window, "SEGMENTS", 2)
    monkeypatch.setattr(window, "CONTENDED_SEGMENTS", 2)
    cluster = Cluster(seed, elements=elements)
    client, world, x = cluster.client, cluster.world, cluster.x
    other: Survivor = world.add(session_of("d"), Survivor)
    world.settle()
    number = other.slice(1, "b")
    world.settle()
    endless = other.program(chain([split(number, 1, elements)], b"forever"), b"forever")
    for _ in range(2):
        other.run(endless, x)
    world.settle()
    over = client.program(chain([cluster.a, cluster.b]))
    three = client.program(chain([cluster.a, cluster.b, cluster.a]))
    world.settle()
    for program in (over, three, over):
        (array,) = client.run(program, x)
        world.steps(world.random.choice((0, 10, 30, 1000)))
        client.tell(msg.Cancel((array,)))
        world.steps(world.random.choice((0, 10, 1000)))
    world.settle()
    assert len(launched(cluster, "b0")) == 2, "its window is full"
    for host in cluster.hosts.values():
        assert host.current.census()["edges_outgoing"] == 0, "it is let go of at once"
    world.wait(40)
    for host in cluster.hosts.values():
        edges = {k: n for k, n in host.current.census().items() if k.startswith("edges")}
        assert not any(edges.values()), f"{host.name}: {edges}"
    assert client.credits == client.sent_runs
    assert not ended_epochs(cluster)


def test_anybody_may_cancel_runs_by_their_numbers() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    operator, _ = another_client(cluster, "operator")
    endless = client.program(chain([cluster.a], b"forever"), b"forever")
    add = client.program(chain([cluster.a]))
    (stuck,) = client.run(endless, X)
    (fine,) = client.run(add, X)
    world.settle()
    (status, _) = world.control.runs.status()
    (run, _) = [m.run for _, _, m in world.sent if isinstance(m, msg.Run)]
    assert (status.run, status.function, status.segments_left) == (run_name(run), "chain", 1)
    assert parse(status.run) == (client.number, run)
    assert parse(f"{client.number}") == (client.number, 0)
    for wrong in ("x", "3.", "3.x", ""):
        with pytest.raises(Error, match="neither a run"):
            parse(wrong)

    def ask(request: int, number: int, run: int = 0) -> Any:
        operator.tell(msg.CancelRuns(request, number, run))
        world.settle()
        return operator.answered(request).error

    assert "no client 99" in ask(1, 99).message
    assert "no run" in ask(2, client.number, client_id(client.number, 7777)).message
    assert ask(3, client.number, run) is None
    world.wait(GRACE_S)
    assert kind(client.value(stuck)) == "Cancelled"
    np.testing.assert_array_equal(client.value(fine), X + 1)
    assert "no run" in ask(4, client.number, run).message
    assert ask(5, client.number) is None


# --- on one host of a gang only ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(range(20), 8))
def test_no_room_for_an_edge_on_one_host_refuses_the_run_and_nothing_else(seed: int) -> None:
    cluster = Cluster(seed, elements=LARGE)
    client, world, x = cluster.client, cluster.world, cluster.x
    over = client.program(chain([cluster.b, cluster.a]))
    add = client.program(chain([cluster.a]))
    (kept,) = client.run(add, x)
    world.settle()
    cluster.hosts["a1"].current.bulk.full = True
    (refused,) = client.run(over, x)
    (after,) = client.run(add, refused)
    (beside,) = client.run(add, kept)
    world.settle()
    world.wait(1)
    assert kind(client.value(refused)) == kind(client.value(after)) == "OutOfHostMemory"
    assert cluster.hosts["a1"].incarnations == 2
    assert world.counters["runs_repeated"] <= 2, "what was refused is not run again"
    np.testing.assert_array_equal(client.value(beside), x + 2)
    np.testing.assert_array_equal(client.value(kept), x + 1)
    assert client.credits == client.sent_runs
    client.delete(refused, after, beside, kept)
    client.release(over), client.release(add)
    cluster.idle()


@pytest.mark.parametrize("seed", some(range(20), 8))
def test_a_host_that_cannot_enqueue_refuses_the_run_and_nothing_else(seed: int) -> None:
    cluster = Cluster(seed)
    client, world = cluster.client, cluster.world
    add = client.program(chain([cluster.a]))
    two = client.program(chain([cluster.a, cluster.a]))
    (kept,) = client.run(add, X)
    world.settle()
    cluster.hosts[f"a{seed % 2}"].current.backend.full_for = "stage 1"
    (refused,) = client.run(two, kept)
    (after,) = client.run(add, refused)
    (beside,) = client.run(add, kept)
    world.settle()
    world.wait(1)
    for array in (refused, after):
        assert kind(client.value(array)) == "OutOfDeviceMemory"
    assert len(world.to(RESOURCES, msg.EndEpoch)) == 1
    np.testing.assert_array_equal(client.value(beside), X + 2)
    (later,) = client.run(two, kept)
    np.testing.assert_array_equal(client.value(later), X + 3)
    assert client.credits == client.sent_runs


def test_what_all_hosts_know_of_breaks_no_gang() -> None:
    for seed in range(10):
        cluster = Cluster(seed)
        client, world = cluster.client, cluster.world
        raising = client.program(chain([cluster.b], b"raise"), b"raise")
        over = client.program(chain([cluster.b, cluster.a]))
        add = client.program(chain([cluster.a]))
        (failed,) = client.run(raising, X)
        (after,) = client.run(over, failed)
        (last,) = client.run(add, after)
        assert kind(client.value(last)) == kind(client.value(after)) == "ComputationFailed"
        (fine,) = client.run(add, X)
        np.testing.assert_array_equal(client.value(fine), X + 1)
        assert not world.counters["gangs_broken"]


def test_a_run_that_seemed_to_have_ended_is_refused_with_its_results() -> None:
    """The host that reports has ended it, another host has found out later that it could not."""
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    add = client.program(chain([cluster.a]))
    (made,) = client.run(add, X)
    world.settle()
    (run,) = (m.run for _, _, m in world.sent if isinstance(m, msg.Run))
    error = ErrorReport("OutOfDeviceMemory", "too late", "a1")
    executor = world.actors["a1"]["executor"]
    executor.env.send(executor.order.scheduler, msg.GangBroken(1, "too late", run, error, (made,)))
    executor.order.is_broken = True
    world.settle()
    world.wait(1)
    assert kind(client.value(made)) == "OutOfDeviceMemory"
    assert [m.results for _, _, m in world.sent if isinstance(m, msg.RunRefused)] == [(made,)]


# --- programs that crash their hosts -------------------------------------------------------------------


def test_a_computation_that_crashes_its_hosts_is_refused_before_none_is_left() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    other, there = another_client(cluster, "d")
    theirs = other.program(chain([there]))
    deadly = client.program(chain([cluster.a], b"forever"), b"forever")
    add = client.program(chain([cluster.a]))
    (fatal,) = client.run(deadly, X)
    (after,) = client.run(add, fatal)
    (beside,) = other.run(theirs, X)
    world.settle()
    crashes = 0
    while fatal not in client.failed:
        cluster.hosts[f"a{crashes % 2}"].crash()
        world.settle()
        world.wait(1)
        crashes += 1
    assert crashes == STRIKES
    for array in (fatal, after):
        error = client.value(array)
        assert error.kind == "ComputationFailed"
        assert "'chain'" in error.message
    np.testing.assert_array_equal(other.value(beside), X + 1)
    again = client.program(chain([cluster.a], b"forever"), b"forever")
    (refused,) = client.run(again, X)
    assert kind(client.value(refused)) == "ComputationFailed"
    assert client.credits == client.sent_runs
    client.delete(fatal, after, refused), other.delete(beside)
    for program in (deadly, add, again):
        client.release(program)
    other.release(theirs)
    cluster.idle()


def test_a_program_that_crashes_the_compiler_is_refused_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where hosts compile themselves, as with accelerators."""
    in_hosts = property(lambda members: False, lambda members, value: None)
    monkeypatch.setattr(Members, "compiles_apart", in_hosts)
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    crashes = []
    install = FakeBackend.install

    def crash() -> None:
        crashes.append(world.now_s)
        cluster.hosts["a1"].crash()

    def deadly(self: Any, key: bytes, computation: Any, artifact: bytes, *how: Any) -> None:
        if artifact == b"7" and self.name == "a1":
            world.happenings["a1"].append(crash)
        else:
            install(self, key, computation, artifact, *how)

    monkeypatch.setattr(FakeBackend, "install", deadly)
    add = client.program(chain([cluster.a]))
    (kept,) = client.run(add, X)
    world.settle()
    fatal = client.program(chain([cluster.a], b"7"), b"7")
    later = client.program(chain([cluster.a], b"8"), b"8")
    (refused,) = client.run(fatal, kept)
    (fine,) = client.run(later, kept)
    for _ in range(2 * STRIKES):
        world.settle()
        world.wait(1)
    assert STRIKES <= len(crashes) <= STRIKES + 2, "one may come before the island is ready"
    assert kind(client.value(refused)) == "CompileError"
    np.testing.assert_array_equal(client.value(fine), X + 9)
    np.testing.assert_array_equal(client.value(kept), X + 1)


def test_what_a_host_runs_is_likelier_to_crash_it_than_what_others_compile_for_it() -> None:
    quarantine = Quarantine()
    cluster = Cluster()
    bodies = [chain([cluster.a], artifact) for artifact in (b"1", b"2")]
    for program, body in enumerate(bodies):
        assert quarantine.install(program, body) is None
    for _ in range(STRIKES):
        quarantine.host_lost([0], [1], compiles_apart=True)
    assert quarantine.install(0, bodies[0]) is None
    assert quarantine.refusal(1) is not None
    for _ in range(STRIKES):
        quarantine.host_lost([0], [1])
    assert quarantine.install(0, bodies[0]) is not None


def test_hosts_that_are_lost_now_and_then_make_nobody_suspect() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    add = client.program(chain([cluster.a]))
    (array,) = client.run(add, X)
    for crash in range(3 * STRIKES):
        world.steps(30 + crash)
        cluster.hosts["a0"].crash()
        world.settle()
        world.wait(1)
        (array,) = client.run(add, array)
        assert kind(client.value(array)) == "a value"
