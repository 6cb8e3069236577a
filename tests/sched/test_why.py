"""`pw why` says which host holds up which run; the log says it unasked."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.client.connection.waiting import POLL_S, Waiting
from pw.core import messages as msg
from pw.core.actors.watchdog import STALL_S, LookForStall, Watchdog
from pw.core.ids import CONTROL, client_id, executor_of, scheduler_of, store_of
from pw.core.programs.lower import lower
from pw.core.sharding import Binding, DeviceAddress, Placement
from pw.sched.control.explain.story import BUSY_S, story
from pw.sched.island.installed_program import names_of
from pw.testing import InProcessCluster
from tests.stages.actors import Alarm, World
from tests.stages.daemons import start_module, until
from tests.stages.inside import number_of, type_of
from tests.stages.scripted import LARGE, SMALL, Client, chain, join, split
from tests.stages.stage import held, mesh_on

# --- who is to blame -----------------------------------------------------------------------------------


def check_numbers(text: str, status: msg.Status) -> None:
    """Every client and run that a story names is one that `pw status` shows."""
    known = {str(client.number) for client in status.clients}
    assert set(re.findall(r"client (\d+)", text)) <= known
    assert set(re.findall(r"run (\d+)\.", text)) <= known


class Cluster:
    """Two islands of two hosts, a client, and a program that goes from one island to the other."""

    def __init__(self, elements: int = SMALL, seed: int = 0) -> None:
        self.world = World(seed)
        self.islands: list[msg.IslandInfo] = []
        """What the resource manager would tell of them."""
        self.world.controller(island_status=lambda: tuple(self.islands))
        for island in ("a", "b"):
            for rank in range(2):
                self.world.host(f"{island}{rank}", island, 2)
        self.world.settle()
        self.client: Client = join(self.world, "client")
        slices = [self.client.slice(2, island) for island in ("a", "b")]
        self.world.settle()
        self.specs = [split(number, 2, elements) for number in slices]
        self.x = np.arange(elements)
        self.program = self.client.program(chain(self.specs))
        self.world.settle()

    def run(self) -> int:
        """One run, and some time that is shorter than what lost messages take to be noticed."""
        (result,) = self.client.run(self.program, self.x)
        self.world.settle()
        self.world.wait(1.5)
        return result

    def why(self) -> msg.Explanation:
        """Ask, and let the time pass in which hosts have to answer."""
        self.client.received.clear()
        self.client.tell(msg.Explain(7))
        self.world.settle()
        self.world.wait(1.0)
        (answer,) = self.client.of(msg.Explanation)
        assert answer.request == 7
        self.client.tell(msg.GetStatus(8))
        self.world.settle()
        check_numbers(answer.text, self.client.of(msg.Status)[-1])
        return answer

    def verdict(self) -> str:
        return self.why().text.splitlines()[0]

    def swallow(self, kind: type, to: str, first: int = 1) -> list[Any]:
        """The first such messages for this host are lost."""
        post = self.world.post
        lost: list[Any] = []

        def lossy(sender: Any, address: Any, message: object) -> None:
            if isinstance(message, kind) and address.node == to and len(lost) < first:
                lost.append(message)
            else:
                post(sender, address, message)

        self.world.post = lossy  # type: ignore[method-assign]
        return lost

    def stalls(self) -> int:
        """How often a stall was told of in any log."""
        return self.world.counters["stalls"]


def test_what_a_client_s_long_work_still_has_to_do_is_counted() -> None:
    cluster = Cluster()
    result = cluster.run()
    assert cluster.why().left == ()
    for host in ("a0", "a1", "b0", "b1"):
        cluster.swallow(msg.OfferReplica, host, first=100)
    cluster.client.tell(msg.Checkpoint(cluster.client.id(), (result,)))
    assert cluster.why().left == (("replicas are made", 4),)
    cluster = Cluster()
    for scheduler in ("a", "b"):
        for rank in range(2):
            cluster.swallow(msg.Install, f"{scheduler}{rank}", first=100)
    cluster.client.program(chain(cluster.specs))
    assert cluster.why().left == (("compilations are done", 4),)


def test_where_nothing_is_under_way_that_is_said() -> None:
    cluster = Cluster()
    assert cluster.why().text == "Nothing is under way"
    y = cluster.run()
    np.testing.assert_array_equal(cluster.client.value(y), cluster.x + 2)
    assert cluster.why().text == "Nothing is under way"
    cluster.world.wait(10 * STALL_S)
    assert cluster.stalls() == 0


def test_a_lost_credit_is_found_by_comparing_both_ends() -> None:
    """The receiver has said where the bytes go, and the sender has not heard of it."""
    for seed in range(10):
        cluster = Cluster(LARGE, seed)
        cluster.swallow(msg.EdgeCredit, to="a1")
        cluster.run()
        story = cluster.why()
        verdict = story.text.splitlines()[0]
        assert verdict.startswith("a1 has not delivered transfer 0 (shard 1, 16384 bytes) to b1")
        assert "though b1 has told it" in verdict
        assert "'stage 1' (run 1.5 of client 1 (client), program 'chain')" in verdict
        assert verdict.endswith("has not ended, launched 1.5 s ago on b0, b1")
        assert "from a1: credit sent, 0 bytes are here, open for 1.5 s" in story.text
        a1 = next(host for host in story.hosts if host.host == "a1")
        (edge,) = a1.edges
        assert (edge.state, edge.peer, edge.incoming) == ("no credit", "b1", False)


def test_a_small_edge_that_was_lost_on_its_way() -> None:
    cluster = Cluster(SMALL)
    cluster.swallow(msg.EdgeData, to="b0")
    cluster.run()
    verdict = cluster.verdict()
    assert verdict.startswith("a0 has not delivered transfer 0 (shard 0, 32 bytes) to b0")
    assert "'stage 1'" in verdict


def test_a_launch_that_was_lost() -> None:
    cluster = Cluster()
    cluster.swallow(msg.Launch, to="a1")
    cluster.run()
    story = cluster.why()
    assert story.text.startswith("a1 (shard 1) has not got the launch of 'stage 0'")
    assert "    a0 (shard 0): entered" in story.text


def test_a_program_that_is_not_compiled_is_its_clients() -> None:
    cluster = Cluster()
    lost = cluster.swallow(msg.Install, to="b1")
    cluster.program = cluster.client.program(chain(cluster.specs))
    cluster.run()
    assert lost
    assert "program 'chain' of client 1 (client) has not been compiled by b1" in cluster.why().text


def test_a_host_that_does_not_answer() -> None:
    """It is asked with the others, and the others' answers are not waited for longer than hers."""
    cluster = Cluster()
    cluster.swallow(msg.Launch, to="b1")
    cluster.swallow(msg.ExplainHost, to="b1", first=100)
    cluster.run()
    story = cluster.why()
    assert story.text.startswith("b1 (shard 1) does not answer. That is why 'stage 1'")
    assert [silence.host for silence in story.silent] == ["b1"]
    assert {report.host for report in story.hosts} == {"a0", "a1", "b0"}


