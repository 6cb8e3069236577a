"""The cluster that `pw` starts by itself."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.client import current
from tests.scripts import PRELUDE, ROOT, finish, start_client

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
    client = start_client("", body, PW_EMBEDDED_DEVICES="3", JAX_NUM_CPU_DEVICES="1")
    assert finish(client).strip() == "[3.0, 4.0, 5.0] 1"


@pytest.mark.processes
def test_the_quickstart_runs_as_it_is() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text()
    output = finish(start_client("", code)).strip()
    assert output == "(array([3., 5.], dtype=float32), array([2., 4.], dtype=float32))"
    assert PRELUDE


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
