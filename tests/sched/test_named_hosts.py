"""Slices that name hosts: where they are bound, what they wait for, and what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.core import messages as msg
from pw.core.ids import CONTROL, executor_of, session_of
from pw.core.waits import MOVE_S
from pw.sched.cluster.epochs import REJOIN_S
from pw.sched.cluster.slices import RESUME_S
from pw.testing import InProcessCluster
from tests.sched.test_resources import Bench
from tests.stages.daemons import until


class Named(Bench):
    """Islands whose hosts may run Python."""

    def island(self, name: str, hosts: int, devices: int, epoch: int = 1, python: str = "") -> None:
        nodes = [f"{name}{rank}" for rank in range(hosts)]
        for node in nodes:
            self.register(node, name, hosts, devices, python=node in python.split())
        for node in nodes:
            self.joined(node, epoch, devices, name)

    def register(self, node: str, island: str, hosts: int, devices: int = 2, **how: Any) -> None:
        said = msg.RegisterHost(island, hosts, devices, "cpu", f"at {node}", 7, **how)
        self.say(executor_of(node), said)

    def want(self, number: int, devices: int, *hosts: str, **how: Any) -> Any:
        self.say(CONTROL, msg.AllocateSlice(number, devices, None, None, None, hosts=hosts, **how))
        return self.world.to(CONTROL)[-1]

    def on(self, number: int) -> list[str]:
        """The hosts of a slice, as it was bound last."""
        return [d.host for d in self.bindings(number)[-1].devices]

    def bindings(self, number: int) -> list[msg.SliceBound]:
        return [one for one in self.news(msg.SliceBound) if one.slice == number]

    def replace(self, node: str, spare: str) -> None:
        """Lose a host of island `a`, whose other host is a0, for so long that a spare has its place."""
        self.register(spare, "", 0, spare=True)
        self.lose(node)
        self.register("a0", "a", 2, spare=True)
        self.world.wait(REJOIN_S + 1)
        island = self.manager.inventory.islands["a"]
        assert island.ranks == ["a0", spare]
        for one in island.ranks:
            self.joined(one, island.epoch, 2, "a")


def test_a_slice_has_as_many_devices_of_each_named_host() -> None:
    bench = Named()
    bench.island("a", 3, 2)
    bench.ask(1, 2)
    assert bench.want(2, 2, "a2", "a0") is not None
    assert [(d.host, d.ordinal) for d in bench.bindings(2)[-1].devices] == [("a2", 0), ("a0", 0)]
    bench.want(3, 1, "a2")
    assert bench.bindings(3)[-1].devices[0].ordinal == 1, "the device that is used the least"


@pytest.mark.parametrize(
    ("devices", "hosts", "kind", "words"),
    [
        (
            1,
            ["nowhere"],
            "InsufficientDevices",
            "host 'nowhere' .* not connected.* are: a0, a1, b0",
        ),
        (1, ["s"], "InsufficientDevices", "host 's' has no place .* is spare"),
        (2, ["a0", "b0"], "InsufficientDevices", "no island has 2 devices on a0, b0 together"),
        (3, ["b0"], "InsufficientDevices", "no island has 3 devices on b0"),
        (
            1,
            ["a0"],
            "PythonRefused",
            "host 'a0' runs no .*--allow-python, or LocalCluster.allow_python=True.. Hosts that do are: a1",
        ),
    ],
)
def test_hosts_that_cannot_be_had(devices: int, hosts: list[str], kind: str, words: str) -> None:
    bench = Named()
    bench.island("a", 2, 2, python="a1")
    bench.island("b", 1, 2)
    bench.register("s", "", 0, spare=True)
    refused = bench.want(1, devices, *hosts, python=kind == "PythonRefused")
    assert isinstance(refused, msg.SliceRefused)
    with pytest.raises(getattr(pw, kind), match=words):
        raise refused.error.exception()


def test_any_host_that_runs_python() -> None:
    bench = Named()
    bench.island("a", 1, 2)
    refused = bench.want(1, 1, python=True)
    assert refused.error.kind == "PythonRefused"
    bench.island("b", 4, 2, python="b1 b2")
    for number in range(2, 8):
        bench.want(number, 1, python=True)
        assert bench.on(number)[0] in ("b1", "b2")
    bench.say(CONTROL, msg.AllocateSlice(8, 2, None, None, None, host_count=2, python=True))
    assert bench.on(8) == ["b1", "b2"]
    bench.say(CONTROL, msg.AllocateSlice(10, 3, None, None, None, host_count=3, python=True))
    refused = bench.news(msg.SliceRefused)[-1]
    assert "no island has 3 hosts that run Python" in refused.error.message
    too_many = bench.want(9, 5, python=True)
    assert "5 devices, on hosts that run Python functions" in too_many.error.message


def test_a_slice_waits_for_the_host_that_it_names() -> None:
    bench = Named()
    bench.island("a", 2, 2)
    bench.want(1, 2, "a1")
    bench.want(2, 2, "a0")
    bench.ask(3, 2)
    before = len(bench.bindings(1))
    bench.replace("a1", "s")
    assert bench.on(2) == ["a0", "a0"]
    assert len(bench.bindings(3)) == 2, "the slices that name no host go on"
    bench.world.wait(RESUME_S + MOVE_S)
    assert len(bench.bindings(1)) == before, "it goes to no other host"
    assert not bench.news(msg.SliceRefused)
    bench.replace("s", "a1")
    assert len(bench.bindings(1)) == before + 1
    assert bench.on(1) == ["a1", "a1"]


def test_a_host_that_a_slice_names_is_not_drained() -> None:
    bench = Named()
    bench.island("a", 2, 2)
    bench.register("s", "", 0, spare=True)
    bench.want(1, 2, "a1")
    asker = session_of("c")
    bench.say(CONTROL, msg.DrainHost(1, "a1", "c"))
    (answer,) = bench.world.to(asker, msg.Answered)
    assert answer.error is not None
    assert "1 slice may be on no other host" in answer.error.message
    bench.say(CONTROL, msg.ReleaseSlice(1))
    bench.say(CONTROL, msg.DrainHost(2, "a1", "c"))
    assert len(bench.world.to(asker, msg.Answered)) == 1, "it is drained now"


def test_a_host_that_comes_back_without_python_is_told() -> None:
    bench = Named()
    bench.island("a", 2, 2, python="a1")
    bench.want(1, 1, "a1", python=True)
    bench.replace("a1", "s")
    bench.replace("s", "a1")
    (refused,) = bench.news(msg.SliceRefused)
    assert refused.error.kind == "PythonRefused"


# --- what a script sees -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=3, devices_per_island=2) as cluster:
        yield cluster


def ours(*, part: pw.Part) -> np.ndarray:
    return np.arange(4, dtype=np.float32)[part.slices[0]] + 1


ROW = jax.ShapeDtypeStruct((4,), jnp.float32)


def test_a_host_function_runs_where_it_is_told_and_feeds_other_islands(
    cluster: InProcessCluster,
) -> None:
    there = pw.make_virtual_device_set().add_slice(devices=2, island="island-0")
    double = pw.jit(lambda x: x * 2, devices=there)
    read = pw.host_function(ours, ROW, hosts="host-2", out_shardings=P("hosts"))

    @pw.program
    def both():
        return double(read())

    for _ in range(2):
        result = both()
        np.testing.assert_array_equal(np.asarray(result), [2, 4, 6, 8])
    assert result.sharding.mesh.devices[0].island == "island-0"
    assert read().sharding.mesh.devices[0].island == "island-2"
    anywhere = pw.host_function(lambda: np.ones(4, np.float32), ROW, hosts=1)
    np.testing.assert_array_equal(np.asarray(double(anywhere())), [2, 2, 2, 2])


def test_a_slice_on_named_hosts(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set()
    assert devices.add_slice(devices=2, hosts=["host-1"]).island == "island-1"
    assert devices.add_slice(devices=1, hosts="host-2").island == "island-2"


@pytest.mark.parametrize(
    ("hosts", "error", "words"),
    [
        ("host-7", pw.InsufficientDevices, "host 'host-7' .* are: host-0, host-1, host-2"),
        (["host-0", "host-1"], pw.InsufficientDevices, "on host-0, host-1 together"),
        (
            5,
            pw.InsufficientDevices,
            r"^no island has 5 hosts that run Python functions of clients. Islands are: [^;]*1 host\).* Hosts "
            "that run Python functions are: host-0, host-1, host-2; ask for as many of one island with hosts=$",
        ),
        ([], ValueError, "names of hosts"),
        (["host-0", "host-0"], ValueError, "twice"),
        (0, ValueError, "at least 1"),
    ],
)
def test_a_function_that_cannot_be_placed(
    cluster: InProcessCluster, hosts: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        pw.host_function(ours, ROW, hosts=hosts)


def test_more_islands_than_there_are(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set()
    words = (
        "^8 devices do not fit on 4 different islands: no island besides the 3 islands of the other"
    )
    with pytest.raises(pw.InsufficientDevices, match=words):
        devices.add_slice(devices=8, islands=4)
    assert devices.slices == ()


def test_hosts_go_with_nothing_else(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set()
    with pytest.raises(pw.ArgumentError, match="not both"):
        pw.host_function(ours, ROW, hosts=1, devices=devices.add_slice(devices=1))
    with pytest.raises(TypeError, match="without islands= and topology="):
        devices.add_slice(devices=2, hosts="host-0", topology=(1, 2))
    with pytest.raises(ValueError, match="3 devices do not divide over 2 hosts"):
        devices.add_slice(devices=3, hosts=["host-0", "host-1"])


# --- on real processes --------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_function_waits_for_its_host_though_a_spare_has_its_place() -> None:
    with pw.LocalCluster(spare_hosts=1, heartbeat_s=0.3, allow_python=True) as cluster:
        until(lambda: pw.status().other_hosts, "the spare")
        host = next(one for one in cluster.hosts if one.name == "island-0-host-0")
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        parent = pw.host_function(lambda: np.int32(os.getppid()), shape, hosts=host.name)
        assert int(parent()) == host.runtime_pid()
        family = [host.pid, host.runtime_pid()]
        for process in family:
            os.kill(process, signal.SIGSTOP)
        members = lambda: [one.name for one in pw.status().islands[0].hosts]  # noqa: E731
        until(lambda: members() == ["spare-0"], "a spare in its place")
        pending = parent()
        assert host.name in pw.why().splitlines()[0]
        (me,) = pw.status().clients
        assert me.awaited_hosts == (host.name,)
        assert not pending.is_ready()
        for process in family:
            os.kill(process, signal.SIGCONT)
        until(lambda: host.name in [one.name for one in pw.status().other_hosts], "its return")
        pw.drain("spare-0")
        assert int(pending) == host.runtime_pid()
        assert not pw.status().clients[0].awaited_hosts