def test_a_host_answers_for_itself_and_what_it_was_asked() -> None:
    cluster = Cluster()
    for host in ("a0", "b1"):
        cluster.swallow(msg.ExplainHost, to=host, first=100)
    cluster.client.tell(msg.Explain(7))
    cluster.world.settle()
    for number in range(3):
        forged = msg.HostReport(number, "b1", "", 0.0, 0, (), (), ())
        cluster.world.post(executor_of("a0"), CONTROL, forged)
        cluster.world.post(executor_of("b1"), CONTROL, msg.HostMeasured(number, ()))
        cluster.world.post(store_of("b1"), CONTROL, forged)
        cluster.client.tell(forged)
    cluster.world.settle()
    cluster.world.wait(1.0)
    (story,) = cluster.client.of(msg.Explanation)
    assert [silence.host for silence in story.silent] == ["a0", "b1"]


def told(run: int, *hosts: msg.HostReport) -> str:
    """The verdict on a run that has been launched on these hosts, and does not end."""
    work = msg.WorkReport(run, 0, "p", ("f",), (hosts[0].host,), ((0,),), 99.0)
    island = msg.IslandReport(1, "i", ("h0", "h1"), 99.0, 1, 0, (work,), (), ())
    return next(story(msg.Explanation(1, "", (), (island,), hosts, (), ())))


