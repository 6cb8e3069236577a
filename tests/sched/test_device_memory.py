"""What lies on devices: how much they have, whose it is, and who is in the way of a run without room."""

from __future__ import annotations

import gc
import json
import pathlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from typer.testing import CliRunner

import pw
from pw.cli import embedded
from pw.cli.main import app
from pw.cli.process import size_of
from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.client.looking.memory import ClusterMemory, DeviceUse
from pw.core.ids import Address
from pw.core.messages import ArrayMemory, MeasureHost, Memory, OwnerMemory
from pw.core.sizes import parse_size, size_in_words
from pw.sched.island import window
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.stage import held, mesh_on, numbers, split

MIB = 1 << 20


# --- sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 * MIB),
        ("1.5KiB", 1536),
        ("2GB", 2 * 10**9),
        ("123", 123),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_of(text) == size_bytes


@pytest.mark.parametrize("text", ["much", "4 GiBs", "-1GiB", "0", "", "4,5GiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="write it as 4GiB"):
        parse_size(text)
    if text:
        with pytest.raises(typer.BadParameter, match="--device-memory"):
            size_of(text)
        monkeypatch.setenv("PW_EMBEDDED_DEVICE_MEMORY", text)
        with pytest.raises(pw.Error, match="PW_EMBEDDED_DEVICE_MEMORY"):
            embedded.device_memory()
        with pytest.raises(ValueError, match="write it as 4GiB"):
            pw.LocalCluster(device_memory=text)


def test_pw_run_wants_a_size_and_a_cluster_of_its_own(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    for wrong, words in (
        (["--device-memory", "much"], "write it as 4GiB"),
        (["--device-memory", "1GiB", "--address", "tcp://10.0.0.1:1"], "has its own islands"),
    ):
        done = CliRunner().invoke(app, ["run", *wrong, str(script)])
        assert done.exit_code != 0
        assert words in f"{done.output} {done.exception}"


def test_sizes_are_written_in_the_largest_unit() -> None:
    assert [size_in_words(n) for n in (5, 2048, 3 * MIB, 5 << 29)] == [
        "5 B",
        "2.00 KiB",
        "3.00 MiB",
        "2.50 GiB",
    ]


# --- pw.memory in one process ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2, device_memory_bytes=MIB) as cluster:
        yield cluster


def use_of(island: int, device: int = 0) -> DeviceUse:
    """One device; what nothing holds any more is deleted before."""
    (found,) = [
        one
        for one in pw.memory().devices
        if (one.island, one.device) == (f"island-{island}", device)
    ]
    return found


def test_each_device_says_what_lies_there_and_who_made_it(cluster: InProcessCluster) -> None:
    mesh = mesh_on(0)
    x = pw.put(numbers(4000), sharding=split(mesh))

    @pw.jit(mesh=mesh)
    def twice(v: Any) -> Any:
        return v * 2

    y = twice(x).block_until_ready()
    until(lambda: not use_of(0).reserved_bytes, "the end of the run")
    use = use_of(0)
    assert (use.host, use.device, use.limit_bytes) == ("host-0", 0, MIB)
    assert use.arrays_bytes == 2 * 4 * 2000
    assert use.free_bytes == MIB - 2 * 4 * 2000 - use.temporary_bytes
    (owner,) = use.owners
    assert (owner.arrays, owner.arrays_bytes, owner.reserved_bytes) == (2, 16_000, 0)
    assert owner.client == pw.status().clients[0].number
    assert {(one.type, one.program, one.size_bytes) for one in use.largest} == {
        ("float32[4000]", "", 8000),
        ("float32[4000]", "twice", 8000),
    }
    assert use_of(1).arrays_bytes == 0
    del x, y
    until(lambda: use_of(0).arrays_bytes == 0, "the end of both arrays")


def test_what_runs_in_flight_have_reserved_is_told_with_their_client(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three go together, however long the first one takes on a busy machine.
    monkeypatch.setattr(window, "TIME_US", np.inf)
    grow = pw.jit(lambda v: jnp.zeros(50_000) + v, mesh=mesh_on(1))
    grow(np.float32(0)).block_until_ready()
    # Until the scheduler has heard of its end, it launches two at most.
    until(lambda: not use_of(1).reserved_bytes, "the end of the first run")
    with held(cluster, 1):
        results = [grow(np.float32(k)) for k in range(3)]
        until(lambda: use_of(1).reserved_bytes >= 3 * 200_000, "three reservations")
        use = use_of(1)
        assert use.free_bytes is not None
        assert use.limit_bytes is not None
        assert use.free_bytes <= use.limit_bytes - use.reserved_bytes
        assert [one.reserved_bytes for one in use.owners] == [use.reserved_bytes]
    pw.block_until_ready(results)
    until(lambda: not use_of(1).reserved_bytes, "the end of the runs")


def test_two_names_of_one_shard_count_once(cluster: InProcessCluster) -> None:
    mesh = mesh_on(0)
    x = pw.put(numbers(1000), sharding=split(mesh))
    same = pw.program(lambda v: (v, v))(x)
    pw.block_until_ready(same)
    until(lambda: use_of(0).reserved_bytes == 0, "the end of the run")
    use = use_of(0)
    assert use.limit_bytes is not None
    assert use.free_bytes is not None
    assert use.limit_bytes - use.free_bytes - use.temporary_bytes == 2000


def test_a_run_without_room_names_the_largest_arrays_and_their_owners(
    cluster: InProcessCluster,
) -> None:
    gc.collect()
    until(lambda: not any(use.arrays_bytes for use in pw.memory().devices), "earlier arrays go")
    other, mine = cluster.client(), current.runtime()
    current.use(other)
    mesh = mesh_on(1)
    keep = pw.jit(lambda v: jnp.zeros(150_000) + v, mesh=mesh)
    theirs = keep(np.float32(1)).block_until_ready()
    (asker, owner) = (client.number for client in pw.status().clients)
    current.use(mine)
    mesh = mesh_on(1)
    small = pw.put(numbers(1000), sharding=pw.NamedSharding(mesh, pw.PartitionSpec()))
    grow = pw.jit(lambda v: jnp.zeros(200_000) + v[0], mesh=mesh)
    with pytest.raises(pw.OutOfDeviceMemory) as caught:
        grow(small).block_until_ready()
    words = str(caught.value)
    for part in (
        "needs 781.25 KiB more on device 0 of host host-1",
        "which has 1.00 MiB",
        f"585.94 KiB float32[150000] made by '<lambda>' (client {owner}, ",
        "; 3.91 KiB float32[1000] made by 'pw.put'.",
        "`pw memory` shows all",
    ):
        assert part in words, words
    with pytest.raises(
        pw.OutOfDeviceMemory, match=r"needs 1\.\d+ MiB on .* the device has 1\.00 MiB"
    ):
        pw.jit(lambda v: jnp.zeros(400_000) + v[0], mesh=mesh)(small).block_until_ready()
    assert float(theirs[0]) == 1
    other.close()
    assert float(grow(small)[0]) == 0, "there is room when the other client has left"
    assert asker != owner


def test_the_state_of_an_optimizer_is_divided_as_its_parameters_are(
    cluster: InProcessCluster,
) -> None:
    """Whole moments would not fit, and a step could not use their memory for its results."""
    gc.collect()
    until(lambda: not any(use.arrays_bytes for use in pw.memory().devices), "earlier arrays go")
    tx = optax.adam(1e-2)

    @pw.jit(donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    size = MIB // 2
    params = {"w": pw.put(numbers(size // 4), sharding=split(mesh_on(0)))}
    state = pw.jit(tx.init)(params)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        for _ in range(2):
            params, state = step(params, state)
        assert int(state[0].count) == 2
    whole = 3 * size
    for device in (0, 1):
        until(lambda at=device: not use_of(0, at).reserved_bytes, "the end of the run")
        assert use_of(0, device).arrays_bytes - whole // 2 <= 16  # and the count of steps


def test_a_host_that_does_not_answer_is_named(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.hosts[0].node
    monkeypatch.setattr(node, "permits", lambda source, actor, kind: kind is not MeasureHost)
    told = pw.memory()
    assert told.silent == ("host-0",)
    assert [use.arrays_bytes is None for use in told.devices] == [True, True, False, False]
    assert "no answer from host-0" in repr(told)


def test_only_the_controller_may_measure_a_host(cluster: InProcessCluster) -> None:
    host = cluster.hosts[0]
    before = host.node.counters["messages_refused"]
    host.node.actors["store"].receive(Address("client-0", "session"), MeasureHost(1, 2, 5))
    assert host.node.counters["messages_refused"] == before + 1


# --- how it looks ------------------------------------------------------------------------------------

TOLD = Memory(
    1,
    (
        DeviceUse(
            *("east", "e-0", 0, 4 << 30, 1 << 30, 2 << 30, 1 << 30, 5, 3 << 30, 7 << 29),
            (OwnerMemory(3, "<b>train</b>", 2, 2 << 30, 1 << 30),),
            (
                ArrayMemory(3, 17, "float32[8]", "step", 2 << 30),
                ArrayMemory(3, 4, "int8[3]", "", 3),
            ),
        ),
        DeviceUse("east", "e-1", 0, None, None, None, 0, 0, None, None, (), ()),
    ),
    ("e-1",),
)


def test_it_prints_as_tables_and_as_html() -> None:
    told = ClusterMemory.of(TOLD)
    printed = repr(told)
    for words in (
        "2 devices: 2.00 GiB of arrays, 1.00 GiB reserved; no answer from e-1",
        "unlimited",
        "3.17",
        "float32[8]",
        "(uploaded)",
        "3.50 GiB",
    ):
        assert words in printed, printed
    assert "<b>" not in told._repr_html_()


# --- real processes ----------------------------------------------------------------------------------


@pytest.mark.processes
def test_clients_that_do_not_fit_together_wait_for_each_other(tmp_path: pathlib.Path) -> None:
    """Two clients on one CPU device of 96 MiB: the second waits until the first has ended."""
    gate = tmp_path / "gate"
    path = str(gate)

    def wait_for_gate(x: Any) -> Any:
        for _ in range(6000):
            if pathlib.Path(path).exists():
                return x
            time.sleep(0.01)
        raise TimeoutError("the test has not opened the gate")

    with pw.LocalCluster(device_memory="96MiB", allow_python=True, connect=False) as local:
        first, second = (Runtime(remote(local.address), 1.0, 0) for _ in range(2))
        current.use(first)
        mesh = mesh_on(0, 1)
        make = pw.jit(lambda v: jnp.zeros(12 * MIB, jnp.float32) + v, mesh=mesh)  # 48 MiB
        take = pw.jit(lambda v: v[:1], mesh=mesh)
        hold = pw.host_function(
            wait_for_gate, jax.ShapeDtypeStruct((1,), np.float32), devices=mesh.devices
        )
        one = pw.program(lambda v: hold(take(make(v))))(np.float32(1))
        until(lambda: use_of(0).reserved_bytes >= 48 * MIB, "the first run to be admitted")

        current.use(second)
        grow = pw.jit(lambda v: jnp.zeros(15 * MIB, jnp.float32) + v, mesh=mesh_on(0, 1))  # 60 MiB
        two = grow(np.float32(2))
        until(lambda: "device memory that others hold" in pw.why(), "the second run to wait")
        assert not two.is_ready()
        use = use_of(0)
        assert use.limit_bytes == 96 * MIB
        assert use.free_bytes is not None
        assert use.free_bytes < 60 * MIB
        document = json.loads(
            CliRunner().invoke(app, ["memory", "--json", "--address", local.address]).stdout
        )
        assert document["devices"][0]["limit_bytes"] == 96 * MIB
        assert document["devices"][0]["owners"][0]["reserved_bytes"] >= 48 * MIB
        shown = CliRunner().invoke(app, ["memory", "--address", local.address])
        assert "96.00 MiB" in shown.stdout

        gate.touch()
        assert float(two[0]) == 2
        current.use(first)
        assert float(one[0]) == 1
        with pytest.raises(pw.OutOfDeviceMemory) as caught:  # beside what the second client has
            make(np.float32(3)).block_until_ready()
        assert f"60.00 MiB float32[{15 * MIB}] made by '<lambda>' (client" in str(caught.value)
        current.use(second)
        with pytest.raises(pw.OutOfDeviceMemory, match=r"the device has 96\.00 MiB"):
            pw.jit(lambda v: jnp.zeros(30 * MIB, jnp.float32) + v, mesh=mesh_on(0, 1))(
                np.float32(4)
            ).block_until_ready()
        current.use(None)
        first.close()
        second.close()
