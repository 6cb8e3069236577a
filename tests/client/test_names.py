"""Arrays by name: one session publishes, others look up, on real devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pw
from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.testing import InProcessCluster
from tests.stages.daemons import until

DEVICES = 4
P = pw.PartitionSpec


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=DEVICES, connect=False) as cluster:
        yield cluster


class Users:
    """A trainer and a server: each is a session, of which one is the current one of this process."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster
        self.trainer, self.server = cluster.client(), cluster.client()

    def use(self, session: Runtime) -> None:
        current.use(session)

    def close(self) -> None:
        for session in (self.trainer, self.server):
            session.close()


@pytest.fixture
def users(cluster: InProcessCluster) -> Iterator[Users]:
    users = Users(cluster)
    users.use(users.trainer)
    yield users
    users.close()
    watcher = cluster.client()
    until(lambda: watcher.ask.names().names == (), "no name is left")
    until(lambda: watcher.stats()["controller"]["live_arrays"] == 0, "no holder is left")
    until(lambda: watcher.stats()["controller"]["offers"] == 0, "no offer is left")
    until(lambda: bytes_held(watcher) == 0, "no host has anything")
    watcher.close()
    current.use(None)


def bytes_held(session: Runtime) -> int:
    stats = session.stats()
    return sum(of["live_bytes"] for node, of in stats.items() if node.startswith("host-"))


def mesh_on(island: int, devices: int = DEVICES) -> pw.Mesh:
    added = pw.make_virtual_device_set().add_slice(devices=devices, island=f"island-{island}")
    return pw.Mesh(added.devices, ("x",))


def rows(mesh: pw.Mesh) -> pw.NamedSharding:
    return pw.NamedSharding(mesh, P("x"))


def weights(mesh: pw.Mesh, value: float = 0.0) -> dict[str, Any]:
    w = np.arange(64, dtype=np.float32).reshape(8, 8) + value
    b = np.full(8, value, np.float32)
    w, b = pw.put((w, b), sharding=(rows(mesh), pw.NamedSharding(mesh, P())))
    return {"layer": [w, b], "step": int(value), "kind": "mlp", "none": None}


def check(tree: Any, value: float) -> None:
    w, b = tree["layer"]
    np.testing.assert_array_equal(w, np.arange(64, dtype=np.float32).reshape(8, 8) + value)
    np.testing.assert_array_equal(b, np.full(8, value, np.float32))
    assert (tree["step"], tree["kind"], tree["none"]) == (int(value), "mlp", None)


def test_a_name_is_looked_up_where_its_arrays_lie(users: Users) -> None:
    tree = weights(mesh_on(0), 3.0)
    assert pw.publish("first", tree).result(60) == 1
    held = bytes_held(users.trainer)
    users.use(users.server)
    found = pw.lookup("first")
    check(found, 3.0)
    assert pw.version_of(found) == 1
    assert found["layer"][0].sharding.spec == P("x")
    assert bytes_held(users.server) == held, "the arrays lie in memory once"
    info = pw.names()["first"]
    assert (info.version, info.readers, info.arrays, info.size_bytes) == (1, 1, 2, 64 * 4 + 8 * 4)
    assert "first" in str(pw.names())


def test_the_publisher_may_delete_and_donate_what_it_has_published(users: Users) -> None:
    mesh = mesh_on(0)
    tree = weights(mesh, 1.0)
    pw.publish("base", tree)
    w, b = tree["layer"]
    grown = pw.jit(lambda w: w + 1, mesh=mesh, donate_argnums=0)(w)
    b.delete()
    users.use(users.server)
    check(pw.lookup("base", wait=60), 1.0)
    np.testing.assert_array_equal(grown, np.arange(64, dtype=np.float32).reshape(8, 8) + 2)


def test_a_lookup_is_read_only(users: Users) -> None:
    mesh = mesh_on(0)
    pw.publish("read", weights(mesh))
    found = pw.lookup("read")
    double = pw.jit(lambda w: 2 * w, mesh=mesh_of(found), donate_argnums=0)
    with pytest.raises(pw.ArgumentError, match="version 1 of 'read' and read-only"):
        double(found["layer"][0])
    check(found, 0.0)
    copied = pw.jit(lambda w: w + 0, mesh=mesh_of(found))(found["layer"][0])
    np.testing.assert_array_equal(double(copied), 2 * np.arange(64, dtype=np.float32).reshape(8, 8))


def mesh_of(tree: Any) -> Any:
    return tree["layer"][0].sharding.mesh


