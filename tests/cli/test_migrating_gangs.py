"""A gang on several hosts moves to another island, whose hosts have compiled its programs before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pw
from tests.stages.daemons import until

P = pw.PartitionSpec


def count(name: str) -> dict[str, int]:
    """A counter of each host."""
    return {node: of[name] for node, of in pw.stats().items() if name in of}


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_gang_moves_without_compiling_in_its_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def forget_executables() -> None:
        for file in tmp_path.rglob("executables/*"):
            file.unlink()

    with pw.LocalCluster(2, 2, devices_per_host=1):
        slice_ = pw.make_virtual_device_set().add_slice(devices=2, island="island-0")
        mesh = pw.Mesh(slice_.devices, ("x",))
        rows = pw.NamedSharding(mesh, P("x"))
        step = pw.jit(lambda x: x * 1.5 + x.sum(), mesh=mesh, out_shardings=rows)
        program = pw.program(lambda x: step(step(x)))
        value = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
        x = pw.block_until_ready(pw.put(value, rows))
        alone = pw.get([step(x), program(x)])
        forget_executables()
        pw.migrate(slice_, island="island-1")
        compiled = count("compilations")
        assert sum(count("compiled_ahead").values()) >= 2
        assert all(compiled[f"island-1-host-{at}"] for at in range(2)), compiled
        forget_executables()
        for there, wanted in zip(pw.get([step(x), program(x)]), alone, strict=True):
            np.testing.assert_array_equal(there, wanted)
        assert slice_.island == "island-1"
        assert count("compilations") == compiled
        until(lambda: not sum(count("replica_bytes").values()), "copies are dropped")
