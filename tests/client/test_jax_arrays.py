"""`jax.Array`s on virtual devices become `pw.Array`s, and back.

JAX has virtual devices from its start, so the bodies of tests run in scripts of their own: one with a
cluster of its own, one with hosts of another cluster. They start once, and get one body after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import pw
from tests.client.test_figure2 import FIGURE, PRINTED
from tests.stages.daemons import Program, until
from tests.stages.scripts import PRELUDE

DEVICES = 4

SETUP = """
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
import pw.jax
from tests.stages.daemons import until

def moved():
    "Bytes that have left or reached any process by the bulk plane, or lie inside messages of fetches."
    every = pw.stats().values()
    return sum(v for one in every for k, v in one.items() if k.startswith("bulk_bytes"))

def held():
    "Bytes on the devices; shared shards count once."
    import gc; gc.collect()
    return sum(one.get("live_bytes", 0) for one in pw.stats().values())

mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
split = NamedSharding(mesh, P("a", "b"))
rows = NamedSharding(mesh, P(("b", "a")))
whole = NamedSharding(mesh, P())
values = np.arange(64, dtype=np.float32).reshape(8, 8)
"""


BODIES = """
import json, traceback

for line in open(sys.argv[1]):
    body, said = json.loads(line)
    words = ""
    try:
        exec(body, dict(globals()))
    except BaseException:
        words = traceback.format_exc()
    with open(said + ".new", "w") as file:
        file.write(words)
    os.rename(said + ".new", said)
"""


class Bodies:
    """A script that gets bodies through a named pipe, and runs one after the other.

    Args:
        folder: for its files; one of its own.
        variables: environment variables, which say where it computes.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self._said = (folder / f"said{number}" for number in itertools.count())
        os.mkfifo(folder / "bodies")
        self._pipe = os.open(folder / "bodies", os.O_RDWR)  # does not wait for the reader
        code = PRELUDE + SETUP + BODIES
        variables["JAX_PLATFORMS"] = "pw"
        self.program = Program(folder, ["-c", code, str(folder / "bodies")], **variables)

    def __call__(self, body: str) -> None:
        """Run a body; fails with the error that it raises."""
        said = next(self._said)
        os.write(self._pipe, (json.dumps([textwrap.dedent(body), str(said)]) + "\n").encode())
        ended = self.program.process.poll
        until(lambda: said.exists() or ended() is not None, f"{body}\n{self.program.err}", 90)
        assert said.exists(), self.program.err
        assert not said.read_text(), said.read_text()

    def close(self) -> None:
        """End the script; fails if something is left of it."""
        os.close(self._pipe)
        try:
            assert self.program.end() == 0, self.program.err
            self.program.until_alone()
        finally:
            self.program.kill()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bodies]:
    """The script whose cluster starts with it."""
    bodies = Bodies(tmp_path_factory.mktemp("embedded"), PW_DEVICES=f"{DEVICES}")
    yield bodies
    bodies.close()


@pytest.fixture(scope="module")
def on_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bodies]:
    """The script whose devices are those of two hosts."""
    with pw.LocalCluster(hosts_per_island=2, devices_per_host=2, connect=False) as cluster:
        supervisor = str(cluster.hosts[0].pid)
        where = {"PW_ADDRESS": cluster.address, "SUPERVISOR": supervisor}
        bodies = Bodies(tmp_path_factory.mktemp("cluster"), **where)
        yield bodies
        bodies.close()


@pytest.fixture(params=["embedded", "on_a_cluster"])
def run(request: pytest.FixtureRequest) -> Bodies:
    """Each of the two scripts."""
    bodies: Bodies = request.getfixturevalue(request.param)
    return bodies


def test_arrays_convert_without_moving_bytes(run: Bodies) -> None:
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
        """
    )


def test_each_side_is_deleted_and_donated_apart(run: Bodies) -> None:
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
        """
    )


def test_programs_and_functions_take_arrays_of_jax(embedded: Bodies) -> None:
    embedded(
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
        """
    )


def test_dtypes_keys_and_other_shardings(embedded: Bodies) -> None:
    embedded(
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
        jax.config.update("jax_enable_x64", False)
        """
    )