def test_nobody_is_held_up_by_what_other_clients_wait_for() -> None:
    mine, theirs = client_id(2, 5), client_id(1, 5)
    edge = msg.EdgeReport(mine, 3, "h0", True, "awaited")
    waiting = msg.LaunchReport(mine, 0, "p", ("f",), "waiting", ((mine, 3),))
    here = msg.HostReport(1, "h1", "", 99.0, 1, (waiting,), (edge,), ())
    other = msg.LaunchReport(theirs, 0, "q", ("g",), "waiting", ((theirs, 4),))
    there = msg.HostReport(1, "h0", "", 99.0, 1, (other,), (), ())
    assert "has nothing left to send" in told(mine, here, there)
    next_ = msg.LaunchReport(client_id(2, 4), 0, "r", ("before",), "waiting")
    there = msgspec.structs.replace(there, launches=(other, next_))
    assert "has not come to sending transfer 3" in told(mine, here, there)
    assert "it waits at 'before'" in told(mine, here, there)
    copies = msg.LaunchReport(client_id(2, 0), 0, "copies", (), "waiting")
    queued = msgspec.structs.replace(waiting, state="queued")
    here = msgspec.structs.replace(here, launches=(other, copies, queued))
    assert "'f' is queued behind copies" in told(mine, here)
    here = msgspec.structs.replace(here, launches=(other, queued))
    assert "'f' is queued behind 'g'" in told(mine, here), "a gang waits for all"


def test_a_function_that_a_client_has_not_answered_is_not_the_fault_of_the_host() -> None:
    run = client_id(2, 5)
    work = msg.WorkReport(run, 0, "p", ("f",), ("h0", "h1"), ((0,), (1,)), 99.0)
    island = msg.IslandReport(1, "i", ("h0", "h1"), 99.0, 1, 0, (work,), (), ())
    launch = msg.LaunchReport(run, 0, "p", ("f",), "submitted")
    calls = ((1, 3.0), (2, 61.0))
    hosts = (
        msg.HostReport(1, "h0", "", 99.0, 1, (launch,), (), ()),
        msg.HostReport(1, "h1", "", 99.0, 1, (launch,), (), (), calls),
    )
    client = msg.ClientReport(2, "train.py", 1, 0, (), 15.0)
    lines = list(story(msg.Explanation(1, "", (), (island,), hosts, (), (client,))))
    waits = "a function in the process of client 2 (train.py) (it is silent for 15 s), called 61.0 s ago"
    assert lines[0].startswith(f"h1 (shard 1) waits for {waits}. ")
    assert f"  a computation waits for {waits}" in lines


def test_what_waits_for_an_upload_names_the_hosts_that_have_not_got_it() -> None:
    cluster = Cluster(LARGE)
    client, spec = cluster.client, cluster.specs[0]
    array = client.id()
    client.tell(msg.CreateArray(array, spec, 1))
    client.run(cluster.program, array)
    cluster.world.settle()
    text = cluster.why().text
    assert text.startswith("client 1 (client) waits for array 4 to arrive on a0, a1")
    assert "waits for the upload of its arguments (array 4)" in text
    assert "part 0 of the same program to be launched on another island" in text


def test_clients_that_wait_for_lost_hosts_are_named() -> None:
    cluster = Cluster()
    cluster.world.kill("a1")
    cluster.world.settle()
    cluster.client.run(cluster.program, cluster.x)
    cluster.world.settle()
    text = cluster.why().text
    assert text.startswith("client 1 (client) waits for lost hosts of the island of 1 slice")
    assert "1 message held" in text


def test_a_host_that_a_slice_names_is_named() -> None:
    cluster = Cluster()
    cluster.client.slice(1, hosts=("b1",))
    cluster.world.settle()
    cluster.world.kill("b1")
    cluster.world.settle()
    verdict = cluster.verdict()
    assert verdict.startswith("client 1 (client) waits for b1, which its slices name (hosts=), to")


def test_devices_that_have_not_come_yet_are_said() -> None:
    cluster = Cluster()
    cluster.world.host("c0", "c", 2)
    cluster.world.settle()
    cluster.client.slice(2, island="c")
    cluster.world.settle()
    verdict = cluster.verdict()
    assert verdict.startswith("client 1 (client) waits for 2 devices that no island has yet")


def test_a_client_has_few_questions_open() -> None:
    """Each costs the controller and the hosts time in which other clients wait."""
    cluster = Cluster()
    client, other = cluster.client, join(cluster.world, "other")
    cluster.swallow(msg.ExplainHost, to="b1", first=100)
    cluster.swallow(msg.MeasureHost, to="b1", first=100)
    host = msg.HostInfo("b1", "b", "ready", 2, 1, "", False)
    cluster.islands.append(msg.IslandInfo("b", "ready", "cpu", "", (host,), 1, (), 2, 0, 0, 0))
    for ask, answer in ((msg.Explain, msg.Explanation), (msg.GetMemory, msg.Memory)):
        client.received.clear()
        for request in range(100, 105):
            client.tell(ask(request))
        other.tell(ask(105))
        cluster.world.settle()
        (refused,) = client.of(msg.RequestFailed)
        assert refused.request == 104
        assert "has asked 4 times" in refused.error.message
        cluster.world.wait(1.0)
        assert [one.request for one in client.of(answer)] == [100, 101, 102, 103]
        assert [one.request for one in other.of(answer)] == [105]
        client.tell(ask(106))
        cluster.world.settle()
        cluster.world.wait(1.0)
        assert [one.request for one in client.of(answer)][4:] == [106]


