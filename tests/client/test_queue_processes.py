"""`pw.queue()` on the processes of a local cluster, and of a script without an address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import pw
from pw.cli.main import app
from tests.stages.daemons import Program, until

BEHIND = """
import sys, jax, numpy as np, pw
pw.connect(sys.argv[1])
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
double = pw.host_function(lambda x: 2 * x, jax.ShapeDtypeStruct((3,), np.float32), mesh=mesh)
print("calls", flush=True)
print(np.asarray(double(np.ones(3, np.float32))), flush=True)
"""

ALONE = """
import jax, numpy as np, pw
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
f = pw.jit(lambda x: jax.lax.fori_loop(0, 100_000_000, lambda i, x: 0.5 * x + 1.0, x), mesh=mesh)
results = [f(np.ones(3, np.float32)) for _ in range(3)]
while not (waits := [one for one in pw.queue().waits if one.in_front]):
    pass
print(waits[0].kind, waits[0].in_front[0].client == waits[0].client, flush=True)
for one in results:
    pw.cancel(one)
"""


@pytest.mark.processes
def test_a_script_sees_which_other_waits_for_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def wait(x: np.ndarray, path: str = str(gate)) -> np.ndarray:
        import os
        import time

        while not os.path.exists(path):
            time.sleep(0.01)
        return x

    with pw.LocalCluster(allow_python=True) as cluster:
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
        kept = pw.host_function(wait, jax.ShapeDtypeStruct((3,), np.float32), mesh=mesh)
        assert not pw.queue().waits
        results = [kept(np.ones(3, np.float32)) for _ in range(2)]
        script = Program(tmp_path, ["-c", BEHIND, cluster.address], JAX_PLATFORMS="cpu")
        try:
            script.until_says("calls")
            kinds = ["launch", "launch"]  # before that, the script waits for a compiler
            seen: list[Any] = []
            until(lambda: [one.kind for one in _asked(seen)] == kinds, "two that wait")
            own, other = seen[-1].waits
            assert str(os.getpid()) in own.name
            assert [one.client for one in own.in_front] == [own.client]
            assert str(script.process.pid) in other.name
            assert (other.in_front[0].client, other.in_front[0].amount) == (own.client, 2)
            assert other.waited_s is not None
            assert other.left_s is None, "the function has never ended"
            command = ["why", "--queue", "--address", cluster.address, "--timeout", "60"]
            shown = CliRunner().invoke(app, command)
            assert shown.exit_code == 0, shown.output
            assert "policy fifo" in shown.stdout
            assert "its own 1 launch" in shown.stdout.replace("\n", " ")
            gate.touch()
            assert script.end() == 0, script.err
            assert "[2. 2. 2.]" in script.out
            pw.block_until_ready(results)
            assert not pw.queue().waits
        finally:
            gate.touch()
            script.kill()


def _asked(seen: list[Any]) -> Any:
    """Ask once more who waits, and keep the answer: a moment later it may be another."""
    seen.append(pw.queue())
    return seen[-1].waits


@pytest.mark.processes
def test_a_script_without_an_address_sees_its_own_calls(tmp_path: Path) -> None:
    script = Program(tmp_path, ["-c", ALONE], JAX_PLATFORMS="cpu")
    try:
        assert script.end() == 0, script.err
        assert "launch True" in script.out
    finally:
        script.kill()
