"""Checkpoints lie where the owner of a host allows it, and their files are regular and not too large."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pw
from pw.core.errors import CheckpointFailed
from pw.core.messages import CommitFiles, CopyFile, FileSource
from pw.core.sharding import ArraySpec, Box, Placement, Sharding
from pw.devices.host import checkpoint_format, checkpoint_paths, checkpoint_reader
from tests.stages.daemons import start_module, until

ID, OTHER = "0123456789abcdef", "fedcba9876543210"
FILE = f"{ID}-00000.safetensors"


def spec_of(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "int32", Sharding((), (), ()), Placement(0, (0,)))


def whole(*shape: int) -> Box:
    return tuple((0, size) for size in shape)


def save(path: Path, value: np.ndarray[Any, Any], root: str = "") -> None:
    shard = checkpoint_format.Shard("x", spec_of(*value.shape), whole(*value.shape), value)
    checkpoint_format.write(CopyFile(ID, str(path), True, FILE, ("x",), ()), [shard], root)
    checkpoint_format.commit(CommitFiles(ID, str(path), True, (FILE,), b"[]", ()), root)


def load(
    path: Path, box: Box, shape: tuple[int, ...], root: str = "", **how: int
) -> np.ndarray[Any, Any]:
    reader = checkpoint_reader.CheckpointReader(str(path), ID, root, **how)
    (found,) = reader.read(FileSource(str(path), ID, "x"), spec_of(*shape), [box])
    return found


def test_a_folder_is_missing_only_where_this_host_may_look(tmp_path: Path) -> None:
    inside, outside = tmp_path / "root", tmp_path / "outside"
    inside.mkdir()
    save(inside / "there", np.arange(3, dtype=np.int32))
    (inside / "file").write_text("no folder")
    (inside / "loop").symlink_to("loop")
    (inside / "out").symlink_to(outside)
    names = ("there", "gone", "file", "file/below", "loop", "out", "out/below")
    paths = [f"{inside / name}" for name in names]
    bad = [f"{inside}/../gone", "gone", f"{tmp_path}/gone"]
    root = os.path.realpath(inside)
    missing = {os.path.relpath(one, inside) for one in checkpoint_paths.missing(paths + bad, root)}
    assert missing == {"gone", "file", "file/below"}
    assert f"{tmp_path}/gone" in checkpoint_paths.missing(bad, "")


def within(seconds: float, act: Callable[[], Any]) -> BaseException | None:
    """Return what `act` raises; fail if it does not end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - it is the result
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "a thread for files is blocked"
    return raised[0] if raised else None


def blocked(path: Path) -> None:
    """Let a thread go on that opened a FIFO to read it."""
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def root(tmp_path: Path) -> str:
    folder = tmp_path / "root"
    folder.mkdir()
    return os.path.realpath(folder)


# --- what is opened --------------------------------------------------------------------------------------


def test_a_fifo_is_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    os.mkfifo(path / "manifest.json")
    try:
        error = within(60, lambda: checkpoint_format.describe(str(path)))
    finally:
        blocked(path / "manifest.json")
    assert isinstance(error, CheckpointFailed)
    assert "regular" in str(error)


def test_a_fifo_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, np.arange(4, dtype=np.int32))
    (path / FILE).unlink()
    os.mkfifo(path / FILE)
    try:
        error = within(60, lambda: load(path, whole(4), (4,)))
    finally:
        blocked(path / FILE)
    assert isinstance(error, CheckpointFailed)


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_a_link_is_no_file_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    save(path, np.arange(4, dtype=np.int32))
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointFailed):
        load(path, whole(4), (4,))


def test_a_huge_manifest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    with (path / "manifest.json").open("wb") as sparse:
        sparse.truncate(2 << 30)

    def read(*_: Any) -> bytes:
        raise AssertionError("it is read")

    monkeypatch.setattr(checkpoint_paths, "read_exactly", read)
    with pytest.raises(CheckpointFailed, match="are the most"):
        checkpoint_format.describe(str(path))


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, np.arange(4, dtype=np.int32))
    with (path / FILE).open("r+b") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(2 << 30)
    manifest = (path / "manifest.json").read_text()
    size = manifest.split('"size_bytes":')[1].split(",")[0]
    (path / "manifest.json").write_text(
        manifest.replace(f'"size_bytes":{size}', f'"size_bytes":{2 << 30}')
    )
    with pytest.raises(CheckpointFailed, match="are the most"):
        load(path, whole(4), (4,))


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path, size: int) -> None:
    """A host that had mapped the file got a signal, which ended it."""
    path, value = tmp_path / "checkpoint", np.arange(64, dtype=np.int32).reshape(8, 8)
    save(path, value)
    reader = checkpoint_reader.CheckpointReader(str(path), ID)
    source = FileSource(str(path), ID, "x")
    np.testing.assert_array_equal(reader.read(source, spec_of(8, 8), [whole(8, 8)])[0], value)
    os.truncate(path / FILE, size)
    for box in (whole(8, 8), ((0, 8), (2, 4))):
        with pytest.raises(CheckpointFailed, match="damaged"):
            reader.read(source, spec_of(8, 8), [box])


