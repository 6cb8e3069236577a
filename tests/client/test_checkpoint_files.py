"""Checkpoints on disk: what was written comes back, anywhere, or it is said why not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

import pw
from pw.client.connection import current
from pw.core.sharding import ArraySpec, Box, Placement, Sharding
from pw.devices.host import checkpoint_format, checkpoint_reader
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.stage import held, live, mesh_on, numbers, split, until_live

BOUND_S = 30.0

DTYPES = (
    *(
        "bool",
        "int4",
        "uint4",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float4_e2m1fn", "float8_e8m0fnu", "float8_e4m3fn", "float8_e4m3", "float8_e5m2"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4"),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def east(cluster: InProcessCluster) -> pw.Mesh:
    part = pw.make_virtual_device_set().add_slice(devices=4, island="island-0")
    return pw.Mesh(np.array(part.devices).reshape(2, 2), ("x", "y"))


@pytest.fixture(scope="module")
def west(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(1, 4, "z")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "last"


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hosts read no checkpoint before this is set."""
    reader, gate = checkpoint_reader.CheckpointReader, threading.Event()

    def gated(*args: Any) -> Any:
        assert gate.wait(BOUND_S)
        return reader(*args)

    monkeypatch.setattr(checkpoint_reader, "CheckpointReader", gated)
    yield gate
    gate.set()


def on(mesh: pw.Mesh, *spec: Any) -> pw.NamedSharding:
    return pw.NamedSharding(mesh, P(*spec))


def save(tree: Any, path: Path, *, overwrite: bool = False) -> None:
    pw.checkpoint(tree, path=path, overwrite=overwrite).result(BOUND_S)


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- round trips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(
    east: pw.Mesh, west: pw.Mesh, path: Path, dtype: str
) -> None:
    with jax.enable_x64(True):
        value = (np.arange(96).reshape(8, 12) % 2).astype(jnp.dtype(dtype))
        tree = {"x": pw.put(value, sharding=on(east, "x", "y")), "one": pw.put(value[0, 1])}
        save(tree, path)
        back = pw.restore(path, {"x": on(west, None, "z"), "one": tree["one"]})
    assert back["x"].dtype == value.dtype
    assert np.asarray(back["x"]).tobytes() == value.tobytes()
    assert np.asarray(back["one"]).tobytes() == value[0, 1].tobytes()


@pytest.mark.parametrize("before", [("x", "y"), (None, ("y", "x")), (("x", "y"),), (), ("y",)])
@pytest.mark.parametrize("after", [("z",), (None, "z"), (), (None, None)])
def test_any_sharding_is_read_from_any_other(
    east: pw.Mesh, west: pw.Mesh, path: Path, before: Any, after: Any
) -> None:
    value = numbers(8 * 16).reshape(8, 16)
    save(pw.put(value, sharding=on(east, *before)), path)
    back = pw.restore(path, on(west, *after))
    np.testing.assert_array_equal(back, value)
    assert back.sharding.is_equivalent_to(on(west, *after), back.ndim)


def test_meshes_over_several_islands(east: pw.Mesh, west: pw.Mesh, path: Path) -> None:
    devices = np.array([*east.devices.flat, *west.devices.flat])
    meshes = [
        pw.Mesh(devices.reshape(2, 4).T, ("x", "z")),
        pw.Mesh(devices[[0, 4, 5, 1, 2, 6]].reshape(3, 2), ("x", "z")),
    ]
    value = numbers(24 * 48).reshape(24, 48)
    shardings = [
        pw.NamedSharding(mesh, spec)
        for mesh in meshes
        for spec in (P(("x", "z")), P("z", "x"), P())
    ]
    tree = {str(at): pw.put(value, sharding=one) for at, one in enumerate(shardings)}
    save(tree, path)
    for like in (tree, dict(zip(tree, reversed(shardings), strict=True))):
        for name, array in pw.restore(path, like).items():
            assert array.sharding == getattr(like[name], "sharding", like[name])
            np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize("shape", [(0,), (4, 0, 2), (), (1, 1, 1)])