def test_a_version_replaces_the_one_before_it_and_stays_for_its_readers(users: Users) -> None:
    mesh = mesh_on(0)
    pw.publish("replaced", weights(mesh, 1.0)).result(60)
    users.use(users.server)
    old = pw.lookup("replaced")
    users.use(users.trainer)
    assert pw.publish("replaced", weights(mesh, 2.0)).result(60) == 2
    assert pw.names()["replaced"].versions == (1, 2)
    users.use(users.server)
    check(pw.lookup("replaced"), 2.0)
    check(pw.lookup("replaced", version=1), 1.0)
    check(old, 1.0)
    del old
    until(lambda: pw.names()["replaced"].versions == (2,), "version 1 goes")
    with pytest.raises(pw.NameNotFound, match="version 1 of 'replaced' is gone; the newest is 2"):
        pw.lookup("replaced", version=1)
    match = "newest version of .replaced. is 2; it has no version after 2 yet"
    with pytest.raises(pw.NameNotFound, match=match):
        pw.lookup("replaced", after=2)


def test_a_lookup_waits_for_a_publisher_and_for_a_version(users: Users) -> None:
    users.use(users.server)
    with pytest.raises(pw.NameNotFound, match="nothing is published as 'awaited'"):
        pw.lookup("awaited")
    with pytest.raises(pw.NameNotFound, match="nothing is published as 'awaited'"):
        pw.lookup("awaited", wait=0.05)
    first, second = (users.server.ask.look_up("awaited", 0, after, 60.0) for after in (0, 1))
    users.use(users.trainer)
    mesh = mesh_on(0)
    pw.publish("awaited", weights(mesh, 1.0))
    assert first.result(60).version == 1
    assert not second.done()
    pw.publish("awaited", weights(mesh, 2.0))
    assert second.result(60).version == 2


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_lookup_elsewhere_moves_only_what_it_asks_for(users: Users, devices: int) -> None:
    pw.publish("base", weights(mesh_on(0), 5.0)).result(60)
    users.use(users.server)
    mesh = mesh_on(1, devices)
    held = bytes_held(users.server)
    found = pw.block_until_ready(pw.lookup("base", like=rows(mesh)))
    check(found, 5.0)
    assert found["layer"][0].sharding == rows(mesh)
    w, b = 64 * 4, 8 * 4
    assert bytes_held(users.server) - held == w + b, "each shard is there once"
    again = pw.lookup(
        "base", like={"layer": found["layer"], "step": None, "kind": None, "none": None}
    )
    assert again["layer"][1].sharding == rows(mesh)
    with pytest.raises(pw.ArgumentError, match="read-only"):
        pw.jit(lambda w: 2 * w, mesh=mesh, donate_argnums=0)(found["layer"][0])


def test_what_is_no_place_for_an_array_is_an_error_of_the_lookup(users: Users) -> None:
    pw.publish("base", weights(mesh_on(0), 5.0)).result(60)
    mesh = mesh_on(1)
    for like, words in (
        (P("x"), r"has P\('x'.*\), without devices; pass pw.NamedSharding\(mesh, P\('x'"),
        (3, "has 3; it takes a pw.NamedSharding, or an array that lies on virtual devices"),
    ):
        with pytest.raises(
            pw.ShardingError, match=rf"like= of pw.lookup\('base'\), at \['layer'\]\[0\], {words}"
        ):
            pw.lookup("base", like=like)

    @pw.program
    def step(x: Any) -> Any:
        return x + pw.lookup("base", like=rows(mesh))["layer"][1]

    with pytest.raises(
        pw.TracerError, match=r"pw.lookup\(like=\) was called in a function that JAX"
    ):
        step(np.zeros(8, np.float32))


def test_arrays_of_several_islands_are_one_version(users: Users) -> None:
    both = pw.make_virtual_device_set().add_slice(devices=8, islands=2)
    mesh = pw.Mesh(np.array(both.devices).reshape(2, 4), ("i", "x"))
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    joined = pw.put(whole, sharding=pw.NamedSharding(mesh, P("i", "x")))
    apart = [pw.put(whole + at, sharding=rows(mesh_on(at))) for at in range(2)]
    pw.publish("base", {"joined": joined, "apart": apart})
    users.use(users.server)
    found = pw.lookup("base", wait=60)
    np.testing.assert_array_equal(found["joined"], whole)
    for at, one in enumerate(found["apart"]):
        np.testing.assert_array_equal(one, whole + at)


