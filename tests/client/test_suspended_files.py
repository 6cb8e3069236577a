"""Copies of suspended clients, and of checkpoints, in files of their hosts, on real devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pw
from pw.client.connection import current
from pw.testing import InProcessCluster
from tests.stages.daemons import until

MIB = 1 << 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[InProcessCluster]:
    with InProcessCluster(
        devices_per_island=2, spill_bytes=2 * MIB, spill_files=str(tmp_path)
    ) as cluster:
        yield cluster


def arrays(number: int) -> tuple[list[np.ndarray], list[pw.Array]]:
    """So many arrays of 1 MiB that a function has made, and their values."""
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
    rows = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
    values = [np.arange(MIB // 4, dtype=np.float32) + at for at in range(number)]
    double = pw.jit(lambda x: 2 * x, mesh=mesh)
    made = [double(pw.put(value, sharding=rows)) for value in values]
    pw.block_until_ready(made)
    until(lambda: pw.stats()["controller"]["live_arrays"] == number, "their arguments are dropped")
    return [2 * value for value in values], made


def copies() -> tuple[int, int]:
    """Bytes of copies in host memory, and in files."""
    stats = pw.stats()["host-0"]
    return stats["replica_bytes"], stats["replica_file_bytes"]


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check(values: list[np.ndarray], read: list[pw.Array]) -> None:
    for value, array in zip(values, read, strict=True):
        np.testing.assert_array_equal(pw.get(array), value)


def test_a_client_leaves_for_files_and_comes_back(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    values, made = arrays(4)
    for _ in range(2):
        pw.suspend(to="files")
        assert copies() == (0, 4 * MIB)
        assert on_disk(tmp_path) == 4 * MIB
        pw.resume()
        check(values, made)
        until(lambda: copies() == (0, 0), "the copies are dropped")
        until(lambda: not on_disk(tmp_path), "their files are deleted")


def test_a_client_that_is_suspended_already_leaves_memory_afterwards(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    values, made = arrays(1)
    pw.suspend()
    assert copies() == (MIB, 0)
    pw.suspend(to="files")
    until(lambda: copies() == (0, MIB), "the copies are in files")
    pw.resume()
    check(values, made)


def test_the_files_of_a_suspended_client_that_leaves_are_deleted(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    first, session = current.runtime(), cluster.client()
    current.use(session)
    _, made = arrays(3)
    pw.suspend(to="files")
    assert on_disk(tmp_path) == 3 * MIB
    current.use(first)
    session.close()
    until(lambda: not on_disk(tmp_path), "no files are left")
    assert copies() == (0, 0)
    del made


@pytest.mark.parametrize("by", ["suspend", "checkpoint"])
def test_copies_beyond_the_memory_for_them_go_to_files(
    cluster: InProcessCluster, tmp_path: Path, by: str
) -> None:
    values, made = arrays(5)
    if by == "suspend":
        pw.suspend()
    else:
        pw.checkpoint(made).result()
    until(lambda: copies()[0] <= 2 * MIB, "no more is in memory than --spill")
    in_memory, in_files = copies()
    assert in_memory + in_files == 5 * MIB
    pw.resume()
    check(values, made)
    del made
    until(lambda: not on_disk(tmp_path), "no files are left")
    assert copies() == (0, 0)
