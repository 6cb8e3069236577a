"""Clients that leave their devices and come back: `pw.suspend` and `pw.resume`, on real devices."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.core.errors import ArgumentError
from pw.devices.jax import making
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.stage import BOUND_S

P = pw.PartitionSpec
STEPS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2, connect=False) as cluster:
        yield cluster


@pytest.fixture
def user(cluster: InProcessCluster) -> Iterator[Runtime]:
    user = cluster.client()
    current.use(user)
    yield user
    user.close()
    current.use(None)


@pytest.fixture
def operator(cluster: InProcessCluster) -> Iterator[Runtime]:
    operator = cluster.client()
    yield operator
    operator.close()


def training(**slice_: Any) -> tuple[Any, Any]:
    """A step that donates its state, and the state's sharding on two devices."""
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2, **slice_).devices, ("x",))
    split = pw.NamedSharding(mesh, P("x"))

    @pw.jit(donate_argnums=0, out_shardings=(split, pw.NamedSharding(mesh, P())))
    def step(state: Any) -> Any:
        state = jnp.sin(state) + 0.5 * state
        return state, state.sum()

    return step, split


def losses(step: Any, split: Any, at: dict[int, Any] | None = None) -> list[float]:
    """The losses of a training; before some steps it calls a function."""
    state, results = pw.put(np.linspace(0, 1, 64, dtype=np.float32), split), []
    for number in range(STEPS):
        if at is not None and number in at:
            at[number]()
        state, loss = step(state)
        results.append(loss)
    return [float(loss) for loss in pw.get(results)]


def number(session: Runtime) -> int:
    return next(client.number for client in session.ask.status().clients if client.is_me)


def suspend(operator: Runtime, client: int) -> None:
    operator.ask.suspend(client, "", "").result(BOUND_S)


def resume(operator: Runtime, client: int) -> None:
    operator.ask.resume(client, "", "").result(BOUND_S)


def on_devices(session: Runtime) -> int:
    stats = session.stats()
    return sum(of["live_arrays"] for node, of in stats.items() if node.startswith("host-"))


@pytest.mark.parametrize("before", [1, 20, STEPS - 1])
def test_values_are_those_of_a_training_that_was_left_alone(
    user: Runtime, operator: Runtime, before: int
) -> None:
    step, split = training()
    alone = losses(step, split)
    client = number(user)

    def leave() -> None:
        suspend(operator, client)
        assert on_devices(operator) == 0
        threading.Timer(0.05, resume, (operator, client)).start()

    assert losses(step, split, {before: leave}) == alone


def test_a_client_stays_if_an_island_has_no_room_and_may_be_sent_elsewhere(
    user: Runtime, operator: Runtime
) -> None:
    step, split = training(exclusive=True, island="island-0")
    alone = losses(step, split)
    client = number(user)
    current.use(operator)
    here, there = pw.make_virtual_device_set(), pw.make_virtual_device_set()
    there.add_slice(devices=2, exclusive=True, island="island-1")
    with pytest.raises(pw.InsufficientDevices, match=r"'island-1' has no room now for 2 devices"):
        operator.ask.migrate(client, 0, "island-1").result(BOUND_S)
    current.use(user)
    assert losses(step, split) == alone
    suspend(operator, client)
    current.use(operator)
    here.add_slice(devices=2, exclusive=True, island="island-0")
    resume(operator, client)
    words = "waits for 2 devices on island island-0 (exclusive)"
    until(lambda: any(words in one.suspended for one in operator.ask.status().clients), "it waits")
    del there
    gc.collect()
    operator.ask.migrate(client, 0, "island-1").result(BOUND_S)
    current.use(user)
    assert losses(step, split) == alone
    assert split.mesh.devices.flat[0].island == "island-1"


def test_what_is_ready_is_read_while_its_client_is_suspended(
    user: Runtime, operator: Runtime
) -> None:
    """Small and large values, in parts and whole; what is not computed yet waits."""
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
    split = pw.NamedSharding(mesh, P("x"))
    double = pw.jit(lambda x: x * 2, out_shardings=split)
    small = double(pw.put(np.arange(8.0), split))
    large = double(pw.put(np.arange(2.0**18), split))
    loss = pw.jit(lambda x: x.sum())(small)
    pw.get([small, loss])  # has them made; the large one is read first when it is a copy
    large.block_until_ready()
    client = number(user)
    suspend(operator, client)
    try:
        assert on_devices(operator) == 0
        for array, wanted in ((small, np.arange(8.0) * 2), (large, np.arange(2.0**18) * 2)):
            np.testing.assert_array_equal(pw.get(array, timeout=BOUND_S), wanted)
            array.block_until_ready()
        assert float(loss) == 56.0
        later = double(large)
        with pytest.raises(TimeoutError):
            pw.get(later, timeout=0.3)
        assert on_devices(operator) == 0
    finally:
        resume(operator, client)
    np.testing.assert_array_equal(pw.get(later, timeout=BOUND_S), np.arange(2.0**18) * 4)


