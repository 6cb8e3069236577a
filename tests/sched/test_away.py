"""While an island is away, what does not need it goes on, and the rest keeps its order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, CONTROLLER, Address
from pw.sched.control.array_states import ArrayEntry
from tests.sched import test_controller_restart as restart
from tests.sched.test_rebuild import Cluster, X
from tests.stages.scripted import chain, split

LOST = ErrorReport("HostLost", "b0 was lost")


def away(**fields: Any) -> Cluster:
    """A cluster whose island a has died, and waits for one of its hosts."""
    cluster = Cluster()
    for name, value in fields.items():
        setattr(cluster.world.client(cluster.client.number), name, value)
    return cluster


def lose(cluster: Cluster) -> None:
    cluster.hosts["a0"].waits = True
    cluster.world.kill("a0")
    cluster.world.settle()
    assert cluster.world.client(cluster.client.number).away is not None


def come_back(cluster: Cluster) -> None:
    cluster.hosts["a0"].waits = False
    cluster.hosts["a0"].start()
    cluster.world.settle()
    cluster.world.wait(5)


def test_runs_on_another_island_do_not_wait_for_a_lost_one() -> None:
    cluster = away()
    client = cluster.client
    on_a, on_b = client.program(chain([cluster.a])), client.program(chain([cluster.b]))
    (first,) = client.run(on_a, X)
    cluster.world.settle()
    lose(cluster)
    (later,) = client.run(on_a, first)
    (other,) = client.run(on_b, X)
    (last,) = client.run(on_b, other)
    cluster.world.settle()
    np.testing.assert_array_equal(client.value(last), X + 2)
    assert cluster.world.client(client.number).away is not None
    assert "1 slice" in client.explanation().text
    come_back(cluster)
    np.testing.assert_array_equal(client.value(later), X + 2)
    assert client.credits == client.sent_runs


def test_what_reads_a_lost_array_waits_on_every_island() -> None:
    cluster = away()
    client = cluster.client
    over = client.program(chain([cluster.a, cluster.b]))
    on_b = client.program(chain([cluster.b]))
    cluster.world.settle()
    lose(cluster)
    (made,) = client.run(over, X)
    (read,) = client.run(on_b, made)
    cluster.world.settle()
    waiting = cluster.world.client(client.number).stream.aside.messages
    assert [type(one) for one in waiting] == [msg.Run, msg.Run]
    come_back(cluster)
    np.testing.assert_array_equal(client.value(read), X + 3)


def test_an_array_that_a_waiting_run_reads_is_neither_deleted_nor_donated_before_it() -> None:
    cluster = away()
    client = cluster.client
    over = client.program(chain([cluster.b, cluster.a]))
    donating = client.program(chain([cluster.b], donated=(0,)))
    deleted, donated = client.upload(X, cluster.b), client.upload(X + 1, cluster.b)
    cluster.world.settle()
    lose(cluster)
    (one,), (two,) = client.run(over, deleted), client.run(over, donated)
    client.delete(deleted)
    (three,) = client.run(donating, donated)
    cluster.world.settle()
    come_back(cluster)
    for array, value in ((one, X + 2), (two, X + 3), (three, X + 2)):
        np.testing.assert_array_equal(client.value(array), value)


def test_what_lost_arrays_are_made_of_is_not_deleted_while_they_wait() -> None:
    """The client has not kept the input, so nothing else could make the lost array again."""
    cluster = away()
    client = cluster.client
    client.keeps_inputs = False
    over = client.program(chain([cluster.b, cluster.a]))
    source = client.upload(X, cluster.b)
    (lost,) = client.run(over, source)
    cluster.world.settle()
    lose(cluster)
    client.delete(source)
    cluster.world.settle()
    come_back(cluster)
    np.testing.assert_array_equal(client.value(lost), X + 2)


def test_what_waits_for_an_array_goes_on_although_another_one_was_lost_when_it_came() -> None:
    """As many arrays are lost as before, but not the same ones."""
    cluster = away()
    record = cluster.world.client(cluster.client.number)
    spec = split(1, 2)
    for number in (1, 2):
        record.arrays.add(number, ArrayEntry(spec, "b", ("b0",)))
    lose(cluster)
    here, aside = record.away, record.stream.aside
    assert here is not None
    record.arrays.lose(1, LOST)
    assert aside.sift(msg.Checkpoint(1, (1,)), here) is None
    assert not aside.may_go_on(here)
    record.arrays.lose(2, LOST)
    record.arrays.bring(1, "b", ("b0",))
    assert aside.may_go_on(here)


def test_an_island_that_is_back_is_mended_while_another_is_away() -> None:
    cluster = away()
    client, world = cluster.client, cluster.world
    on_b = client.program(chain([cluster.b]))
    (held,) = client.run(on_b, X)
    world.settle()
    lose(cluster)
    cluster.hosts["b0"].crash()
    world.settle()
    world.wait(5)
    np.testing.assert_array_equal(client.value(held), X + 1)
    assert world.client(client.number).away is not None
    come_back(cluster)


@pytest.mark.parametrize("patience_s", [0.0, 7.0, 100.0])
def test_each_client_says_how_long_it_waits_for_an_island(patience_s: float) -> None:
    cluster = away(recovery_s=patience_s)
    client, world = cluster.client, cluster.world
    on_a, on_b = client.program(chain([cluster.a])), client.program(chain([cluster.b]))
    (lost,), (left,) = client.run(on_a, X), client.run(on_b, X)
    world.settle()
    cluster.hosts["a0"].waits = True
    world.kill("a0")
    world.settle()
    world.wait(max(0.0, patience_s - 1))
    assert (lost in client.failed) == (patience_s == 0.0)
    world.wait(2)
    error = client.failed[lost]
    assert error.kind == "IslandLost"
    assert f"for {patience_s:g} s" in error.message
    assert error.left == ("int64[8] that 'chain' made",) == error.lost
    np.testing.assert_array_equal(client.value(left), X + 1)
    (refused,) = client.run(on_a, X)
    world.settle()
    assert client.failed[refused].kind == "IslandLost"


def test_a_client_may_wait_for_as_long_as_it_takes() -> None:
    cluster = away(recovery_s=math.inf)
    client, world = cluster.client, cluster.world
    on_a = client.program(chain([cluster.a]))
    (lost,) = client.run(on_a, X)
    world.settle()
    lose(cluster)
    world.wait(3000)
    assert lost not in client.failed
    assert not world.to(CONTROL, msg.SliceRefused)
    come_back(cluster)
    np.testing.assert_array_equal(client.value(lost), X + 1)


def test_what_comes_twice_while_an_island_is_away_runs_once() -> None:
    """A session tells another controller of its open requests after its journal."""
    cluster = away()
    client, world = cluster.client, cluster.world
    on_a = client.program(chain([cluster.a], donated=(0,)))
    (first,) = client.run(on_a, client.upload(X, cluster.a))
    world.settle()
    (sent,) = world.to(CONTROL, msg.Run)
    lose(cluster)
    client.tell(sent)
    (later,) = client.run(on_a, first)
    repeated = world.to(CONTROL, msg.Run)[-1]
    client.tell(repeated)
    world.settle()
    come_back(cluster)
    np.testing.assert_array_equal(client.value(later), X + 2)
    assert world.client(client.number).last_run == repeated.run
    assert client.credits == client.sent_runs


def test_lookups_and_publications_elsewhere_do_not_wait_for_a_lost_island() -> None:
    cluster = away(recovery_s=math.inf)
    client, world = cluster.client, cluster.world
    over = client.program(chain([cluster.b, cluster.a]))
    world.settle()
    lose(cluster)
    client.run(over, X)
    client.tell(msg.Publish(client.id(), "base", (), b"tree"))
    client.tell(msg.Lookup(client.id(), "base"))
    client.tell(msg.Lookup(client.id(), "other", wait_s=3.0))
    world.settle()
    world.wait(4)
    assert [one.version for one in client.of(msg.Published)] == [1]
    assert [one.name for one in client.of(msg.VersionOffer)] == ["base"]
    assert [one.error.kind for one in client.of(msg.RequestFailed)] == ["NameNotFound"]
    assert len(world.client(client.number).stream) == 1, "the run waits"
    come_back(cluster)


def test_one_message_says_which_arrays_of_a_function_are_lost() -> None:
    cluster = away(recovery_s=1.0)
    client, world = cluster.client, cluster.world
    on_a = client.program(chain([cluster.a]))
    arrays = [client.run(on_a, X)[0] for _ in range(50)]
    world.settle()
    cluster.hosts["a0"].die()
    world.settle()
    world.wait(2)
    assert client.failed.keys() == set(arrays)
    assert len(client.of(msg.RunFailed)) == 1


def test_another_controller_waits_for_hosts_as_long_as_the_cluster_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No island was lost, so nothing is given up, although a host finds the controller late."""
    monkeypatch.setattr(restart.User, "recovery_s", 1.0)
    cluster = restart.Cluster(0)
    user, world = cluster.user, cluster.world
    array = user.run(user.program(chain([cluster.a])), X.tobytes())
    world.settle()
    cluster.lose()
    late: list[Any] = []
    post = world.post

    def hold(sender: Address, to: Address, message: object) -> None:
        if sender.node == "a0" and to.node == CONTROLLER:
            late.append((sender, to, message))
        else:
            post(sender, to, message)

    with monkeypatch.context() as patched:
        patched.setattr(world, "post", hold)
        cluster.start()
        cluster.time(3)
    for one in late:
        post(*one)
    cluster.time(10)
    np.testing.assert_array_equal(user.value(array), X + 1)
