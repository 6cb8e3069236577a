"""Plain JAX on a cluster whose processes are killed: a pause, or one error that says why."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import pw
from pw.client.connection import current
from pw.core.messages import Status
from pw.sched.control.lineage import RECORDS_KEPT
from tests.stages.daemons import Program, command_line, process_name, send, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

WAIT = """
import os, time

def wait():
    while not os.path.exists("go"):
        time.sleep(0.01)
"""

TRAINING = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

one, all = (Mesh(np.array(devices), ("x",)) for devices in (jax.devices()[:2], jax.devices()))
assert len({device.island for device in jax.devices()}) == 2

def step(w, x):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w) - x[:, :1]) ** 2)
    value, slope = jax.value_and_grad(loss)(w)
    return w - 0.1 * slope, value

def train(mesh, donated):
    split, same = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    data = jax.device_put(np.sin(np.arange(64 * 8.0).reshape(64, 8) * 0.1), split)
    function = jax.jit(step, donate_argnums=donated)
    w = jax.device_put(np.ones((8, 512)), same)
    losses = []
    for number in range(30):
        w, value = function(w, data)
        losses.append(value)
        if number == 10:
            jax.block_until_ready(w)
            yield
    yield [float(loss).hex() for loss in losses]

undisturbed = [list(train(mesh, ()))[1] for mesh in (one, all)]
disturbed = [train(mesh, donated) for donated in ((), (0,)) for mesh in (one, all)]
for each in disturbed:
    next(each)
print("killed?", flush=True)
wait()
assert [next(each) for each in disturbed] == undisturbed * 2
print("ok")
"""

FOR_LONG = """
import jax, numpy as np

step = jax.jit(lambda w: w + 1, donate_argnums=0)
w = jax.device_put(np.zeros(8), jax.devices()[0])
for _ in range(RUNS):
    w = step(w)
jax.block_until_ready(w)
print("killed?", flush=True)
wait()
try:
    print(step(w))
except jax.errors.JaxRuntimeError as error:
    print("error", error)
"""

WAITS = """
import jax, jax.numpy as jnp
x = jax.jit(lambda x: x + 1)(jnp.arange(4.0))
x.block_until_ready()
print("up", flush=True)
wait()
try:
    print(jax.jit(lambda x: x * 3)(x))
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(islands=2, devices_per_host=2) as cluster:
        yield cluster


class Script(Program):
    """A script that waits until it may go on."""

    def __init__(self, folder: Path, body: str, address: str, *arguments: str) -> None:
        variables = {"JAX_PLATFORMS": "pw", "PW_ADDRESS": address}
        super().__init__(folder, ["-c", WAIT + body, *arguments], **variables)

    def go_on(self) -> None:
        """Let it go on, and wait for its end."""
        (self.folder / "go").touch()
        self.end(90)


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    started: list[Script] = []
    yield started
    for script in started:
        script.kill()


def runtime_pid() -> int | None:
    """The process of the host of the first island; None while it has no place."""
    (first,) = (island for island in status().islands if island.name == "island-0")
    return first.hosts[0].pid if first.hosts else None


def status() -> Status:
    return current.runtime().ask.status(20.0)


def kill_the_worker(scripts: list[Script]) -> None:
    """Kill the runtime, and let the scripts go on with another one, to their ends."""
    for script in scripts:
        script.until_says("killed?", 90)
    before = runtime_pid()
    assert before is not None
    send(before, signal.SIGKILL)
    until(lambda: runtime_pid() not in (before, None), "another runtime", 60)
    for script in scripts:
        script.go_on()
        assert script.process.returncode == 0
        assert script.err == ""
        script.until_alone()
    until(lambda: all(one.is_me for one in status().clients), "the end of the scripts' sessions")


def test_training_goes_on_when_a_worker_is_killed(
    cluster: pw.LocalCluster, scripts: list[Script], tmp_path: Path
) -> None:
    scripts.append(Script(tmp_path, TRAINING, cluster.address))
    kill_the_worker(scripts)
    assert scripts[0].out == "killed?\nok\n"


@pytest.mark.long
def test_what_the_controller_does_not_remember_is_lost_with_a_worker(
    cluster: pw.LocalCluster, scripts: list[Script], tmp_path: Path
) -> None:
    beyond = f"RUNS = {RECORDS_KEPT + 100}\n{FOR_LONG}"
    scripts.append(Script(tmp_path, beyond, cluster.address))
    kill_the_worker(scripts)
    assert "error DATA_LOSS: " in scripts[0].out
    assert "checkpoint" in scripts[0].out


def is_gateway(pid: int) -> bool:
    """Whether a process is a gateway, be it a fork or a new interpreter."""
    return process_name(pid) == "pw-gateway" or "-m pw.cli.gateway" in command_line(pid)


def test_the_end_of_its_gateway_is_an_error_for_a_script(
    cluster: pw.LocalCluster, scripts: list[Script], tmp_path: Path
) -> None:
    killed, other = (Script(tmp_path, WAITS, cluster.address) for _ in range(2))
    scripts += [killed, other]
    for script in scripts:
        script.until_says("up", 90)
    pids = [script.process.pid for script in scripts]
    names = {one.name for one in status().clients if not one.is_me}
    assert names == {f"python -c, pid {pid}" for pid in pids}, "not those of their gateways"
    (gateway,) = filter(is_gateway, killed.family())
    send(gateway, signal.SIGKILL)
    killed.go_on()
    assert killed.process.returncode == 0, killed.err
    assert "UNAVAILABLE" in killed.out
    killed.until_alone()
    other.go_on()
    assert other.out == "up\n[ 3.  6.  9. 12.]\n"
    until(lambda: all(one.is_me for one in status().clients), "the end of the sessions")