def test_it_goes_on_elsewhere_if_others_have_its_devices(user: Runtime, operator: Runtime) -> None:
    step, split = training(exclusive=True)
    alone = losses(step, split)
    client, homes = number(user), []
    slices = []

    def island() -> str:
        (one,) = [one for one in user.ask.status().islands if one.slices]
        return one.name

    def leave() -> None:
        homes.append(island())
        suspend(operator, client)
        current.use(operator)
        here = {"island": homes[0], "exclusive": True}
        slices.append(pw.make_virtual_device_set().add_slice(devices=2, **here))
        assert len(slices[0].devices) == 2
        current.use(user)
        resume(operator, client)

    assert losses(step, split, {20: leave}) == alone
    assert {one.name: one.slices for one in user.ask.status().islands} == {
        "island-0": 1,
        "island-1": 1,
    }


def test_a_script_may_suspend_itself(user: Runtime) -> None:
    step, split = training()
    alone = losses(step, split)
    state = pw.put(np.linspace(0, 1, 64, dtype=np.float32), split)
    pw.suspend()
    assert on_devices(user) == 0
    state, loss = step(state)
    with pytest.raises(TimeoutError, match=r"this client is suspended, by client \d+ "):
        pw.get(loss, timeout=0.6)
    pw.resume()
    assert float(loss) == alone[0]


def test_what_was_suspended_shows(user: Runtime, operator: Runtime) -> None:
    client = number(user)
    suspend(operator, client)
    (info,) = [one for one in operator.ask.status().clients if one.number == client]
    assert info.suspended.startswith("suspended, by client")
    assert "suspended, by client" in str(pw.status())
    assert "is suspended, by client" in operator.ask.explain().text
    resume(operator, client)
    until(lambda: not any(one.suspended for one in operator.ask.status().clients), "it is over")


def test_the_bound_of_a_slice_moves_with_it(user: Runtime, operator: Runtime) -> None:
    slice_ = pw.make_virtual_device_set().add_slice(devices=2, island="island-0", memory="1MiB")

    def bounded() -> set[str]:
        devices = operator.ask.memory().devices
        return {one.island for one in devices if one.slices}

    assert bounded() == {"island-0"}
    suspend(operator, number(user))
    assert bounded() == set()
    resume(operator, number(user))
    until(lambda: bounded() == {"island-0"}, "it is bound again")
    pw.migrate(slice_, island="island-1")
    until(lambda: bounded() == {"island-1"}, "it has moved")


def test_uploads_wait_and_arrive(user: Runtime, operator: Runtime) -> None:
    _, split = training()
    client = number(user)
    suspend(operator, client)
    large = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    arrays = [pw.put(np.full(64, at, np.float32), split) for at in range(3)]
    arrays.append(pw.put(large, split))
    assert on_devices(operator) == 0
    resume(operator, client)
    for at, value in enumerate(pw.get(arrays[:3])):
        np.testing.assert_array_equal(value, np.full(64, at, np.float32))
    np.testing.assert_array_equal(pw.get(arrays[3]), large)


def test_errors_come_back_as_errors(user: Runtime, operator: Runtime) -> None:
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
    broken = pw.jit(jnp.log, mesh=mesh, check_nans=True)
    value = broken(np.float32(-1))
    with pytest.raises(pw.Error, match="log"):
        pw.block_until_ready(value)
    runs = operator.stats()["controller"].get("runs_repeated", 0)
    suspend(operator, number(user))
    resume(operator, number(user))
    with pytest.raises(pw.Error, match="log"):
        pw.get(value)
    assert operator.stats()["controller"].get("runs_repeated", 0) == runs


def test_it_must_be_clear_who_is_meant(user: Runtime) -> None:
    with pytest.raises(ArgumentError, match="only one of them"):
        pw.suspend(3, tenant="research")
    with pytest.raises(ArgumentError, match="not 'train'"):
        pw.suspend("train")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="there is no client 99"):
        pw.suspend(99)
    with pytest.raises(ArgumentError, match="there is no island 'east'"):
        pw.resume(island="east")


