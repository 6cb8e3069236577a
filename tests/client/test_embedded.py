"""The cluster that `pw` starts by itself."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.client.connection import current
from tests.stages.daemons import Program
from tests.stages.programs import ROOT
from tests.stages.samples import some
from tests.stages.scripts import PRELUDE, finish, start_client

SUM = """
devices = pw.make_virtual_device_set().add_slice(devices={devices}).devices
f = pw.pmap(lambda x: x + jax.lax.psum(x, "i"), axis_name="i", devices=devices)
print(np.asarray(f(np.arange({devices}.0))).tolist(), pw.stats()["controller"]["runs"])
"""


@pytest.fixture
def unconnected() -> Iterator[None]:
    pw.disconnect()
    yield
    pw.disconnect()


@pytest.mark.processes
def test_it_has_as_many_devices_as_asked_for_whatever_the_users_jax_is() -> None:
    body = "assert len(jax.devices()) == 1\n" + SUM.format(devices=3)
    body += "assert pw.status().address.startswith('ipc://') and pw.status().devices == 3\n"
    body += """
try:
    pw.make_virtual_device_set().add_slice(devices=4)
except pw.InsufficientDevices as error:
    print(error)
"""
    client = start_client("", body, PW_EMBEDDED_DEVICES="3", JAX_NUM_CPU_DEVICES="1")
    result, too_few = finish(client).strip().split("\n", 1)
    assert result == "[3.0, 4.0, 5.0] 1"
    assert "There are: embedded (cpu, 3 devices on 1 host)" in too_few
    assert too_few.endswith("with JAX_PLATFORMS=cpu PW_EMBEDDED_DEVICES=4")


@pytest.mark.processes
def test_the_quickstart_runs_as_it_is() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text()
    output = finish(start_client("", code)).strip()
    assert output == "(array([3., 5.], dtype=float32), array([2., 4.], dtype=float32))"
    assert PRELUDE


SURVIVE = """
import signal
from pw.client.connection import current
from tests.stages.daemons import until

def runtime_process():
    # None while the host has no place.
    hosts = [host for island in current.runtime().ask.status(20.0).islands for host in island.hosts]
    return hosts[0].pid if hosts else None

def worker_process():
    return current.runtime().thread.worker.pid

def other_runtime_process(before):
    until(lambda: runtime_process() not in (before, None), "another runtime process")
    return runtime_process()

def kill(process):
    before = other_runtime_process(None)  # the one that hung is replaced: values may be there before
    os.kill(process(), signal.SIGKILL)
    other_runtime_process(before)

mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
put = pw.put(np.arange(4.0), sharding=pw.NamedSharding(mesh, P("x")))
step = pw.jit(lambda x: x * 2 + 1, mesh=mesh, donate_argnums=0)
state = step(step(put + 0))
pw.checkpoint(state).result()
state = step(state)  # what it was computed from is gone, but for the copy
expected = ((np.arange(4.0) * 2 + 1) * 2 + 1) * 2 + 1

def all_is_there():
    np.testing.assert_array_equal(np.asarray(put), np.arange(4.0))
    np.testing.assert_array_equal(np.asarray(state), expected)

for_ever = lambda x: jax.lax.while_loop(lambda c: c < 2.0, jnp.sin, x[0])
try:
    pw.jit(for_ever, mesh=mesh, timeout=0.5)(put).block_until_ready()
except pw.ComputationTimeout:
    all_is_there()
    print("timeout")
hung = pw.jit(for_ever, mesh=mesh)(put)
pw.cancel(hung)
try:
    hung.block_until_ready()
except pw.Cancelled:
    all_is_there()
    print("cancel")
kill(runtime_process)
all_is_there()
print("runtime")
expected = np.arange(4.0) * 2 + 1
state = step(put + 0)
kill(worker_process)
all_is_there()  # from what the client has put; the copies were the worker's
print("worker")
"""


@pytest.mark.processes
def test_it_recovers_as_other_clusters_do(tmp_path: Path) -> None:
    script = Program(tmp_path, ["-c", PRELUDE + SURVIVE])
    try:
        assert script.end(90) == 0, script.err
        assert script.out.split() == ["timeout", "cancel", "runtime", "worker"]
        script.until_alone()
    finally:
        script.kill()


LEAVE = """
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
step = pw.jit(lambda x: x * 3 + 1, mesh=mesh, donate_argnums=0)
state = step(np.arange(4, dtype=np.uint32))
state.block_until_ready()
pw.suspend(to={to!r})
assert "suspended, by client" in str(pw.status()), pw.status()
print(np.asarray(state).tolist())
state = step(state)
try:
    pw.get(state, timeout=0.2)
except TimeoutError:
    print("waits")
pw.resume()
print(np.asarray(step(state)).tolist())
"""


@pytest.mark.processes
@pytest.mark.parametrize("to", ["memory", "files"])
def test_a_script_leaves_its_devices_and_comes_back(to: str, tmp_path: Path) -> None:
    folder = tmp_path / "spilled"
    folder.mkdir()
    files = {"PW_EMBEDDED_SPILL": "1MiB", "PW_EMBEDDED_SPILL_FILES": str(folder)}
    script = Program(
        tmp_path, ["-c", PRELUDE + LEAVE.format(to=to)], **(files if to == "files" else {})
    )
    try:
        assert script.end(90) == 0, script.err
        assert script.out.split("\n")[:3] == ["[1, 4, 7, 10]", "waits", "[13, 40, 67, 94]"]
        script.until_alone()
    finally:
        script.kill()


PENDING = """
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
slow = pw.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, v: jnp.sin(v @ v), x), mesh=mesh)
x = slow(np.ones((200, 200), np.float32))
x.block_until_ready()
for _ in range(50):
    x = slow(x)
