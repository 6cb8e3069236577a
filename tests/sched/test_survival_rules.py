"""What training through failures on real processes has taught, as rules without processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.ids import CONTROL, RESOURCES, Address, executor_of
from pw.devices.jax.enqueue import copy
from pw.devices.jax.executables import ExecutableFiles
from tests.devices.test_replicas import Bench as ReplicasBench
from tests.sched.test_rebuild import Cluster
from tests.sched.test_resources import Bench as ResourcesBench
from tests.stages.actors import FakeHost, World
from tests.stages.scripted import SMALL, chain

X = np.arange(SMALL)


def test_a_host_whose_old_link_ends_late_is_asked_again() -> None:
    """The directory names its next incarnation before the link to the last one is found to be dead."""
    bench = ReplicasBench(b=(0, 1))
    bench.a.receive(CONTROL, msg.PeerLost("b", "moved to tcp://elsewhere"))
    bench.restore((0, "b"), (1, "b"))
    assert bench.uploaded() == [None]


@pytest.mark.parametrize("seed", range(20))
def test_copies_that_were_not_made_do_not_end_the_lineage(seed: int) -> None:
    """One of two hosts that shall keep a copy dies before it has it; then the other one does."""
    cluster = Cluster(seed, spares=1)
    client, world = cluster.client, cluster.world
    step = client.program(chain([cluster.a], donated=(0,)))
    state = client.upload(X, cluster.a)
    (state,) = client.run(step, state)
    world.settle()
    client.checkpoint(state)
    world.steps(seed * 2)
    cluster.hosts["s0"].crash()
    for _ in range(2):
        (state,) = client.run(step, state)
    world.settle()
    cluster.hosts["a1"].crash()
    (state,) = client.run(step, state)
    world.settle()
    world.wait(5)
    np.testing.assert_array_equal(client.value(state), X + 4)


def test_replicas_survive_the_crash_of_all_hosts_that_keep_them() -> None:
    cluster = Cluster(spares=1)
    client, world = cluster.client, cluster.world
    client.keeps_inputs = False
    step = client.program(chain([cluster.a], donated=(0,)))
    state = client.upload(X, cluster.a)
    (state,) = client.run(step, state)
    client.checkpoint(state)
    world.settle()
    world.wait(0.1)
    (state,) = client.run(step, state)
    world.settle()
    for name in ("a0", "a1", "s0"):
        cluster.hosts[name].crash()
    world.settle()
    world.wait(5)
    np.testing.assert_array_equal(client.value(state), X + 2)


def test_an_array_made_from_what_was_on_an_island_that_is_given_up_is_lost() -> None:
    cluster = Cluster()
    client, world = cluster.client, cluster.world
    first = client.program(chain([cluster.b]))
    second = client.program(chain([cluster.b, cluster.a], donated=()))
    (there,) = client.run(first, X)
    here = client.run(second, there)[-1]
    client.delete(there)
    world.settle()
    cluster.hosts["b0"].die()
    cluster.hosts["a1"].crash()
    world.settle()
    world.wait(31)
    world.wait(61)
    assert client.value(here).kind in ("ArrayLost", "HostLost")
    (fine,) = client.run(client.program(chain([cluster.a])), X)
    np.testing.assert_array_equal(client.value(fine), X + 1)


class Hosts(ResourcesBench):
    """Two islands of one and of two hosts, and a spare that can go anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.island("one", 1, 1)
        self.island("two", 2, 1)
        self.register("s", "")

    def register(self, node: str, island: str, hosts: int = 1) -> None:
        here = msg.RegisterHost(island, hosts, 1, "cpu", f"at {node}", 7, spare=True)
        self.say(executor_of(node), here)

    def ranks(self, island: str) -> list[str]:
        return [host.name for host in self.state(island).hosts]

    def state(self, island: str) -> msg.IslandInfo:
        (found,) = [each for each in self.manager.status({}) if each.name == island]
        return found

    def waiting(self) -> list[str]:
        return [host.name for host in self.manager.waiting_hosts()]


def test_the_place_of_a_host_that_crashed_is_kept_for_a_moment() -> None:
    bench = Hosts()
    bench.say(RESOURCES, msg.PeerLost("one0", "connection lost"))
    bench.register("one0", "one")
    assert bench.ranks("one") == ["one0"]
    assert bench.waiting() == ["s"]
    assert [host.state for host in bench.state("one").hosts] == ["joining"]
    bench.joined("one0", 2, island="one")
    assert [host.state for host in bench.state("one").hosts] == ["ready"]
    bench.say(RESOURCES, msg.PeerLost("one0", "connection lost"))
    assert bench.ranks("one") == []
    bench.world.wait(2.1)
    assert bench.ranks("one") == ["s"]


def test_the_place_of_a_host_that_is_silent_is_given_away_at_once() -> None:
    bench = Hosts()
    bench.say(RESOURCES, msg.PeerLost("one0", "silent for 3 s"))
    assert bench.ranks("one") == ["s"]