def test_a_suspension_ends_with_its_client(cluster: InProcessCluster, operator: Runtime) -> None:
    session = cluster.client()
    current.use(session)
    step, split = training()
    losses(step, split)
    suspend(operator, number(session))
    current.use(None)
    session.close()
    until(lambda: len(operator.ask.status().clients) == 1, "it has left")
    until(lambda: operator.stats()["controller"]["live_arrays"] == 0, "nothing is left")


def test_an_island_is_left_by_all_its_clients(user: Runtime, operator: Runtime) -> None:
    step, split = training(island="island-0")
    alone = losses(step, split)

    def leave() -> None:
        operator.ask.suspend(0, "", "island-0").result(BOUND_S)
        assert on_devices(operator) == 0
        operator.ask.resume(0, "", "island-0").result(BOUND_S)

    assert losses(step, split, {5: leave, 30: leave}) == alone


def island_of(session: Runtime) -> list[str]:
    return [one.name for one in session.ask.status().islands if one.slices]


def repeated(session: Runtime) -> int:
    return session.stats()["controller"].get("runs_repeated", 0)


def test_a_training_moves_to_another_island_and_back(user: Runtime, operator: Runtime) -> None:
    step, split = training(island="island-0")
    alone = losses(step, split)
    before = repeated(operator)

    def move(island: str) -> None:
        operator.ask.migrate(number(user), 0, island).result(BOUND_S)

    def look() -> None:
        until(lambda: island_of(operator) == ["island-1"], "it is there")

    at = {10: lambda: move("island-1"), 20: look, 30: lambda: move("island-0")}
    assert losses(step, split, at) == alone
    assert island_of(operator) == ["island-0"]
    assert repeated(operator) - before <= 2 * STEPS


def test_one_slice_moves_and_the_other_stays(user: Runtime) -> None:
    slices = [pw.make_virtual_device_set().add_slice(devices=2, island="island-0") for _ in "ab"]
    meshes = [pw.Mesh(one.devices, ("x",)) for one in slices]
    values = [
        pw.put(np.arange(4.0) + at, pw.NamedSharding(mesh, P("x")))
        for at, mesh in enumerate(meshes)
    ]
    pw.migrate(slices[0], island="island-1")
    for at, value in enumerate(values):
        np.testing.assert_array_equal(pw.get(value), np.arange(4.0) + at)
    assert [one.island for one in slices] == ["island-1", "island-0"]


def test_a_slice_cannot_move_where_it_does_not_fit(user: Runtime) -> None:
    slice_ = pw.make_virtual_device_set().add_slice(devices=2)
    with pytest.raises(ArgumentError, match="there is no island 'east'"):
        pw.migrate(slice_, island="east")
    with pytest.raises(ArgumentError, match="not 'train'"):
        pw.migrate("train", island="east")  # type: ignore[arg-type]