# --- unasked -------------------------------------------------------------------------------------------


def test_a_stall_is_logged_once_and_the_next_one_again() -> None:
    cluster = Cluster(LARGE)
    (lost,) = (cluster.swallow(msg.Launch, to="a1"),)
    cluster.run()
    cluster.world.wait(STALL_S - 2.0)
    assert cluster.stalls() == 0
    cluster.world.wait(STALL_S)
    # Both islands have work that does not end, and both hosts of the second one wait at their heads.
    assert cluster.stalls() == 4
    assert ("warning", "stalled") in cluster.world.logged
    cluster.world.wait(5 * STALL_S)
    assert cluster.stalls() == 4
    cluster.world.post(scheduler_of("a"), executor_of("a1"), lost[0])
    cluster.world.settle()
    cluster.world.wait(5 * STALL_S)
    assert cluster.stalls() == 4
    assert cluster.why().text == "Nothing is under way"


def test_a_watchdog_counts_from_what_went_on_last() -> None:
    class Env:
        def __init__(self) -> None:
            self.now = 0.0
            self.alarms: list[Alarm] = []

        def now_s(self) -> float:
            return self.now

        def call_later(self, delay_s: float, note: object) -> None:
            assert isinstance(note, LookForStall)
            self.alarms.append(Alarm(self.now + delay_s, None, note))  # type: ignore[arg-type]

    env = Env()
    watchdog = Watchdog(env, 10.0)  # type: ignore[arg-type]

    def look(under_way: bool = True) -> bool:
        (alarm,) = env.alarms
        env.alarms.clear()
        env.now = alarm.due_s
        return watchdog.stalled(under_way)

    watchdog.watch()
    watchdog.watch()
    env.now = 4.0
    watchdog.went_on()
    assert not look()
    assert env.now == 10.0
    assert look()
    assert env.now == 14.0
    assert not look(), "it was told"
    watchdog.went_on()
    assert look(), "something went on in between, and stopped again"
    assert not look(under_way=False)
    assert env.alarms == []


# --- real hosts ----------------------------------------------------------------------------------------


