"""Each module imports what it uses, also what other modules load in the processes of most tests.

Programs of other tests are forks of a process that has imported all of `pw` (`tests.stages.programs`). Those
here are forks of one that has imported nothing of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pw
from tests.project.lost_imports import lost
from tests.stages.programs import ROOT

BEGIN = "import jax\nimport numpy as np\nimport pw\n\nones = np.ones(2, np.float32)\n"
FIRST = {
    "put": "x = pw.put(ones)\nassert (float(x[1]), np.asarray(x + 1).tolist()) == (1, [2, 2])",
    "restore": "assert np.asarray(pw.restore({saved!r})['x'] * 2).tolist() == [2, 2]",
    "stream": (
        "for x in pw.stream(lambda: iter([ones]), jax.ShapeDtypeStruct((2,), np.float32)):\n"
        "    assert np.asarray(x + 1).tolist() == [2, 2]"
    ),
    "host_function": (
        "f = pw.host_function(lambda x: x + 1, jax.ShapeDtypeStruct((2,), np.float32))\n"
        "assert np.asarray(f(ones) * 2).tolist() == [4, 4]"
    ),
    "from_jax": (
        "import pw.jax\n"
        "pw.jax.connect()\n"
        "x = pw.jax.from_jax(jax.numpy.asarray(ones) * 1)\n"
        "assert np.asarray(x + 1).tolist() == [2, 2]"
    ),
}
"""Scripts by what of `pw` they use first. Arrays have their operators, whatever gave them."""
EXAMPLE = "import runpy\n\nrunpy.run_module('examples.{}', run_name='__main__')"
EXAMPLES = ("quickstart",)


def test_modules_import_the_modules_that_they_use() -> None:
    assert not [str(use) for use in lost(ROOT.glob("pw/**/*.py"))]


def test_a_module_that_only_another_one_imports_is_found(tmp_path: Path) -> None:
    file = tmp_path / "lost.py"
    file.write_text("import json\nimport xml\n\nx = json.decoder.JSONDecoder, xml.dom.Node\n")
    assert [use.module for use in lost([file])] == ["xml.dom"]


@pytest.mark.processes
def test_what_is_used_first_imports_all_that_it_needs(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    with pw.LocalCluster(islands=2, devices_per_host=2, allow_python=True) as cluster:
        pw.checkpoint({"x": pw.put(np.ones(2, np.float32))}, path=saved).result()
        programs = [BEGIN + first.format(saved=saved) for first in FIRST.values()]
        programs += [EXAMPLE.format(name) for name in EXAMPLES]
        done = subprocess.run(
            [sys.executable, "-m", "tests.stages.first_import", *programs],
            cwd=ROOT,
            env=os.environ | {"PW_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stderr