def test_slices_move_out_of_the_way_and_then_apart(user: Runtime) -> None:
    values = {}
    for number in range(1, 5):
        slice_ = pw.make_virtual_device_set().add_slice(devices=1, exclusive=True)
        value = np.arange(1000.0 * number, dtype=np.float32)
        mesh = pw.Mesh(slice_.devices, ("x",))
        values[number] = slice_, value, pw.put(value, pw.NamedSharding(mesh, P()))
    del slice_, mesh
    for island in ("island-0", "island-1"):
        del values[next(n for n, (one, *_) in values.items() if one.island == island)]
    gc.collect()
    until(lambda: sum(one.slices for one in user.ask.status().islands) == 2, "two were given back")
    with pytest.raises(pw.InsufficientDevices):
        pw.make_virtual_device_set().add_slice(devices=2, exclusive=True)
    before = {number: one.island for number, (one, *_) in values.items()}
    shown = pw.rebalance(2, exclusive=True, dry_run=True)
    (move,) = shown.moves
    least = min(values)
    assert (move.slice, move.source) == (values[least][0].id, before[least])
    assert shown.size_bytes == move.size_bytes == 4000 * least
    assert "1 move, " in f"{shown}"
    assert {number: one.island for number, (one, *_) in values.items()} == before
    pw.rebalance(2, exclusive=True, timeout_s=BOUND_S)
    wide = pw.make_virtual_device_set().add_slice(devices=2, exclusive=True)
    assert wide.island == before[least]
    for _, value, array in values.values():
        np.testing.assert_array_equal(pw.get(array), value)
    assert not pw.rebalance().moves
    with pytest.raises(pw.InsufficientDevices, match="nothing that may move"):
        pw.rebalance(2, exclusive=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"exclusive": True}, "say how many devices"),
        ({"devices": 0}, "at least one device"),
        ({"devices": 3, "topology": (2, 2)}, "has 4 devices, and 3 are"),
        ({"devices": 2, "memory": "much"}, "memory= takes bytes"),
    ],
)
def test_what_is_no_slice_is_said(user: Runtime, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pw.rebalance(**arguments)


def counted(calls: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose calls are noted."""

    def call(*of: Any, **by_name: Any) -> Any:
        calls.append(function.__name__)
        return function(*of, **by_name)

    return call


class Held:
    """A host's compilations, which wait until they are let go."""

    def __init__(self, cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self._thread, backend = cluster.thread, cluster.hosts[1].backend
        self._calls: list[Callable[[], None]] = []
        compile = backend.compile

        def hold(*of: Any) -> None:
            self._calls.append(partial(compile, *of))

        monkeypatch.setattr(backend, "compile", hold)

    def __len__(self) -> int:
        return len(self._calls)

    def let_go(self) -> None:
        """Compile all that was asked for."""
        calls, self._calls = self._calls, []
        for call in calls:
            self._thread.call(call)


@pytest.fixture
def held(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(cluster, monkeypatch)


def compiled_ahead(session: Runtime) -> int:
    return session.stats()["host-1"].get("compiled_ahead", 0)


def replica_bytes(session: Runtime) -> list[int]:
    return [session.stats()[f"host-{at}"]["replica_bytes"] for at in range(2)]


def test_a_client_leaves_when_its_programs_are_compiled_at_its_new_place(
    user: Runtime, operator: Runtime, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in ("load", "make"):
        monkeypatch.setattr(making, name, counted(made, getattr(making, name)))
    mesh = pw.Mesh(
        pw.make_virtual_device_set().add_slice(devices=2, island="island-0").devices, ("x",)
    )
    split = pw.NamedSharding(mesh, P("x"))
    double = pw.jit(lambda x: x * 2 + 1, out_shardings=split)
    program = pw.program(lambda x: double(double(x)) + double(x))
    value = pw.put(np.arange(8.0), split)
    alone = pw.get([double(value), program(value)])
    before, made_before = compiled_ahead(operator), len(made)
    moved = operator.ask.migrate(number(user), 0, "island-1")
    until(lambda: len(held) > 0, "the new place is to compile")
    for _ in range(3):
        np.testing.assert_array_equal(pw.get(double(value)), alone[0])
    assert island_of(operator) == ["island-0"]
    assert "about to move to island island-1, by client" in str(operator.ask.status().clients)
    assert not moved.done()
    held.let_go()
    moved.result(BOUND_S)
    assert compiled_ahead(operator) - before == len(made) - made_before > 0
    made_before = len(made)
    for value_there, wanted in zip(pw.get([double(value), program(value)]), alone, strict=True):
        np.testing.assert_array_equal(value_there, wanted)
    assert island_of(operator) == ["island-1"]
    assert len(made) == made_before, "programs share what was compiled ahead"


def test_what_exists_travels_while_its_client_computes(
    user: Runtime, operator: Runtime, held: Held
) -> None:
    step, split = training(island="island-0")
    alone = losses(step, split)
    large = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    unread = pw.put(large, split)
    pw.block_until_ready(unread)
    moved = operator.ask.migrate(number(user), 0, "island-1")
    until(
        lambda: len(held) > 0 and min(replica_bytes(operator)) >= large.nbytes, "it has travelled"
    )
    assert losses(step, split) == alone
    assert island_of(operator) == ["island-0"]
    assert not moved.done()
    held.let_go()
    moved.result(BOUND_S)
    assert losses(step, split) == alone
    np.testing.assert_array_equal(pw.get(unread), large)
    until(lambda: replica_bytes(operator) == [0, 0], "the copies are dropped")


def test_a_move_that_is_prepared_can_be_called_off(
    user: Runtime, operator: Runtime, held: Held
) -> None:
    step, split = training(island="island-0")
    alone = losses(step, split)
    kept = pw.put(np.arange(64.0), split)
    pw.block_until_ready(kept)
    moved = operator.ask.migrate(number(user), 0, "island-1")
    until(lambda: min(replica_bytes(operator)) >= kept.nbytes, "it has travelled")
    with pytest.raises(ArgumentError, match="is about to move to island 'island-1' already"):
        operator.ask.migrate(number(user), 0, "island-1").result(BOUND_S)
    resume(operator, number(user))
    with pytest.raises(pw.Error, match="was resumed before it moved"):
        moved.result(BOUND_S)
    until(lambda: replica_bytes(operator) == [0, 0], "the copies are dropped")
    held.let_go()
    assert losses(step, split) == alone
    assert island_of(operator) == ["island-0"]
