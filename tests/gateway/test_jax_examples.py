"""The plain JAX programs of `examples/jax` give plain JAX's values on two islands of two hosts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.stages.programs import ROOT, run_python

EXAMPLES = ROOT / "examples" / "jax"
TRAINING = (
    ("mnist.py", "--two-islands"),
    ("equinox_train.py", "--two-islands"),
    ("equinox_train.py",),  # over the devices of both islands
    ("fsdp.py",),
)
TOLERANCE = 1e-6
"""Sums over the devices of two hosts are added in another order than those of one process. JAX over two
processes of its own (`jax.distributed`) differs from plain JAX by the same bits."""

ONE_BY_ONE = f"""
import json, subprocess, sys
for name, *flags in json.loads(sys.argv[1]):
    command = [sys.executable, "{EXAMPLES}/" + name, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    print(json.dumps([name, done.returncode, done.stdout, done.stderr]))
"""
"""Runs examples one after the other, with the environment that it gets itself."""

ISLANDS = ["--islands", "2", "--hosts-per-island", "2", "--devices-per-host", "2"]


def on_a_cluster(folder: Path, *commands: Sequence[str]) -> dict[str, str]:
    """Run examples on one cluster; returns the output of each by its name."""
    script = folder / "one_by_one.py"
    script.write_text(ONE_BY_ONE)
    command = ["-m", "pw.cli.main", "run", "--jax", *ISLANDS, str(script), json.dumps(commands)]
    done = run_python(command, timeout_s=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name, code, output, errors in map(json.loads, done.stdout.splitlines()):
        assert (code, errors) == (0, ""), f"{name}: exit code {code}\n{output}\n{errors}"
        found[name] = output
    return found


def plainly(name: str, *flags: str) -> str:
    """The output of an example in plain JAX on as many CPU devices."""
    cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = run_python([str(EXAMPLES / name), *flags], environment=os.environ | cpus)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.long
@pytest.mark.processes
def test_the_paper_s_program_prints_the_paper_s_values(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^# (\(Array.*)$", (EXAMPLES / "paper.py").read_text(), re.M)
    assert on_a_cluster(tmp_path, ["paper.py"])["paper.py"] == shown + "\n"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("command", TRAINING, ids=" ".join)
def test_losses_are_those_of_plain_jax(tmp_path: Path, command: Sequence[str]) -> None:
    ours = on_a_cluster(tmp_path, command)[command[0]]
    theirs = plainly(*command)
    assert len(theirs.splitlines()) == 3
    losses = numbers(theirs)
    assert numbers(ours) == pytest.approx(losses, rel=TOLERANCE)
    assert re.sub(r"[\d.]+", "", ours) == re.sub(r"[\d.]+", "", theirs)
    assert losses[-2] < losses[1], "it learns nothing"


def test_no_example_knows_pw() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 4
    assert not [path for path in files if re.search(r"^(import|from) pw\b", path.read_text(), re.M)]