def all_reduce(x: jax.Array) -> jax.Array:
    return x + jnp.sum(x)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the daemons of `pair` say."""
    return tmp_path_factory.mktemp("why") / "log"


@pytest.fixture(scope="module")
def pair(log: Path) -> Iterator[pw.LocalCluster]:
    """An island of two hosts that takes its time before it gives one up."""
    error = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            cluster = pw.LocalCluster(
                hosts_per_island=2,
                heartbeat_s=20.0,
                lease_s=60.0,
                allow_python=True,
                stall_s=1.0,
                log_level="warning",
            )
        finally:
            os.dup2(error, 2)
            os.close(error)
    with cluster:
        yield cluster


def story_about(words: str, detail: str = "") -> str:
    """What `pw.why` says, as soon as its first line has these words in it, and a later one the detail."""
    told: list[str] = []

    def is_told() -> bool:
        told.append(pw.why())
        return words in told[-1].splitlines()[0] and detail in told[-1]

    until(is_told, f"{words!r} in {told[-1:]}")
    check_numbers(told[-1], current.runtime().ask.status(20.0))
    return told[-1]


@pytest.mark.processes
def test_a_stopped_host_is_named_by_the_call_the_command_the_timeout_and_the_log(
    pair: pw.LocalCluster, log: Path, tmp_path: Path
) -> None:
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
    f = pw.jit(all_reduce, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    x = np.ones(4, np.float32)
    np.asarray(f(x))
    stopped = pair.hosts[1].runtime_pid()
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    try:
        y = f(x)
        guilty = "island-0-host-1 (shard 1) does not answer (nothing was heard of it for "
        story = story_about(guilty, "island-0-host-0 (shard 0): entered")
        verdict = story.splitlines()[0]
        assert "That is why 'all_reduce' (run " in verdict
        assert "program 'all_reduce') has not ended" in verdict
        assert "pw-execute: at the computation 'all_reduce'" in story
        assert "jax/enqueue.py:" in story

        with pytest.raises(TimeoutError) as caught:
            pw.checkpoint(y).result(POLL_S)
        assert str(caught.value).startswith(f"not within {POLL_S:g} s. {guilty}")

        command = start_module(
            "pw.cli.main", "why", "--json", folder=tmp_path, PW_ADDRESS=pair.address
        )
        assert command.end() == 0, command.err
        document = json.loads(command.out)
        assert document["verdict"].startswith(guilty)
        assert [silence["host"] for silence in document["silent"]] == ["island-0-host-1"]
        (work,) = document["work"][0]["oldest"]
        assert work["computations"] == ["all_reduce"]

        until(lambda: "stalled node=controller" in log.read_text(), "a stall in the log")
        assert guilty in log.read_text()
    finally:
        os.kill(stopped, signal.SIGCONT)
    np.testing.assert_array_equal(np.asarray(y), x * 5)


@pytest.mark.processes
def test_a_peer_that_is_late_for_a_collective_is_named(
    pair: pw.LocalCluster, tmp_path: Path
) -> None:
    """Its execute thread is held by a Python function, while the other host is in the all-reduce already."""
    part = pw.make_virtual_device_set().add_slice(devices=2)
    mesh = pw.Mesh(part.devices, ("x",))
    flag = str(tmp_path / "go")

    def late(x: np.ndarray) -> np.ndarray:
        import os
        import time

        while not os.path.exists(flag):
            time.sleep(0.01)
        return x

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    read = pw.host_function(late, shape, devices=part.devices[1:])
    use = pw.jit(lambda x: x * 2, devices=part.devices[1:])
    f = pw.jit(all_reduce, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    x = np.ones(4, np.float32)
    np.asarray(f(x))
    used = use(read(np.ones(2, np.float32)))
    y = f(x)
    try:
        words = "island-0-host-1 (shard 0) has not finished 'late': it has been at"
        story = story_about(words, "test_why.py:")  # once its process has begun
        assert "the Python function 'late'" in story.splitlines()[0]
        _, _, reduce = story.partition("\n  'all_reduce'")
        assert "island-0-host-0 (shard 0): entered" in reduce
        assert "island-0-host-1 (shard 1): submitted" in reduce
    finally:
        Path(flag).touch()
    np.testing.assert_array_equal(np.asarray(used), [2, 2])
    np.testing.assert_array_equal(np.asarray(y), x * 5)


# --- timeouts ------------------------------------------------------------------------------------------


def test_a_run_that_is_overdue_fails_with_what_it_waits_for() -> None:
    cluster = Cluster()
    body = msgspec.structs.replace(chain(cluster.specs), timeout_s=1.0)
    cluster.program = cluster.client.program(body)
    cluster.world.settle()
    cluster.swallow(msg.Launch, to="a1")
    error = cluster.client.failed[cluster.run()]
    assert error.kind == "ComputationTimeout"
    assert "a1 (shard 1) has not got the launch of 'stage 0'. That is why" in error.message
    assert "pw-execute: at the computation 'stage 0'" in error.message


def test_a_timeout_says_what_is_in_the_way() -> None:
    with InProcessCluster(islands=1, devices_per_island=2) as cluster:
        mesh = mesh_on(0)
        f = pw.jit(lambda x: x + 1, mesh=mesh)
        np.asarray(f(np.float32(1)))
        with held(cluster):
            y = f(np.float32(2))
            session = pw.connect()
            for wait in (
                session.wait([(number_of(y), type_of(y).spec)]),
                session.fetch(number_of(y), type_of(y).spec),
            ):
                with pytest.raises(TimeoutError, match=r"host-0 \(shards 0-1\) has not enqueued"):
                    wait.result(1.5 * BUSY_S)  # it may be launched a little later
        assert float(y) == 3


def test_who_only_polls_is_not_kept_waiting() -> None:
    def explain() -> str:
        raise AssertionError("was not asked")

    with pytest.raises(TimeoutError, match=r"^not within 0 s; pw\.why\(\) says why"):
        Waiting[int](explain).result(0)


def test_what_failed_with_a_timeout_is_not_explained() -> None:
    future: Future[int] = Waiting(lambda: "explained")
    future.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match=r"^its own$"):
        future.result(POLL_S)


def test_a_part_of_a_program_is_called_after_what_all_its_hosts_compute() -> None:
    at = {4: Binding.of(4, "a", (DeviceAddress("a0", 0), DeviceAddress("a1", 0)))}
    places = [msgspec.structs.replace(split(4, 1), placement=Placement(4, (n,))) for n in (0, 1)]
    body = chain(places)
    names = names_of(msg.InstallProgram(1, body, lower(body, at).hosts, ()))
    assert names.segments == {0: ("stage 0", "stage 1")}