@pytest.mark.parametrize(("reason", "bound_s"), [("connection lost", 2.1), ("silent for 3 s", 0.0)])
def test_a_host_that_is_gone_is_not_awaited_because_its_gang_noticed_first(
    reason: str, bound_s: float
) -> None:
    bench = Hosts()
    bench.say(RESOURCES, msg.EndEpoch("two", 1, "the gang broke"))
    bench.say(RESOURCES, msg.PeerLost("two0", "closed"))
    bench.say(RESOURCES, msg.PeerLost("two1", reason))
    bench.register("two0", "two", 2)
    bench.world.wait(bound_s)
    assert bench.ranks("two") == ["two0", "s"]
    assert bench.state("two").state == "forming"


def test_a_host_that_a_free_spare_replaced_can_go_anywhere() -> None:
    bench = Hosts()
    bench.lose("one0")
    bench.joined("s", 2, island="one")
    bench.register("one0", "one")
    assert bench.waiting() == ["one0"]
    bench.lose("two1")
    bench.register("two0", "two", 2)
    assert bench.ranks("two") == ["two0", "one0"]
    # There it has a rank now, whatever it says of itself.
    bench.joined("two0", 2, island="two")
    bench.joined("one0", 2, island="two")
    bench.say(RESOURCES, msg.PeerLost("one0", "connection lost"))
    bench.register("two0", "two", 2)
    bench.register("one0", "one")
    assert bench.ranks("two") == ["two0", "one0"]


def test_a_spare_of_an_island_stays_there() -> None:
    bench = ResourcesBench()
    bench.island("one", 1, 1)
    bench.island("two", 1, 1)
    spare = msg.RegisterHost("one", 1, 1, "cpu", "at s", 7, spare=True)
    bench.say(executor_of("s"), spare)
    bench.lose("two0")
    assert [each.state for each in bench.manager.status({})] == ["ready", "waiting"]
    bench.lose("one0")
    assert [each.state for each in bench.manager.status({})] == ["forming", "waiting"]


def test_an_array_is_copied_whose_shards_jax_lists_twice() -> None:
    """It does when two threads ask for them for the first time at the same time."""
    array = jax.device_put(np.arange(4.0), jax.devices()[0])
    shards = [*array.addressable_shards, *array.addressable_shards]
    twice = SimpleNamespace(
        addressable_shards=shards, shape=array.shape, sharding=array.sharding, dtype=array.dtype
    )
    np.testing.assert_array_equal(copy(twice), np.arange(4.0))


def test_executables_outlive_the_process_that_compiled_them_even_if_killed_while_writing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a" / "b"
    ExecutableFiles(folder).save_with(b"1" * 32, lambda: b"first")
    (written,) = folder.iterdir()
    following = ExecutableFiles(folder)
    assert following.load_with(b"2" * 32, bytes) is None
    assert following.load_with(b"1" * 32, bytes) == b"first"
    following.save_with(b"2" * 32, lambda: b"second")
    assert (following.loaded, following.failed) == (1, 0)
    written.write_bytes(written.read_bytes()[:-1])
    last = ExecutableFiles(folder)
    assert last.load_with(b"1" * 32, bytes) is None
    assert last.load_with(b"2" * 32, bytes) == b"second"
    assert (last.loaded, last.failed) == (1, 1)


def test_a_folder_of_executables_is_bounded_and_loses_what_was_used_longest_ago(
    tmp_path: Path,
) -> None:
    compiled = bytes(1000)
    ExecutableFiles(tmp_path).save_with(b"1" * 32, lambda: compiled)
    (first,) = tmp_path.iterdir()
    size = first.stat().st_size
    os.utime(first, (1, 1))
    small = ExecutableFiles(tmp_path, limit_bytes=2 * size)
    small.save_with(b"2" * 32, lambda: compiled)
    assert small.load_with(b"1" * 32, bytes) is not None  # and so it is used
    (second,) = set(tmp_path.iterdir()) - {first}
    os.utime(second, (1, 1))
    small.save_with(b"3" * 32, lambda: compiled)
    kept = [small.load_with(bytes([key]) * 32, bytes) is not None for key in b"123"]
    assert kept == [True, False, True]


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    executables = ExecutableFiles(tmp_path)
    executables.save_with(b"1" * 32, lambda: b"compiled")
    assert executables.load_with(b"1" * 32, bytes) is None
    assert not [*tmp_path.iterdir()]
    assert executables.failed == 1


def test_what_a_controller_sent_before_it_noticed_the_loss_is_no_answer() -> None:
    """It lost several hosts at once, and told those of the first loss whose own it had yet to find."""
    world = World()
    FakeHost(world, "a0", msg.RegisterHost("a", 2, 1, "cpu", "", 1))
    address = executor_of("a0")

    def tell(sender: Address, message: object) -> None:
        world.mailboxes["a0"].append((sender, address, message))
        world.drain("a0")

    here = msg.HostRegistered(b"key")
    tell(RESOURCES, here)
    tell(address, msg.PeerLost(RESOURCES.node, "connected anew"))
    tell(RESOURCES, here)
    before = len(world.to(RESOURCES, msg.RegisterHost))
    world.wait(2.0)
    assert len(world.to(RESOURCES, msg.RegisterHost)) == before + 1
    tell(RESOURCES, here)
    world.wait(100.0)
    assert len(world.to(RESOURCES, msg.RegisterHost)) == before + 1