@pytest.mark.parametrize("keep", [None, True, 0.3])
def test_a_name_outlasts_its_maker_as_long_as_it_is_kept(
    users: Users, cluster: InProcessCluster, keep: Any
) -> None:
    pw.publish("base", weights(mesh_on(0), 7.0), keep=keep).result(60)
    users.use(users.server)
    held = pw.lookup("base")
    pw.block_until_ready(held)
    users.trainer.close()
    if keep is True:
        until(lambda: pw.names()["base"].maker == 0, "the maker has left")
        check(pw.lookup("base"), 7.0)
        pw.unpublish("base")
    until(lambda: "base" not in pw.names(), "the name ends")
    check(held, 7.0)
    with pytest.raises(pw.NameNotFound):
        pw.lookup("base")
    with pytest.raises(pw.NameNotFound):
        pw.unpublish("base")


def test_another_session_of_the_tenant_goes_on_with_a_name(users: Users) -> None:
    pw.publish("other", weights(mesh_on(0), 1.0), keep=True).result(60)
    users.trainer.close()
    users.use(users.server)
    assert pw.publish("other", weights(mesh_on(1), 2.0)).result(60) == 2
    check(pw.lookup("other"), 2.0)


def test_a_publication_that_fails_leaves_the_version_before_it(users: Users) -> None:
    mesh = mesh_on(0)
    pw.publish("failing", weights(mesh, 1.0)).result(60)
    tree = weights(mesh, 2.0)
    tree["layer"][1].delete()
    with pytest.raises(pw.ArrayDeleted):
        pw.publish("failing", tree)
    divided = pw.jit(lambda w: 0 / (w * 0), mesh=mesh, check_nans=True)
    tree = weights(mesh, 3.0)
    tree["layer"][0] = divided(tree["layer"][0])
    failing = pw.publish("failing", tree)
    with pytest.raises(pw.NaNFound):
        failing.result(60)
    assert "failed" in repr(failing)
    check(pw.lookup("failing"), 1.0)


def test_versions_never_mix_while_they_are_replaced(users: Users) -> None:
    """A reader that looks up all the time sees each version whole."""
    mesh = mesh_on(0)
    pw.publish("base", weights(mesh, 1.0)).result(60)
    ended = threading.Event()
    trees = [weights(mesh, float(value)) for value in range(2, 12)]

    def train() -> None:
        for tree in trees:
            pw.publish("base", tree).result(60)
        ended.set()

    thread = threading.Thread(target=train)
    users.use(users.server)
    thread.start()
    seen = []
    while not ended.is_set() or not seen or seen[-1] < 11:
        found = pw.lookup("base")
        seen.append(found["step"])
        check(found, float(found["step"]))
    thread.join(60)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "a/b"}, "without a slash"),
        ({"name": ""}, "without a slash"),
        ({"keep": "soon"}, "no duration"),
        ({"keep": -1}, "no duration"),
        ({"to": [1]}, "names of tenants"),
        ({"tree": {"x": object()}}, "of type object at .*it takes pw arrays"),
    ],
)
def test_arguments_that_nothing_can_be_published_with(
    users: Users, arguments: dict[str, Any], words: str
) -> None:
    arguments = {"name": "base", "tree": {"x": 1}} | arguments
    with pytest.raises(pw.ArgumentError, match=words):
        pw.publish(arguments.pop("name"), arguments.pop("tree"), **arguments)


def test_host_values_alone_and_large_ones_are_published(users: Users) -> None:
    large = np.arange(10_000, dtype=np.float32)
    pw.publish("numbers", {"lr": 0.5, "table": np.arange(3), "large": large})
    found = pw.lookup("numbers")
    assert found["lr"] == 0.5
    np.testing.assert_array_equal(found["table"], np.arange(3))
    np.testing.assert_array_equal(found["large"], large)
    pw.publish("numbers", {"lr": 0.25})
    assert pw.lookup("numbers") == {"lr": 0.25}


def test_a_publication_keeps_what_the_session_has_said_for_the_name(users: Users) -> None:
    tree = {"rate": 0.5}
    pw.publish("said", tree, keep=True, to="all").result(60)
    pw.publish("said", tree).result(60)
    info = pw.names()["said"]
    assert (info.version, info.keep_s, info.to) == (2, float("inf"), ("all",))
    pw.publish("said", tree, keep=False, to=()).result(60)
    info = pw.names()["said"]
    assert (info.version, info.keep_s, info.to) == (3, 0.0, ())
