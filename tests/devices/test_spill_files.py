"""The files of a host for arrays that have left its memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pw.core.errors import Error, ErrorReport
from pw.core.sharding import DeviceAddress
from pw.devices.host import spill_files
from pw.devices.host.backend import Part
from pw.devices.host.spill_files import SpillFolder

HERE = (DeviceAddress("h", 0), DeviceAddress("h", 1), DeviceAddress("h", 2))


class AtOnce:
    """Calls that block this thread."""

    def call(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = work()
        except OSError as error:
            result = error
        done(result)


def part(value: np.ndarray[Any, Any], *positions: int) -> Part:
    return positions, tuple((0, size) for size in value.shape), value


def written(folder: SpillFolder, *parts: Part) -> Any:
    answers: list[Any] = []
    folder.write(parts, HERE, answers.append)
    return answers[0]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_shards_are_read_as_they_were_written_also_when_the_file_is_deleted(tmp_path: Path) -> None:
    folder = SpillFolder(str(tmp_path), AtOnce())
    transposed = np.arange(12, dtype=np.float64).reshape(3, 4).T
    narrow = np.arange(5).astype(ml_dtypes.bfloat16)
    scalar = np.array(7, np.int32)
    file = written(folder, part(transposed, 0), part(narrow, 1), part(scalar, 2))
    (path,) = (one for one in entries(tmp_path) if one.is_file())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    folder.delete(file)
    assert not path.exists()
    first, second, third = file.read([(0, ((1, 3), (0, 2))), (1, ((0, 5),)), (2, ())])
    assert np.array_equal(first, transposed[1:3, :2])
    assert np.array_equal(second, narrow)
    assert (third.shape, int(third)) == ((), 7)
    folder.close()
    assert not entries(tmp_path)


def test_a_process_removes_what_killed_ones_left_and_nothing_of_those_that_live(
    tmp_path: Path,
) -> None:
    living = SpillFolder(str(tmp_path), AtOnce())
    kept = written(living, part(np.ones(8), 0))
    (path,) = tmp_path.iterdir()
    killed = path.with_name(path.name[:-8] + "12345678")
    killed.mkdir()
    (killed / "1").write_bytes(b"left")
    stranger = tmp_path / "pw-notes"
    stranger.mkdir()
    SpillFolder(str(tmp_path), AtOnce()).close()
    assert not killed.exists()
    assert stranger.exists()
    assert Path(kept.path).exists()


def test_a_full_disk_is_an_answer_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SpillFolder(str(tmp_path), AtOnce())
    pwrite, left = os.pwrite, 100

    def short_of_room(descriptor: int, data: Any, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size_bytes = min(left, len(data))
        left -= size_bytes
        return pwrite(descriptor, data[:size_bytes], offset)

    monkeypatch.setattr(spill_files.os, "pwrite", short_of_room)
    answer = written(folder, part(np.ones(100), 0))
    assert isinstance(answer, ErrorReport)
    assert f"{tmp_path} (--spill-files): No space left" in answer.message
    assert not [one for one in entries(tmp_path) if one.is_file()]


def test_a_folder_of_no_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(Error, match=f"no folder {missing}.*make it"):
        SpillFolder(missing, AtOnce())
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(Error, match=f"cannot be written to {tmp_path}"):
            SpillFolder(str(tmp_path), AtOnce())
