"""Slices with a shape on real processes: local clusters, the cluster beside a script, and plain JAX."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pw
from tests.stages.daemons import Program
from tests.stages.scripts import finish, start_client

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=4) as cluster:
        yield cluster


def free() -> dict[str, tuple[tuple[int, ...], ...]]:
    return {island.name: island.free_blocks for island in pw.status().islands}


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (4, 1), (4,), (2, 1, 2), (2, 2, 2)], ids=str)
def test_a_mesh_has_the_shape_of_its_slice(
    cluster: pw.LocalCluster, shape: tuple[int, ...]
) -> None:
    names = ("x", "y", "z")[: len(shape)]
    slice_ = pw.make_virtual_device_set().add_slice(topology=shape)
    assert slice_.topology == shape
    mesh = pw.Mesh(slice_, names)
    assert tuple(mesh.shape.values()) == shape
    value = np.arange(64.0).reshape(8, 8)
    spec = pw.PartitionSpec(*names[:2])
    array = pw.put(value, sharding=pw.NamedSharding(mesh, spec))
    doubled = pw.jit(lambda x: x * 2 + x.sum(), mesh=mesh)(array)
    np.testing.assert_array_equal(np.asarray(doubled), value * 2 + value.sum())
    if len(shape) == 2:
        places = np.array([device.coords for device in slice_.devices]).reshape(*shape, 2)
        for axis in (0, 1):
            assert (np.abs(np.diff(places, axis=axis)).sum(-1) == 1).all(), "neighbours have a link"


def test_exclusive_slices_have_devices_of_their_own() -> None:
    with pw.LocalCluster(islands=2, devices_per_host=4):
        virtual = pw.make_virtual_device_set()
        slices = [virtual.add_slice(topology=(2,), exclusive=True) for _ in range(4)]
        places = [(one.island, device.coords) for one in slices for device in one.devices]
        assert len(set(places)) == 8
        assert free() == {"island-0": (), "island-1": ()}
        with pytest.raises(pw.InsufficientDevices, match="exclusive slices have device 0 of"):
            virtual.add_slice(devices=1)
        text = str(pw.status())
        assert "free blocks" in text
        assert "1x4" in text
        del slices, virtual
        gc.collect()
        again = pw.make_virtual_device_set().add_slice(topology=(4,), exclusive=True)
        assert free()[again.island] == ()


def test_what_does_not_fit_says_what_is_free(cluster: pw.LocalCluster) -> None:
    virtual = pw.make_virtual_device_set()
    with pytest.raises(
        pw.InsufficientDevices, match="island-0 is a grid of 2x4, which is too small"
    ):
        virtual.add_slice(topology=(3, 4))
    with pytest.raises(ValueError, match=r"topology=\(2, 4\) has 8 devices, and 4 are asked for"):
        virtual.add_slice(4, topology=(2, 4))
    with pytest.raises(TypeError, match=r"add_slice\(topology=\(2, 4\)\)"):
        virtual.add_slice()
    for wrong in ((), (0, 2), "2x4", 3):
        with pytest.raises(ValueError, match="the number of devices along each axis"):
            virtual.add_slice(topology=wrong)  # type: ignore[call-overload]


def test_a_slice_keeps_its_shape_when_a_host_dies() -> None:
    with pw.LocalCluster(
        islands=2, hosts_per_island=2, devices_per_host=2, move_after_s=1.0
    ) as cluster:
        slice_ = pw.make_virtual_device_set().add_slice(topology=(2, 2), exclusive=True)
        mesh = pw.Mesh(slice_, ("x", "y"))
        array = pw.put(np.arange(4.0), sharding=pw.NamedSharding(mesh, pw.PartitionSpec("x")))
        home = slice_.island
        next(host for host in cluster.hosts if host.name.startswith(home)).kill()
        total = pw.jit(lambda x: x.sum(), mesh=mesh)(array)
        assert float(np.asarray(total)) == 6.0
        assert slice_.island != home
        assert sorted(slice_.coords) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_devices_beside_a_script_lie_in_a_row_or_in_a_grid() -> None:
    body = """
virtual = pw.make_virtual_device_set()
print(virtual.add_slice(topology=(4,)).coords)
try:
    print(virtual.add_slice(topology=(2, 4)).coords)
except pw.InsufficientDevices as error:
    print(error)
"""
    row = finish(start_client("", body))
    assert row.startswith("((0, 0), (0, 1), (0, 2), (0, 3))")
    assert "embedded is a grid of 1x8, which is too small for a block of 2x4" in row
    assert row.strip().endswith("with JAX_PLATFORMS=cpu PW_EMBEDDED_TOPOLOGY=2x4")
    grid = finish(start_client("", body, PW_EMBEDDED_TOPOLOGY="2x4"))
    assert grid.strip().splitlines()[1] == str(tuple((a, b) for a in range(2) for b in range(4)))


def test_plain_jax_sees_the_coordinates(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import jax
            print([tuple(device.coords) for device in jax.devices()])
            """
        )
    )
    shape = ["--hosts-per-island", "2", "--devices-per-host", "2"]
    program = Program(
        tmp_path, ["-m", "pw.cli.main", "run", "--jax", *shape, str(tmp_path / "script.py")]
    )
    try:
        assert program.end(90) == 0, program.err
        assert program.out == "[(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]\n"
    finally:
        program.kill()