def test_empty_and_single_elements(west: pw.Mesh, path: Path, shape: tuple[int, ...]) -> None:
    value = np.ones(shape, np.float32)
    save({"x": pw.put(value, sharding=on(west))}, path)
    back = pw.restore(path, {"x": on(west)})["x"]
    np.testing.assert_array_equal(back, value)
    assert back.shape == shape


def test_every_box_is_written_once_and_divided_among_those_that_have_it(
    east: pw.Mesh, west: pw.Mesh, path: Path
) -> None:
    tree = {
        "replicated": pw.put(numbers(64), sharding=on(east)),
        "split": pw.put(numbers(64), sharding=on(west, "z")),
    }
    save(tree, path)
    assert {file.stat().st_mode & 0o777 for file in files(path)} == {0o666 & ~umask()}
    sizes = [file.stat().st_size for file in files(path)]
    assert len(sizes) == 2
    assert sum(sizes) < 2 * 64 * 4 + 2 * 1024
    found = {}
    for file in files(path):
        with safe_open(file, "np") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    np.testing.assert_array_equal(found["['replicated'] 0:64"], numbers(64))
    np.testing.assert_array_equal(found["['split'] 16:32"], numbers(16, 16))


def test_trees_come_back_with_keys_weak_types_numbers_and_shared_arrays(
    east: pw.Mesh, west: pw.Mesh, path: Path
) -> None:
    x = pw.put(numbers(8), sharding=on(east, "x"))
    keys = pw.put(jax.random.split(jax.random.key(7), 4), sharding=on(east, "x"))
    tree = {
        "again": x,
        "x": x,
        "keys": keys,
        "weak": pw.put(2.5),
        "state": (3, 1.5, True, 2 - 1j, float("inf"), None, 10**30),
        "host": [np.arange(5), np.float32(0.1), jnp.ones(2), jax.random.key(1), np.zeros(0)],
    }
    save(tree, path)
    like = {**tree, "x": on(west, "z"), "again": on(west, "z"), "keys": on(west)}
    back = pw.restore(path, like)
    assert back["state"] == tree["state"]
    assert isinstance(back["state"][0], int)
    for one, other in zip(back["host"][:3], tree["host"][:3], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert back["host"][4].shape == (0,)
    assert back["host"][3] == jax.random.key(1)
    assert back["weak"].weak_type
    assert back["x"] is back["again"]
    assert back["keys"].dtype == keys.dtype
    draw = pw.jit(jax.vmap(lambda key: jax.random.normal(key)), mesh=west)
    np.testing.assert_array_equal(
        draw(back["keys"]), jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(7), 4))
    )


class Moments(NamedTuple):
    mu: Any
    step: int


def test_a_tree_comes_back_as_it_was_saved(west: pw.Mesh, path: Path) -> None:
    x = pw.put(numbers(8), sharding=on(west, "z"))
    tree = {
        "name": "run 7",
        "layers": [{"w": x, "b": None}, ()],
        "pair": (x, [1.5, True]),
        "opt": Moments(x, 3),
        "steps": {7: np.arange(3)},
    }
    save(tree, path)
    there = on(west, "z")
    for sharding in (None, there):
        back = pw.restore(path, sharding=sharding)
        arrays = [back["layers"][0].pop("w"), back["opt"].pop("mu"), back["pair"][0]]
        for array in arrays:
            np.testing.assert_array_equal(array, numbers(8))
            assert array is arrays[0]
            assert sharding is None or array.sharding == there
        np.testing.assert_array_equal(back.pop("steps")[7], np.arange(3))
        assert back == {
            "name": "run 7",
            "layers": [{"b": None}, ()],
            "pair": (arrays[2], [1.5, True]),
            "opt": {"step": 3},
        }
    assert pw.restore(path, {"name": "", "pair": (there, [0, 0])})["name"] == "run 7"