def test_what_cannot_be_converted_says_why(embedded: Bodies) -> None:
    embedded(
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
        """
    )


def test_arrays_in_host_memory(embedded: Bodies) -> None:
    embedded(
        """
        for sharding in (split, rows, SingleDeviceSharding(jax.devices()[0])):
            x = jax.device_put(values, sharding.with_memory_kind("pinned_host"))
            y = pw.jax.from_jax(x)
            assert y.sharding.memory_kind == "pinned_host"
            np.testing.assert_array_equal(y, values)
            doubled = pw.jit(lambda y: jax.device_put(y, jax.memory.Space.Device) * 2)(y)
            assert doubled.sharding.memory_kind == "device"
            np.testing.assert_array_equal(doubled, values * 2)
            for array in (y, pw.put(doubled, sharding=y.sharding)):
                back = pw.jax.to_jax(array)
                assert back.sharding.memory_kind == "pinned_host"
                np.testing.assert_array_equal(back, array)
                moved = jax.device_put(back, back.sharding.with_memory_kind("device"))
                np.testing.assert_array_equal(moved + 1, np.asarray(array) + 1)
        """
    )


def test_a_pipeline_takes_arrays_and_functions_of_plain_jax(embedded: Bodies) -> None:
    embedded(
        """
        up = jax.jit(lambda p, x: jnp.tanh(x @ p))
        loss = jax.jit(lambda p, x, y: jnp.mean((x @ p - y) ** 2))
        ones = [SingleDeviceSharding(device) for device in jax.devices()[:2]]
        meshes = [pw.jax.sharding_of(one).mesh for one in ones]
        step = pw.pipeline([up, loss], meshes=meshes, microbatches=2)
        x, w = jax.device_put(values / 64, rows), jax.device_put(values / 99, whole)
        found, gradients = step.gradients([w, w], x, x)
        assert isinstance(found, pw.Array)
        expected = jax.value_and_grad(lambda w: loss(w[1], up(w[0], x), x))([w, w])
        np.testing.assert_allclose(found, expected[0], rtol=1e-5)
        for one, other in zip(gradients, expected[1]):
            back = pw.jax.to_jax(one)
            assert isinstance(back, jax.Array)
            np.testing.assert_allclose(back, other, rtol=1e-4, atol=1e-6)
        """
    )


def test_the_papers_program_as_printed(run: Bodies) -> None:
    run(
        f"""
        import contextlib, io

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec({FIGURE!r}, {{}})
        assert printed.getvalue() == {PRINTED!r}
        """
    )


def test_a_program_of_functions_of_plain_jax(run: Bodies) -> None:
    run(
        """
        pairs = [Mesh(np.array(jax.devices()[at : at + 2]), ("x",)) for at in (0, 2)]
        near, far = (NamedSharding(mesh, P("x")) for mesh in pairs)
        first = jax.jit(lambda w, x: jnp.tanh(x * w), in_shardings=(near, near), out_shardings=near)
        second = jax.pmap(lambda x: x * jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[2:4])

        def loss(first, second):
            return lambda w, x: (second(first(w, x) * 2) ** 2).sum()

        train = pw.program(jax.value_and_grad(loss(first, second)))
        plain = jax.value_and_grad(
            loss(lambda w, x: jnp.tanh(x * w), lambda x: x * x.sum(0))
        )
        w, x = values[:2] / 64, jax.device_put(values[2:4] / 64, near)
        value, gradient = train(w, x)
        expected = plain(w, np.asarray(x))
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-6)
        assert pw.jax.to_jax(gradient).sharding.is_equivalent_to(near, 2)
        moved = pw.program(lambda x: jax.device_put(first(x, x), far) + 1)(x)
        assert pw.jax.to_jax(moved).sharding.is_equivalent_to(far, 2)
        """
    )


def test_checkpoints_of_arrays_of_jax(on_a_cluster: Bodies, tmp_path: Path) -> None:
    on_a_cluster(
        f"""
        x = jax.device_put(values, split)
        jax.block_until_ready(x)
        pw.checkpoint({{"x": x, "n": 3}}).result(60)
        pw.checkpoint({{"x": x, "n": 3}}, path="{tmp_path}/saved").result(60)
        read = pw.restore("{tmp_path}/saved", like={{"x": pw.jax.from_jax(x), "n": 0}})
        np.testing.assert_array_equal(pw.jax.to_jax(read["x"]), values)
        """
    )


def test_a_lost_host_is_a_pause(on_a_cluster: Bodies) -> None:
    on_a_cluster(
        """
        import signal

        x = jax.device_put(values, split)
        step = jax.jit(lambda x: x + 1)
        x = step(step(x))
        y = pw.jax.from_jax(x)
        z = pw.jit(lambda y: y * 2)(y)
        back = pw.jax.to_jax(z)
        jax.block_until_ready(back)
        del x, z
        supervisor = os.environ["SUPERVISOR"]
        for pid in open(f"/proc/{supervisor}/task/{supervisor}/children").read().split():
            os.kill(int(pid), signal.SIGKILL)
        np.testing.assert_array_equal(pw.get(y), values + 2)
        np.testing.assert_array_equal(back, (values + 2) * 2)
        np.testing.assert_array_equal(step(pw.jax.to_jax(y)), values + 3)
        """
    )
