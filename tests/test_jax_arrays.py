"""`jax.Array`s on virtual devices become `pw.Array`s, and back, in scripts of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

import pw
from tests.scripts import PRELUDE, ROOT

DEVICES = 4

SETUP = """
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
import pw.jax

def moved():
    "Bytes that have left or reached any process by the bulk plane, or lie inside messages of fetches."
    every = pw.stats().values()
    return sum(v for one in every for k, v in one.items() if k.startswith("bulk_bytes"))

def held():
    "Bytes on the devices; shared shards count once."
    import gc; gc.collect()
    return sum(one.get("live_bytes", 0) for one in pw.stats().values())

def until(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)

mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
split = NamedSharding(mesh, P("a", "b"))
rows = NamedSharding(mesh, P(("b", "a")))
whole = NamedSharding(mesh, P())
values = np.arange(64, dtype=np.float32).reshape(8, 8)
"""


def run(body: str, timeout_s: float = 120.0, **variables: str) -> str:
    """Run a script whose JAX has virtual devices; return what it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PW_", "XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + SETUP + textwrap.dedent(body)],
        env=clean | {"JAX_PLATFORMS": "pw", "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(
        islands=1, hosts_per_island=2, devices_per_host=2, connect=False
    ) as cluster:
        yield cluster


@pytest.fixture(params=["embedded", "cluster"])
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    """What says where a script computes: in the cluster that starts with it, or on hosts of another."""
    if request.param == "embedded":
        return {"PW_DEVICES": f"{DEVICES}"}
    return {"PW_ADDRESS": request.getfixturevalue("cluster").address}


def test_arrays_convert_without_moving_bytes(place: dict[str, str]) -> None:
    run(
        """
        for sharding in (split, rows, whole, SingleDeviceSharding(jax.devices()[1])):
            x = jax.device_put(np.tile(values, (64, 64)), sharding)
            jax.block_until_ready(x)
            pw.connect()
            before, size = moved(), held()
            y = pw.jax.from_jax(x)
            back = pw.jax.to_jax(y)
            pw.block_until_ready(y)
            jax.block_until_ready(back)
            assert moved() == before, (moved(), before)
            assert held() == size > 0, (held(), size)
            assert isinstance(y, pw.Array) and isinstance(back, jax.Array)
            assert back.sharding == sharding, back.sharding
            np.testing.assert_array_equal(pw.get(y), np.tile(values, (64, 64)))
            np.testing.assert_array_equal(back, np.tile(values, (64, 64)))
            assert y.sharding.mesh.shape == dict(getattr(sharding, "mesh", y.sharding.mesh).shape)
            del x, y, back
            until(lambda: held() == 0, "everything is deleted")
        """,
        **place,
    )


def test_each_side_is_deleted_and_donated_apart(place: dict[str, str]) -> None:
    run(
        """
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        twice = pw.jit(lambda x: x * 2, donate_argnums=0)
        x = jax.device_put(values, split)
        y = pw.jax.from_jax(x)
        z = add(x)                              # JAX donates what pw has
        assert x.is_deleted()
        np.testing.assert_array_equal(pw.get(y), values)
        np.testing.assert_array_equal(z, values + 1)
        back = pw.jax.to_jax(y)
        w = twice(y)                            # pw donates what JAX has
        np.testing.assert_array_equal(back, values)
        np.testing.assert_array_equal(pw.get(w), values * 2)
        try:
            pw.get(y)
        except pw.ArrayDeleted:
            pass
        else:
            raise AssertionError("y was donated")
        x = jax.device_put(values, rows)
        y = pw.jax.from_jax(x)
        x.delete()
        again = pw.jax.to_jax(y)
        del y
        np.testing.assert_array_equal(again, values)
        try:
            pw.jax.from_jax(x)
        except pw.ArrayDeleted as error:
            assert "float32[8,8] was deleted or donated" in str(error)
        else:
            raise AssertionError("x was deleted")
        """,
        **place,
    )