@pytest.mark.parametrize("tree", [{"step": 3, "name": "a"}, [], 1.5, "text"])
def test_a_tree_without_arrays_comes_back(west: pw.Mesh, path: Path, tree: Any) -> None:
    save(tree, path)
    assert pw.restore(path) == tree
    assert pw.restore(path, tree) == tree


def test_where_things_shall_lie_can_be_said_in_several_ways(
    east: pw.Mesh, west: pw.Mesh, path: Path
) -> None:
    tree = {"a": pw.put(numbers(8), sharding=on(east, "x")), "b": (pw.put(numbers(4)), 5)}
    save(tree, path)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), tree)
    there = on(west, "z")
    for like, sharding in (
        ({"a": there}, None),
        ({"a": shapes["a"]}, there),
        (shapes, {"a": there, "b": (on(west), None)}),
        ({"a": numbers(8), "b": (there, 0)}, {"a": there, "b": None}),
    ):
        back = pw.restore(path, like, sharding=sharding)
        assert back["a"].sharding == there
        np.testing.assert_array_equal(back["a"], numbers(8))
    default = pw.restore(path, shapes)
    assert default["a"].sharding.mesh.size == 1
    assert default["b"][1] == 5
    as_it_was = pw.restore(path, tree)
    assert as_it_was["a"].sharding == tree["a"].sharding
    number = pw.restore(path, {"b": [tree["b"][0], on(west)]})["b"][1]
    assert isinstance(number, pw.Array)
    assert int(number) == 5


def test_part_of_a_tree_can_be_restored(west: pw.Mesh, path: Path) -> None:
    save({"params": {"w": pw.put(numbers(8))}, "opt": [pw.put(numbers(4)), 3]}, path)
    back = pw.restore(path, {"params": {"w": on(west, "z")}})
    np.testing.assert_array_equal(back["params"]["w"], numbers(8))
    assert pw.restore(path, {"opt": [on(west), 0]})["opt"][1] == 3


def test_results_can_be_computed_with_at_once_donated_and_written_again(
    west: pw.Mesh, path: Path
) -> None:
    step = pw.jit(lambda x: x + 1, mesh=west, out_shardings=P("z"), donate_argnums=0)
    save(pw.put(numbers(4096), sharding=on(west, "z")), path)
    x = step(step(pw.restore(path, on(west, "z"))))
    save(x, path, overwrite=True)
    np.testing.assert_array_equal(step(pw.restore(path, x)), numbers(4096) + 3)


# --- order -----------------------------------------------------------------------------------------------


def test_what_is_donated_or_deleted_right_after_is_written_as_it_was(
    cluster: InProcessCluster, west: pw.Mesh, path: Path
) -> None:
    step = pw.jit(lambda x: x + 1, mesh=west, out_shardings=P("z"), donate_argnums=0)
    x = step(pw.put(numbers(4096), sharding=on(west, "z")))
    y = x * 2
    with held(cluster, 1):
        saving = pw.checkpoint({"x": x, "y": y}, path=path)
        for _ in range(3):
            x = step(x)
        y.delete()
        assert not saving.done()
    saving.result(BOUND_S)
    back = pw.restore(path, {"x": on(west), "y": on(west)})
    np.testing.assert_array_equal(back["x"], numbers(4096) + 1)
    np.testing.assert_array_equal(back["y"], (numbers(4096) + 1) * 2)
    np.testing.assert_array_equal(x, numbers(4096) + 4)