def test_every_box_of_an_array_can_be_read(tmp_path: Path) -> None:
    path, value = tmp_path / "checkpoint", np.arange(6 * 5 * 4, dtype=np.int32).reshape(6, 5, 4)
    save(path, value)
    for block_bytes in (1, 16, 100, 1 << 20):
        for box in (
            whole(6, 5, 4),
            ((2, 4), (0, 5), (0, 4)),
            ((1, 6), (2, 4), (0, 4)),
            ((0, 6), (1, 2), (3, 4)),
            ((5, 6), (4, 5), (1, 3)),
        ):
            wanted = value[tuple(slice(*part) for part in box)]
            found = load(path, box, value.shape, block_bytes=block_bytes)
            np.testing.assert_array_equal(found, wanted)


def test_a_description_that_is_no_json_does_not_become_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shard = checkpoint_format.Shard("x", spec_of(1), whole(1), np.zeros(1, np.int32))
    checkpoint_format.write(CopyFile(ID, str(path), True, FILE, ("x",), ()), [shard])
    with pytest.raises(CheckpointFailed, match="JSON"):
        checkpoint_format.commit(
            CommitFiles(ID, str(path), True, (FILE,), b'[],"files":{"../../etc/passwd":{}}', ())
        )
    assert not path.exists()


# --- where it lies ---------------------------------------------------------------------------------------


def test_a_checkpoint_in_the_root_is_written_and_read(root: str) -> None:
    path = Path(root) / "a" / "b"
    save(path, np.arange(4, dtype=np.int32), root)
    np.testing.assert_array_equal(load(path, whole(4), (4,), root), np.arange(4))
    assert checkpoint_format.describe(str(path), root)[0] == ID
    assert checkpoint_format.abandon(str(path), ID, root)


@pytest.mark.parametrize(
    "path",
    [
        "{root}",
        "{root}/../outside",
        "{root}/./x",
        "{root}//x",
        "{root}-beside",
        "{root}/link/x",
        "{root}/link",
        "/",
        "/etc",
        "relative",
        "",
        "{root}/\0",
    ],
)
def test_no_path_leads_out_of_the_root(root: str, tmp_path: Path, path: str) -> None:
    outside = tmp_path / "outside"
    save(outside, np.arange(4, dtype=np.int32))
    (Path(root) / "link").symlink_to(tmp_path)
    before = sorted(tmp_path.iterdir())
    text = path.format(root=root)
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint_format.write(CopyFile(OTHER, text, True, FILE, ("x",), ()), [], root),
        lambda: checkpoint_format.commit(CommitFiles(OTHER, text, True, (FILE,), b"[]", ()), root),
        lambda: checkpoint_format.abandon(text, OTHER, root),
        lambda: checkpoint_format.describe(text, root),
        lambda: checkpoint_reader.CheckpointReader(text, ID, root),
    ]
    for call in calls:
        with pytest.raises(CheckpointFailed):
            call()
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_becomes_a_link_is_not_followed(root: str, tmp_path: Path) -> None:
    """The path was resolved before it was changed."""
    outside = tmp_path / "outside"
    save(outside, np.arange(4, dtype=np.int32))
    (Path(root) / "x").symlink_to(outside)
    with pytest.raises(CheckpointFailed):
        checkpoint_format.manifest_at(f"{root}/x")


def test_a_link_in_the_place_of_the_files_is_not_followed(root: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (Path(root) / f".x.pw-{ID}").symlink_to(outside)
    with pytest.raises(CheckpointFailed, match="symbolic link"):
        save(Path(root) / "x", np.arange(4, dtype=np.int32), root)
    assert not list(outside.iterdir())


@pytest.mark.processes
def test_a_worker_keeps_checkpoints_in_its_root(root: str, tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    controller = start_module("pw.cli.controller", "--bind", "tcp://127.0.0.1:0", folder=folder)
    started = [controller]
    try:
        controller.until_says("listens at")
        address = re.findall(r"listens at (\S+)", controller.out)[0]
        place = ("--controller", address, "--island", "i", "--checkpoint-root", root)
        started.append(start_module("pw.cli.worker", *place, folder=folder))
        pw.connect(address)
        until(
            lambda: any(island.state == "ready" for island in pw.status().islands),
            "the island is ready",
        )
        devices = pw.make_virtual_device_set().add_slice(devices=1).devices
        x = pw.put(np.arange(4), devices)
        pw.checkpoint(x, path=f"{root}/inside").result()
        np.testing.assert_array_equal(pw.restore(f"{root}/inside", x), np.arange(4))
        with pytest.raises(CheckpointFailed, match="--checkpoint-root"):
            pw.checkpoint(x, path=tmp_path / "outside").result()
        with pytest.raises(CheckpointFailed, match="--checkpoint-root"):
            pw.restore(tmp_path / "outside", x)
    finally:
        pw.disconnect()
        for program in started:
            program.kill()