def test_programs_and_functions_take_arrays_of_jax() -> None:
    run(
        """
        double = pw.jit(lambda x: x * 2)

        @pw.program
        def program(state, y):
            return {"x": double(state["x"]), "y": y}

        x = jax.device_put(values, split)
        found = program({"x": x}, jax.device_put(jnp.float32(3), whole))
        assert isinstance(found["x"], pw.Array)
        assert found["x"].sharding == pw.jax.sharding_of(split)
        jaxed = pw.jax.to_jax(found)
        assert jaxed["x"].sharding == split
        np.testing.assert_array_equal(jax.jit(lambda t: t["x"] + t["y"])(jaxed), values * 2 + 3)
        np.testing.assert_array_equal(pw.get(double(x)), values * 2)
        np.testing.assert_array_equal(pw.get({"x": x})["x"], values)
        moved_to = pw.put(x, sharding=pw.jax.sharding_of(rows))
        np.testing.assert_array_equal(pw.jax.to_jax(moved_to), values)
        assert pw.jax.to_jax(moved_to).sharding == rows
        np.testing.assert_array_equal(pw.get(pw.put(x)), values)
        """,
        PW_DEVICES=f"{DEVICES}",
    )


def test_dtypes_keys_and_other_shardings() -> None:
    run(
        """
        jax.config.update("jax_enable_x64", True)
        for dtype in (bool, "int8", "uint64", "float64", "bfloat16", "complex64", "float8_e4m3fn"):
            x = jax.device_put(jnp.arange(16).reshape(4, 4).astype(dtype), split)
            y = pw.jax.to_jax(pw.jax.from_jax(x))
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(y), np.asarray(x))
        keys = jax.device_put(jax.random.split(jax.random.key(7), 4), NamedSharding(mesh, P("a")))
        back = pw.jax.to_jax(pw.jax.from_jax(keys))
        assert back.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))
        mapped = jax.pmap(lambda x: x + 1)(values.reshape(4, 16))
        np.testing.assert_array_equal(pw.get(pw.jax.from_jax(mapped)), values.reshape(4, 16) + 1)
        for n in (0, 1):
            empty = pw.jax.from_jax(jax.device_put(jnp.zeros((n * 4, 0)), NamedSharding(mesh, P("a"))))
            assert pw.get(empty).shape == (n * 4, 0)
        weak = pw.jax.to_jax(pw.jax.from_jax(jnp.asarray(2.5)))
        assert weak.weak_type and weak == 2.5
        """,
        PW_DEVICES=f"{DEVICES}",
    )


def test_what_cannot_be_converted_says_why() -> None:
    run(
        """
        def said(kind, words, call):
            try:
                call()
            except kind as error:
                assert words in str(error), error
            else:
                raise AssertionError(words)

        own = pw.make_virtual_device_set().add_slice(devices=2)
        y = pw.put(values, own.devices[0])
        said(pw.PlacementError, "lies on devices that JAX does not have", lambda: pw.jax.to_jax(y))
        s = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        x = jax.device_put(values, s)
        said(pw.PlacementError, "pinned_host", lambda: pw.jax.from_jax(x))
        """,
        PW_DEVICES=f"{DEVICES}",
    )


def test_checkpoints_of_arrays_of_jax(cluster: pw.LocalCluster, tmp_path: object) -> None:
    run(
        f"""
        x = jax.device_put(values, split)
        jax.block_until_ready(x)
        pw.checkpoint({{"x": x, "n": 3}}).result(30)
        pw.checkpoint({{"x": x, "n": 3}}, path="{tmp_path}/saved").result(30)
        read = pw.restore("{tmp_path}/saved", like={{"x": pw.jax.from_jax(x), "n": 0}})
        np.testing.assert_array_equal(pw.jax.to_jax(read["x"]), values)
        """,
        PW_ADDRESS=cluster.address,
    )


def test_a_lost_host_is_a_pause() -> None:
    with pw.LocalCluster(
        islands=1, hosts_per_island=2, devices_per_host=2, connect=False
    ) as cluster:
        supervisor = cluster.hosts[0].pid
        run(
            f"""
            import signal

            x = jax.device_put(values, split)
            step = jax.jit(lambda x: x + 1)
            x = step(step(x))
            y = pw.jax.from_jax(x)
            z = pw.jit(lambda y: y * 2)(y)
            back = pw.jax.to_jax(z)
            jax.block_until_ready(back)
            del x, z
            for pid in open("/proc/{supervisor}/task/{supervisor}/children").read().split():
                os.kill(int(pid), signal.SIGKILL)
            np.testing.assert_array_equal(pw.get(y), values + 2)
            np.testing.assert_array_equal(back, (values + 2) * 2)
            np.testing.assert_array_equal(step(pw.jax.to_jax(y)), values + 3)
            """,
            PW_ADDRESS=cluster.address,
        )
