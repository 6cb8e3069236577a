"""Plain JAX that goes on with fewer islands when one is lost for good, and with all when it is back."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import pw
from tests.stages.daemons import Program

pytestmark = pytest.mark.processes

BY_HAND = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.extend.backend import clear_backends

def say(*words):
    print(*words, flush=True)

def until_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def dispatched(devices):
    # Scripts dispatch this on all slices, and only the results raise.
    return jax.pmap(lambda x: x + 1, devices=devices)(np.full(len(devices), 99.0))

def active(slices):
    results = {index: dispatched(devices) for index, devices in slices.items()}
    alive = []
    for index, x in results.items():
        try:
            assert np.array_equal(jax.block_until_ready(x), np.full(len(x), 100.0))
            alive.append(index)
        except jax.errors.JaxRuntimeError as error:
            assert "DATA_LOSS" in str(error), error
    return alive

def listed():
    slices = {}
    for device in jax.devices():
        slices.setdefault(device.slice_index, []).append(device)
    return slices

slices = listed()
gone = 1 - int(sys.argv[1])
copies = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("x",)), jax.P())
rest = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(slices[gone]), ("x",)), jax.P())
state = jax.jit(lambda x: x * 2, out_shardings=copies)(jax.device_put(np.arange(999.0), copies))
state.block_until_ready()
say("active", active(slices))
until_file("killed")
say("active", active(slices))
moved = jax.device_put(state, rest)
say("moved", np.array_equal(np.asarray(moved), np.arange(999.0) * 2))
say("listed", len(jax.devices()))
until_file("restarted")
while len(active(slices)) < 2:
    time.sleep(0.05)
say("active", active(slices))
again = jax.device_put(moved, copies)
say("grown", float(jax.jit(jnp.sum)(again)))
"""


@pytest.fixture
def cluster() -> Iterator[pw.LocalCluster]:
    options = {"devices_per_host": 2, "recovery_timeout_s": 1.0}
    with pw.LocalCluster(2, connect=False, **options) as cluster:
        yield cluster


def start(cluster: pw.LocalCluster, folder: Path, *arguments: str) -> Program:
    variables = {"PW_ADDRESS": cluster.address, "JAX_PLATFORMS": "pw", "PW_SLICES": "islands"}
    return Program(folder, [*arguments], **variables)


@pytest.mark.parametrize("lost", [0, 1])
def test_checks_of_slices_raise_where_their_results_are_read(
    cluster: pw.LocalCluster, tmp_path: Path, lost: int
) -> None:
    script = start(cluster, tmp_path, "-c", BY_HAND, str(lost))
    try:
        script.until_says("active [0, 1]")
        cluster.hosts[lost].kill()
        (script.folder / "killed").touch()
        script.until_says("listed 4")
        assert f"active [{1 - lost}]\nmoved True\n" in script.out
        cluster.hosts[lost].restart()
        (script.folder / "restarted").touch()
        assert script.end() == 0, script.err
        assert script.out.endswith("active [0, 1]\ngrown 997002.0\n")
    finally:
        script.kill()


@pytest.mark.skipif(
    importlib.util.find_spec("pathwaysutils") is None,
    reason="needs pathwaysutils, of tests/libraries/requirements.lock",
)
@pytest.mark.parametrize("lost", [0, 1])
def test_the_elastic_manager_of_pathwaysutils(
    cluster: pw.LocalCluster, tmp_path: Path, lost: int
) -> None:
    script = start(cluster, tmp_path, str(Path(__file__).with_name("elastic_script.py")))
    try:
        script.until_says("step 10")
        cluster.hosts[lost].kill()
        script.until_says("step 30")
        cluster.hosts[lost].restart()
        assert script.end() == 0, script.err
        assert "slices [2, 1, 2] 0x1.394da" in script.out
    finally:
        script.kill()