def test_the_last_of_several_to_the_same_path_stays(
    west: pw.Mesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, gate = checkpoint_format.write, threading.Event()
    first: list[str] = []

    def slow(job: Any, *rest: Any) -> None:
        first.append(job.checkpoint)
        if job.checkpoint == first[0]:
            assert gate.wait(BOUND_S)
        write(job, *rest)

    monkeypatch.setattr(checkpoint_format, "write", slow)
    x = pw.put(numbers(8), sharding=on(west, "z"))
    savings = [pw.checkpoint(x, path=path, overwrite=True)]
    until(lambda: first, "the first is being written")
    savings += [pw.checkpoint(x + i, path=path, overwrite=True) for i in (1, 2)]
    until(lambda: len(first) == 2, "the third waits, the second is being written")
    assert not any(saving.done() for saving in savings)
    gate.set()
    for saving in savings:
        saving.result(BOUND_S)
    np.testing.assert_array_equal(pw.restore(path, x), numbers(8) + 2)
    assert entries(path.parent) == [path.name]
    assert len(files(path)) == 1


def test_a_session_ends_when_its_checkpoints_are_on_disk(
    cluster: InProcessCluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, reached, gate = checkpoint_format.write, threading.Event(), threading.Event()

    def slow(job: Any, *rest: Any) -> None:
        reached.set()
        assert gate.wait(BOUND_S)
        write(job, *rest)

    monkeypatch.setattr(checkpoint_format, "write", slow)
    mine = current.use(cluster.client())
    try:
        pw.checkpoint(pw.put(numbers(8)), path=path)
        assert reached.wait(BOUND_S)
        threading.Timer(0.05, gate.set).start()
        pw.disconnect()
    finally:
        current.use(mine)
    np.testing.assert_array_equal(
        pw.restore(path, jax.ShapeDtypeStruct((8,), "float32")), numbers(8)
    )


def test_nothing_is_left_of_the_checkpoint_of_a_client_that_is_lost(
    cluster: InProcessCluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, reached, gate = checkpoint_format.write, threading.Event(), threading.Event()
    written = threading.Event()

    def slow(job: Any, *rest: Any) -> None:
        reached.set()
        assert gate.wait(BOUND_S)
        try:
            write(job, *rest)  # it fails if the folder is removed at that moment
        finally:
            written.set()

    monkeypatch.setattr(checkpoint_format, "write", slow)
    client = cluster.client()
    mine = current.use(client)
    try:
        saving = pw.checkpoint(pw.put(numbers(8)), path=path)
        assert reached.wait(BOUND_S)
        client.close(pw.Disconnected("lost"))
    finally:
        current.use(mine)
    with pytest.raises(pw.Disconnected):
        saving.result(BOUND_S)
    gate.set()
    assert written.wait(BOUND_S)
    until(lambda: not entries(path.parent), "it is removed")


# --- what is in the way ----------------------------------------------------------------------------------


def test_a_path_is_not_replaced_unless_that_is_wanted(west: pw.Mesh, path: Path) -> None:
    x = pw.put(numbers(8), sharding=on(west, "z"))
    path.mkdir(parents=True)  # an empty directory is no obstacle
    save({"x": x}, path)
    with pytest.raises(pw.CheckpointExists, match="overwrite=True") as raised:
        save({"x": x + 1}, path)
    assert isinstance(raised.value, FileExistsError)
    assert f"only the files at {path} have not been written" in str(raised.value)
    np.testing.assert_array_equal(pw.restore(path, {"x": x})["x"], numbers(8))
    save({"y": x + 1}, path, overwrite=True)
    np.testing.assert_array_equal(pw.restore(path, {"y": x})["y"], numbers(8) + 1)
    assert len(files(path)) == 1
    assert entries(path.parent) == [path.name]


def test_a_directory_that_cannot_be_made_is_no_missing_checkpoint(west: pw.Mesh) -> None:
    with pytest.raises(pw.CheckpointFailed, match="cannot be written") as raised:
        save(pw.put(numbers(8), sharding=on(west)), Path("/proc/none/here"))
    assert not isinstance(raised.value, pw.CheckpointNotFound)


@pytest.mark.parametrize("content", ["note.txt", "manifest.json", None])
def test_only_checkpoints_are_replaced(west: pw.Mesh, path: Path, content: str | None) -> None:
    path.parent.mkdir()
    if content is None:
        path.write_text("mine")
    else:
        path.mkdir()
        (path / content).write_text('{"name": "mine"}')
    with pytest.raises(pw.CheckpointExists, match="no checkpoint"):
        save(pw.put(numbers(8), sharding=on(west)), path, overwrite=True)
    assert (path if content is None else path / content).read_text()
    assert entries(path.parent) == [path.name]


def test_arguments_that_cannot_be(cluster: InProcessCluster, west: pw.Mesh, path: Path) -> None:
    x = pw.put(numbers(8), sharding=on(west))
    for bad in ("gs://bucket/x", b"/tmp/x", "/"):
        with pytest.raises(pw.ArgumentError, match="no path"):
            pw.checkpoint(x, path=bad)
        with pytest.raises(pw.ArgumentError, match="no path"):
            pw.restore(bad, x)
    with pytest.raises(pw.ArgumentError, match=r"pw\.put"):
        pw.checkpoint({"x": x, "big": np.zeros(100_000)}, path=path)
    with pytest.raises(pw.ArgumentError):
        pw.checkpoint({"x": x, "text": np.array(["a"])}, path=path)
    gone = x + 1
    gone.delete()
    with pytest.raises(pw.ArrayDeleted):
        pw.checkpoint([x, gone], path=path)
    assert not path.parent.exists()


def test_a_relative_path_is_relative_to_this_process(
    west: pw.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(pw.put(numbers(8), sharding=on(west)), Path("here"))
    monkeypatch.chdir(os.sep)
    np.testing.assert_array_equal(pw.restore(tmp_path / "here", on(west)), numbers(8))


def test_what_failed_is_not_written(west: pw.Mesh, path: Path) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("no such value")

    good = pw.put(numbers(8), sharding=on(west, "z"))
    bad = pw.host_function(
        fail, jax.ShapeDtypeStruct((8,), "float32"), devices=west.devices.flat[:1]
    )(good)
    with pytest.raises(pw.ComputationFailed, match="no such value"):
        save({"good": good, "bad": bad}, path)
    assert not path.parent.exists() or not entries(path.parent)


def test_one_host_that_cannot_write_fails_the_checkpoint_and_nothing_is_left(
    east: pw.Mesh, west: pw.Mesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = pw.put(numbers(8), sharding=on(east, "x")), pw.put(numbers(8), sharding=on(west, "z"))
    save({"x": x, "y": y}, path)
    serialize = checkpoint_format.serialize_file

    def full(tensors: Any, file: str, **options: Any) -> None:
        if file.endswith("-00001.safetensors"):
            raise OSError(28, "No space left on device")
        serialize(tensors, file, **options)

    monkeypatch.setattr(checkpoint_format, "serialize_file", full)
    with pytest.raises(pw.CheckpointFailed, match=r"No space left on device.*host-1"):
        save({"x": x + 1, "y": y}, path, overwrite=True)
    until(lambda: entries(path.parent) == [path.name], "what was written is removed")
    monkeypatch.undo()
    np.testing.assert_array_equal(pw.restore(path, {"x": x})["x"], numbers(8))
    save({"x": x + 1, "y": y}, path, overwrite=True)
    np.testing.assert_array_equal(pw.restore(path, {"x": x})["x"], numbers(8) + 1)


def test_a_directory_that_cannot_be_written_is_named(west: pw.Mesh, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pw.CheckpointFailed, match="Not a directory"):
        save(pw.put(numbers(8), sharding=on(west)), tmp_path / "file" / "below")


# --- atomicity -------------------------------------------------------------------------------------------


def commit_that_ends_at(monkeypatch: pytest.MonkeyPatch, step: int) -> list[str]:
    """The next commit ends before its n-th step that changes something, as if its process had ended."""
    steps: list[str] = []

    def counted(name: str, action: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            if len(steps) >= step:
                steps.append("end")
                raise OSError(5, "the host has ended")
            steps.append(name)
            return action(*args, **kwargs)

        return act

    monkeypatch.setattr(checkpoint_format.os, "rename", counted("rename", os.rename))
    monkeypatch.setattr(checkpoint_format.os, "fsync", counted("sync", os.fsync))
    monkeypatch.setattr(checkpoint_format.os, "remove", lambda *_: None)
    monkeypatch.setattr(checkpoint_format.shutil, "rmtree", lambda *_, **__: None)
    return steps


@pytest.mark.parametrize("old", [True, False])
def test_a_commit_may_end_anywhere(
    east: pw.Mesh, west: pw.Mesh, path: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = pw.put(numbers(8), sharding=on(east, "x")), pw.put(numbers(8), sharding=on(west, "z"))
    ended = False
    for step in range(20):
        if old:
            save({"x": x, "y": y}, path, overwrite=path.exists())
        with monkeypatch.context() as patch:
            steps = commit_that_ends_at(patch, step)
            saving = pw.checkpoint({"x": x + 1, "y": y + 1}, path=path, overwrite=old)
            try:
                saving.result(BOUND_S)
                ended = "end" not in steps
            except pw.CheckpointFailed:
                assert "end" in steps
        here = path.exists()
        assert here or not old
        if here:
            both = pw.get(pw.restore(path, {"x": x, "y": y}))
            added = int(both["x"][0])
            np.testing.assert_array_equal(both["x"], numbers(8) + added)
            np.testing.assert_array_equal(both["y"], numbers(8) + added)
            assert added in ((0, 1) if old else (1,))
            if not old:
                break
        if ended:
            break
    assert ended or not old
    save({"x": x + 2, "y": y}, path, overwrite=path.exists())
    assert entries(path.parent) == [path.name], "the junk of all that has gone with the next one"
    assert len(files(path)) == 2
    np.testing.assert_array_equal(pw.restore(path, {"x": x})["x"], numbers(8) + 2)


# --- reading ---------------------------------------------------------------------------------------------


def test_what_is_not_there_is_said_at_once(west: pw.Mesh, path: Path) -> None:
    with pytest.raises(pw.CheckpointNotFound, match="no checkpoint at") as raised:
        pw.restore(path, on(west))
    assert isinstance(raised.value, FileNotFoundError)
    save({"w": pw.put(numbers(8).reshape(2, 4)), "n": 3}, path)
    for like, words in (
        ({"v": on(west)}, r"\['v'\].*it has \['n'\], \['w'\]"),
        (on(west), "no single array"),
        ({"w": jax.ShapeDtypeStruct((4, 2), "float32")}, r"float32\[2, 4\].*not float32\[4, 2\]"),
        ({"w": jax.ShapeDtypeStruct((2, 4), "int32")}, r"float32\[2, 4\].*not int32\[2, 4\]"),
        ({"w": "z"}, r"'z' in the place of \['w'\], which is an array"),
        ({"n": "z"}, r"'z' in the place of \['n'\], which is a number"),
    ):
        with pytest.raises(pw.ArgumentError, match=words):
            pw.restore(path, like)
    with pytest.raises(pw.ShardingError):
        pw.restore(path, {"w": on(west, "z")})
    with pytest.raises(pw.ShardingError, match="NamedSharding"):
        pw.restore(path, {"w": 0}, sharding=P())
    for leaf in (P("z"), west, object()):
        with pytest.raises(pw.ShardingError, match=r"in the place of an array.*NamedSharding"):
            pw.restore(path, {"w": leaf})
    with pytest.raises(pw.TracerError):
        pw.jit(lambda x: pw.restore(path, {"w": on(west)}), mesh=west)(1.0)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"not json",
        b'{"format": "pw checkpoint", "version": 99, "id": "", "tree": [], "files": {}}',
    ],
)
def test_a_manifest_that_is_none_is_said_at_once(west: pw.Mesh, path: Path, damage: bytes) -> None:
    save(pw.put(numbers(8), sharding=on(west, "z")), path)
    (path / "manifest.json").write_bytes(damage)
    with pytest.raises(pw.CheckpointFailed, match=r"manifest\.json"):
        pw.restore(path, on(west, "z"))


def test_a_manifest_names_no_files_elsewhere(west: pw.Mesh, path: Path, tmp_path: Path) -> None:
    save(pw.put(numbers(8), sharding=on(west, "z")), path)
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
    ((name, file),) = manifest["files"].items()
    (path / name).rename(tmp_path / name)
    manifest["files"] = {f"../../{name}": file}
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(pw.CheckpointFailed, match="does not write"):
        pw.restore(path, on(west, "z"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def swap_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[::-1])


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (Path.unlink, pw.CheckpointNotFound, "No such file"),
        (truncate, pw.CheckpointFailed, "damaged: it has"),
        (flip, pw.CheckpointFailed, "not what was written"),
        (swap_header, pw.CheckpointFailed, "header"),
    ],
)
def test_damaged_files_fail_the_arrays_that_need_them(
    east: pw.Mesh, west: pw.Mesh, path: Path, damage: Any, error: type[pw.Error], words: str
) -> None:
    tree = {
        "x": pw.put(numbers(8), sharding=on(east, "x")),
        "y": pw.put(numbers(8), sharding=on(west, "z")),
    }
    save(tree, path)
    damage(files(path)[1])
    back = pw.restore(path, tree)
    np.testing.assert_array_equal(back["x"], numbers(8))
    later = back["y"] + 1
    for array in (back["y"], later):
        with pytest.raises(error, match=words):
            np.asarray(array)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_mixed_up(
    west: pw.Mesh, path: Path, reading: threading.Event
) -> None:
    x = pw.put(numbers(8), sharding=on(west, "z"))
    save(x, path)
    back = pw.restore(path, x)
    save(x + 1, path, overwrite=True)
    reading.set()
    with pytest.raises(pw.CheckpointNotFound, match="replaced"):
        np.asarray(back)


def test_many_arrays_are_read_with_few_openings(
    west: pw.Mesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = [pw.put(numbers(8, start), sharding=on(west, "z")) for start in range(40)]
    save(tree, path)
    opened = []
    real = checkpoint_reader.opened
    monkeypatch.setattr(checkpoint_reader, "opened", lambda path: opened.append(path) or real(path))
    back = pw.restore(path, [on(west, "z")] * 40)
    for start, array in enumerate(back):
        np.testing.assert_array_equal(array, numbers(8, start))
    assert len(opened) < 40


def test_deleting_what_is_still_being_read_leaves_nothing(
    west: pw.Mesh, path: Path, reading: threading.Event
) -> None:
    x = pw.put(numbers(8), sharding=on(west, "z"))
    save(x, path)
    pw.block_until_ready(x)
    before = live()
    back = pw.restore(path, x)
    back.delete()
    reading.set()
    until_live(before)


# --- the disk by itself ----------------------------------------------------------------------------------


def test_a_box_that_no_file_has_is_missed(tmp_path: Path) -> None:
    from pw.core.messages import CommitFiles, CopyFile, FileSource

    spec = ArraySpec((8,), "int32", Sharding((), ()), Placement(0, (0,)))
    half: Box = ((0, 4),)
    path, id_ = f"{tmp_path}/x", "0123456789abcdef"
    file = f"{id_}-00000.safetensors"
    shard = checkpoint_format.Shard("x", spec, half, np.arange(4, dtype=np.int32))
    checkpoint_format.write(CopyFile(id_, path, False, file, ("x",), ()), [shard])
    with pytest.raises(pw.CheckpointFailed, match="share"):
        checkpoint_format.commit(
            CommitFiles(id_, path, False, (file, f"{id_}-00001.safetensors"), b"[]", ())
        )
    assert entries(tmp_path) == []
    checkpoint_format.write(CopyFile(id_, path, False, file, ("x",), ()), [shard])
    (tmp_path / f".x.pw-{id_}" / ".tmp0").write_text("of a host that was killed while it wrote")
    checkpoint_format.commit(CommitFiles(id_, path, False, (file,), b"[]", ()))
    assert entries(tmp_path / "x") == [file, "manifest.json"]
    checkpoint_format.commit(
        CommitFiles(id_, path, False, (file,), b"[]", ())
    )  # a second one finds it done
    reader = checkpoint_reader.CheckpointReader(path, id_)
    source = FileSource(path, id_, "x")
    (part,) = reader.read(source, spec, [((1, 3),)])
    np.testing.assert_array_equal(part, [1, 2])
    with pytest.raises(pw.CheckpointFailed, match="no value"):
        reader.read(source, spec, [((2, 6),)])


def test_a_host_that_commits_leaves_what_another_is_about_to_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was taken for lost when it had written all and not renamed it yet."""
    from pw.core.messages import CommitFiles, CopyFile

    spec = ArraySpec((4,), "int32", Sharding((), ()), Placement(0, (0,)))
    path, id_ = f"{tmp_path}/x", "0123456789abcdef"
    file, staging = f"{id_}-00000.safetensors", tmp_path / f".x.pw-{id_}"
    shard = checkpoint_format.Shard("x", spec, ((0, 4),), np.arange(4, dtype=np.int32))
    checkpoint_format.write(CopyFile(id_, path, False, file, ("x",), ()), [shard])
    (staging / "manifest.json").write_text("the first host's")
    (staging / ".tmp0").write_text("of a host that was killed while it wrote")
    removed = []

    def remove(entry: str) -> None:
        removed.append(Path(entry).name)

    monkeypatch.setattr(checkpoint_format.os, "remove", remove)
    checkpoint_format.commit(CommitFiles(id_, path, False, (file,), b"[]", ()))
    assert removed == [".tmp0"]


@pytest.mark.parametrize("step", range(3))
def test_what_is_abandoned_while_it_is_committed_is_there_or_is_not(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pw.core.messages import CommitFiles, CopyFile

    spec = ArraySpec((4,), "int32", Sharding((), ()), Placement(0, (0,)))
    shard = checkpoint_format.Shard("x", spec, ((0, 4),), np.arange(4, dtype=np.int32))
    path, ids, steps, rename = f"{tmp_path}/x", ("0" * 16, "1" * 16), [], os.rename

    def put(id_: str) -> None:
        file = f"{id_}-00000.safetensors"
        checkpoint_format.write(CopyFile(id_, path, True, file, ("x",), ()), [shard])
        checkpoint_format.commit(CommitFiles(id_, path, True, (file,), b"[]", ()))

    def abandoned_before(one: str, other: str) -> None:
        if not other.endswith("-gone"):
            steps.append(other)
            if len(steps) == step + 1:
                assert not checkpoint_format.abandon(path, ids[1])
        rename(one, other)

    put(ids[0])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_format.os, "rename", abandoned_before)
        with pytest.raises(pw.CheckpointFailed):
            put(ids[1])
    assert checkpoint_format.describe(path)[0] == ids[0]
    assert entries(tmp_path) == ["x"]
    assert len(files(tmp_path / "x")) == 1
    put(ids[1])
    assert checkpoint_format.abandon(path, ids[1])
    assert checkpoint_format.describe(path)[0] == ids[1]


# --- processes -------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_hosts_write_and_read_by_themselves_and_again_after_a_loss(path: Path) -> None:
    def client_bytes() -> int:
        counters = pw.stats()["client"]
        return counters["bulk_sent_bytes"] + counters["bulk_received_bytes"]

    size = 1 << 18
    with pw.LocalCluster(hosts_per_island=2) as cluster:
        mesh = mesh_on(0)
        make = pw.jit(lambda: jnp.arange(size, dtype=jnp.float32), mesh=mesh, out_shardings=P("x"))
        x = make()
        before = client_bytes()
        save({"x": x, "n": 3}, path)
        assert len(files(path)) == 2
        total = pw.jit(lambda v: v.sum(), mesh=mesh)
        del x
        back = pw.restore(path, {"x": split(mesh), "n": 0})
        copied = pw.restore(path, {"x": on(mesh)})["x"]
        expected = float(np.arange(size, dtype=np.float64).sum())
        assert float(total(back["x"])) == pytest.approx(expected)
        assert client_bytes() == before
        victim = cluster.hosts[0].runtime_pid()
        assert victim is not None
        os.kill(victim, 9)
        np.testing.assert_array_equal(back["x"], numbers(size))
        np.testing.assert_array_equal(copied, numbers(size))
