"""The output of `examples.first_hour` equals the output in the documents."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.stages.programs import ROOT

SHOWN = re.search(
    r"^\$ \S*python -m examples\.first_hour\n(.*?)^```",
    (ROOT / "docs/examples.md").read_text(),
    re.M | re.S,
)
FIGURE = re.compile(r"\d+\.\d+ s later|calls: \d+ and \d+|1:\d+\.\d+$")
"""The parts that differ from run to run."""


@pytest.mark.long
@pytest.mark.processes
def test_the_script_prints_the_output_in_the_documents() -> None:
    assert SHOWN is not None
    command = [sys.executable, "-W", "error", "-m", "examples.first_hour"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines, shown = done.stdout.splitlines(), SHOWN[1].splitlines()
    assert len(lines) == len(shown), done.stdout
    for line, wanted in zip(lines, shown, strict=True):
        start, dots, _ = FIGURE.sub("…", wanted).partition(", ...")
        printed = FIGURE.sub("…", line)
        assert printed.startswith(start) if dots else printed == start
