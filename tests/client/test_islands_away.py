"""Islands of processes that are lost: the others go on, and a client says how long it waits."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pw
from tests.stages.daemons import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(islands=2, connect=False, move_after_s=3600.0) as cluster:
        yield cluster
        pw.disconnect()


def is_ready(island: str) -> bool:
    return any(one.name == island and one.state == "ready" for one in pw.status().islands)


def on(island: str) -> Any:
    (device,) = pw.make_virtual_device_set().add_slice(devices=1, island=island).devices
    return device


@pw.jit
def step(state: Any) -> Any:
    return {"w": state["w"] + 1, "n": jnp.sum(state["w"])}


def put(device: Any) -> Any:
    return pw.put({"w": np.arange(4.0, dtype=np.float32), "n": np.float32(0)}, device)


def test_calls_on_other_islands_go_on_while_one_is_away(cluster: pw.LocalCluster) -> None:
    pw.connect(cluster.address, recovery_timeout=math.inf)
    here, there = put(on("island-0")), put(on("island-1"))
    here, there = step(here), step(there)
    pw.block_until_ready((here, there))
    host = cluster.hosts[0]
    os.kill(host.pid, signal.SIGSTOP)  # else it starts the runtime again
    os.kill(host.runtime_pid(), signal.SIGKILL)
    until(lambda: not is_ready("island-0"), "the loss")
    here = step(here)
    for number in range(20):
        there = step(there)
        if number % 5 == 0:
            pw.checkpoint(there["w"]).result(60)
    np.testing.assert_array_equal(pw.get(there["w"]), np.arange(4) + 21)
    assert not is_ready("island-0")
    assert not here["w"].is_ready()
    os.kill(host.pid, signal.SIGCONT)
    np.testing.assert_array_equal(pw.get(here["w"]), np.arange(4) + 2)


def test_an_island_that_is_given_up_names_what_is_left(cluster: pw.LocalCluster) -> None:
    pw.connect(cluster.address, recovery_timeout=0.5)
    here, there = step(put(on("island-0"))), step(put(on("island-1")))
    pw.block_until_ready((here, there))
    cluster.hosts[0].kill()
    with pytest.raises(pw.IslandLost, match="island-0") as lost:
        until(lambda: pw.get(step(here)["n"]) is None, "the loss")  # some calls may not notice it
    assert isinstance(lost.value, pw.HostLost)
    made = "float32[4] that 'step' made"
    assert made in lost.value.arrays_left
    assert made in lost.value.arrays_lost
    errors = pw.arrays_lost({"here": here, "there": there, "step": 7}, timeout=60)
    assert set(errors) == {"['here']['n']", "['here']['w']"}
    with pytest.raises(pw.IslandLost):
        pw.get(step(pw.put(here, on("island-1")))["n"])
    moved = step(pw.put({"w": pw.get(there["w"]), "n": np.float32(0)}, on("island-1")))
    np.testing.assert_array_equal(pw.get(moved["w"]), np.arange(4) + 2)


def test_slices_of_a_lost_island_move_when_the_cluster_says() -> None:
    with pw.LocalCluster(islands=2, move_after_s=0.5) as cluster:
        (device,) = pw.make_virtual_device_set().add_slice(devices=1).devices
        state = step(put(device))
        pw.block_until_ready(state)
        cluster.hosts[0].kill()
        until(lambda: not is_ready("island-0"), "the loss")
        np.testing.assert_array_equal(pw.get(step(state)["w"]), np.arange(4) + 2)


def test_the_time_for_an_island_is_a_number_of_seconds() -> None:
    for wrong in (-1, math.nan, "soon"):
        with pytest.raises(ValueError, match="recovery_timeout"):
            pw.connect(recovery_timeout=wrong)  # type: ignore[arg-type]


def test_a_session_that_is_there_keeps_its_time_for_islands(cluster: pw.LocalCluster) -> None:
    session = pw.connect(cluster.address, recovery_timeout=7)
    assert pw.connect(recovery_timeout=7) is session
    with pytest.raises(pw.Error, match=r"pw\.disconnect"):
        pw.connect(recovery_timeout=3)
    cluster.hosts[0].kill()
    cluster.hosts[0].kill()


def test_what_lies_whole_on_an_island_that_is_left_is_not_lost(cluster: pw.LocalCluster) -> None:
    pw.connect(cluster.address, recovery_timeout=0.5)
    devices = [on("island-0"), on("island-1")]
    both = pw.Mesh(np.array(devices), ("island",))
    whole = pw.put(np.ones(4, np.float32), pw.NamedSharding(both, pw.PartitionSpec()))
    split = pw.put(np.ones(4, np.float32), pw.NamedSharding(both, pw.PartitionSpec("island")))
    there = put(devices[0])
    pw.block_until_ready((whole, split, there))
    cluster.hosts[0].kill()
    with pytest.raises(pw.IslandLost):
        until(lambda: pw.get(step(there)["n"]) is None, "the loss")
    lost = pw.arrays_lost({"whole": whole, "split": split}, timeout=60)
    assert list(lost) == ["['split']"]
    np.testing.assert_array_equal(pw.get(pw.put(whole, devices[1])), np.ones(4))
