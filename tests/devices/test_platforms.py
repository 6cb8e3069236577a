"""Platforms of other packages: the example of docs/internals/how-to-add.md, installed in a folder."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from pw.core.platforms import PLATFORMS
from tests.project.blocks import files
from tests.stages.daemons import Program
from tests.stages.programs import ROOT

pytestmark = pytest.mark.processes

EXAMPLE = files(ROOT / "docs/internals/how-to-add.md")

COMPUTES = """
import numpy as np, pw

with pw.LocalCluster(platform="abacus", devices_per_host=2) as cluster:
    devices = pw.make_virtual_device_set().add_slice(devices=2)
    double = pw.jit(lambda x: x * 2, mesh=pw.Mesh(devices.devices, ("x",)))
    print(double(np.arange(3)), devices.platform, pw.status().islands[0].platform)
"""


def install(folder: Path, modules: Mapping[str, str]) -> str:
    """Install a package with the metadata of the example; return the PYTHONPATH that finds it."""
    project = tomllib.loads(EXAMPLE["pyproject.toml"])["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["entry-points"]
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in groups[g].items()) for g in groups]
    (info / "entry_points.txt").write_text("".join(lines))
    for module, text in modules.items():
        (folder / module).write_text(text)
    return os.pathsep.join([str(folder), str(ROOT)])


def run(folder: Path, arguments: list[str], path: str = "", **variables: str) -> Program:
    """Run an interpreter; without `path`, a fork, which imports only what its arguments say."""
    if path:
        variables["PYTHONPATH"] = path
    program = Program(folder, arguments, new_interpreter=bool(path), **variables)
    try:
        program.end()
        program.until_alone()
    finally:
        program.kill()
    return program


def test_a_cluster_has_the_platform_of_another_package(tmp_path: Path) -> None:
    path = install(tmp_path, {"pw_abacus.py": EXAMPLE["pw_abacus.py"]})
    program = run(tmp_path, ["-c", COMPUTES], path)
    assert program.out == "[0 2 4] abacus abacus\n", program.err


def test_pw_run_starts_a_cluster_of_a_platform(tmp_path: Path) -> None:
    path = install(tmp_path, {"pw_abacus.py": EXAMPLE["pw_abacus.py"]})
    script = tmp_path / "script.py"
    script.write_text("import pw\nprint(pw.status().islands[0].platform, pw.status().devices)\n")
    program = run(tmp_path, ["-m", "pw.cli.main", "run", "--platform", "abacus", str(script)], path)
    assert program.out == "abacus 1\n", program.err


WORKER = """
import sys
sys.path[:0] = sys.argv.pop(1).split(":")
sys.argv += ["--controller", "tcp://127.0.0.1:1", "--island", "east"]
from pw.cli.worker import main
main()
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("ABACUS = 3", "the platform 'abacus' (pw_abacus:ABACUS) of the package pw-abacus is no "),
        ("import no_such_module", 'cannot be loaded: ModuleNotFoundError("No module named'),
    ],
)
def test_a_platform_that_cannot_be_used_is_named_with_its_package(
    module: str, words: str, tmp_path: Path
) -> None:
    path = install(tmp_path, {"pw_abacus.py": module})
    program = run(tmp_path, ["-c", WORKER, path, "--platform", "abacus"])
    assert program.process.returncode == 1
    assert program.err.startswith("pw-worker: error: the platform 'abacus'")
    assert words in program.err


def test_a_name_that_no_package_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    path = install(tmp_path, {"pw_abacus.py": EXAMPLE["pw_abacus.py"]})
    program = run(tmp_path, ["-c", WORKER, path, "--platform", "gpu"])
    assert program.process.returncode == 1
    assert f"no platform 'gpu'; there are {', '.join([*PLATFORMS, 'abacus'])}" in program.err