print("up", flush=True)
"""

ENDS = {
    "gets Ctrl-C": (
        PENDING + "np.asarray(x)\nwhile True: time.sleep(0.1)",
        signal.SIGINT,
        -signal.SIGINT,
    ),
    "gets SIGKILL": (PENDING + "import signal; signal.pause()", signal.SIGKILL, -signal.SIGKILL),
    "ends with nothing pending": (SUM.format(devices=2) + "print('up')", None, 0),
    "ends while work is pending": (PENDING, None, 0),
    "raises": (PENDING + "raise KeyError('mine')", None, 1),
    "leaves by sys.exit": (PENDING + "(lambda: sys.exit(3))()", None, 3),
}
OWN_WORDS = {"raises": "KeyError: 'mine'", "gets Ctrl-C": "KeyboardInterrupt"}


@pytest.mark.processes
@pytest.mark.parametrize("how", some([*ENDS], 2))
def test_an_exit_is_silent_and_leaves_nothing_behind(how: str, tmp_path: Path) -> None:
    body, number, code = ENDS[how]
    script = Program(tmp_path, ["-c", PRELUDE + body])
    try:
        script.until_says("up", 60)
        if number is not None:
            script.process.send_signal(number)
        assert script.end(60) == code, script.err
        script.until_alone()
    finally:
        script.kill()
    # Some releases of jaxlib log an error for each compiled function that they load, which is none.
    lines = [line for line in script.err.splitlines() if "cpu_aot_loader" not in line]
    if how in OWN_WORDS:
        assert lines[0].startswith("Traceback"), script.err
        assert lines[-1] == OWN_WORDS[how], script.err
    else:
        assert lines == []


@pytest.mark.processes
def test_a_worker_that_cannot_live_ends_the_session_and_says_why(tmp_path: Path) -> None:
    body = """
    import signal
    from pw.client.connection import current
    devices = pw.make_virtual_device_set().add_slice(devices=1).devices
    x = pw.put(np.arange(3), devices)
    worker = current.runtime().thread.worker
    worker.arguments = [*worker.arguments, "--devices", "nonsense"]
    for child in open(f"/proc/{worker.pid}/task/{worker.pid}/children").read().split():
        os.kill(int(child), signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    try:
        while True:
            np.asarray(x + 1)
    except pw.Error as error:
        print(error)
    """
    script = Program(tmp_path, ["-c", PRELUDE + textwrap.dedent(body)])
    try:
        assert script.end(60) == 0, script.err
        assert "the worker of the embedded cluster ended with exit code 1" in script.out
        assert "pw-worker: error: Invalid value for '--devices'" in script.err
    finally:
        script.kill()


@pytest.mark.parametrize("text", ["0", "-1", "many", "5000"])
def test_a_bad_device_count_is_refused(
    unconnected: None, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PW_EMBEDDED_DEVICES", text)
    monkeypatch.delenv("PW_ADDRESS", raising=False)
    with pytest.raises(pw.Error, match="PW_EMBEDDED_DEVICES"):
        pw.connect()


def test_where_jax_has_accelerators_the_host_lives_in_this_process(
    unconnected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PW_ADDRESS", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    connected = pw.connect()
    assert connected.address is None
    assert pw.connect() is connected is current.runtime()
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=4).devices, ("x",))
    f = pw.jit(lambda x: x * jnp.sum(x), mesh=mesh, in_shardings=pw.PartitionSpec("x"))
    np.testing.assert_array_equal(np.asarray(f(np.arange(4.0, dtype=np.float32))), [0, 6, 12, 18])
    assert pw.stats()["embedded-0"]["computations"] == 1


@pytest.mark.usefixtures("unconnected")
def test_a_session_may_last_for_a_block() -> None:
    with pw.connect() as connected:
        assert current.runtime() is connected
        assert int(pw.get(pw.put(np.int32(3)))) == 3
    assert not connected.alive


def test_the_session_ends_at_once_with_a_host_that_lives_in_this_process(
    unconnected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PW_ADDRESS", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    devices = pw.make_virtual_device_set().add_slice(devices=1).devices
    mesh = pw.Mesh(devices, ("x",))
    kept = pw.put(np.ones((300, 300), np.float32), devices)
    kept.block_until_ready()
    slow = lambda x: jax.lax.fori_loop(0, 1000, lambda i, v: jnp.sin(v @ v), x)  # noqa: E731
    with pytest.raises(pw.ComputationTimeout):
        pw.jit(slow, mesh=mesh, timeout=0.01)(kept).block_until_ready()
    with pytest.raises(pw.HostLost, match=r"LocalCluster.*pw\.connect\(\) begins another"):
        while True:  # what was on its way is still delivered
            np.asarray(kept + 1)
    assert pw.connect() is current.runtime()
    assert np.asarray(pw.put(np.arange(3))).tolist() == [0, 1, 2]


def test_connecting_elsewhere_while_connected_says_what_to_do(unconnected: None) -> None:
    from pw.testing import InProcessCluster

    with InProcessCluster(islands=1, devices_per_island=1):
        with pytest.raises(pw.Error, match="disconnect"):
            pw.connect("tcp://127.0.0.1:1")


@pytest.mark.processes
def test_a_local_cluster_sets_the_session_before_it_aside(unconnected: None) -> None:
    from pw.testing import InProcessCluster

    with InProcessCluster(islands=1, devices_per_island=2):
        before = current.runtime()
        kept = pw.put(np.arange(3), pw.make_virtual_device_set().add_slice(devices=1).devices)
        with pw.LocalCluster() as cluster:
            assert current.runtime().address == cluster.address
            np.testing.assert_array_equal(np.asarray(kept), np.arange(3))
        assert current.runtime() is before
        np.testing.assert_array_equal(np.asarray(kept), np.arange(3))
