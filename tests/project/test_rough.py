"""`python -m tests.rough`: what differs in a run under each condition, seen by a tiny test file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rough.__main__ import main
from tests.rough.conditions import conditions
from tests.stages.programs import run_python

pytestmark = pytest.mark.processes

PRELUDE = """
import os, signal, subprocess, sys, time

from tests.stages.daemons import command_line, until
from tests.stages.descendants import descendants, state
from tests.stages.inherited import python_path
"""
SEEN = {
    "background": """
        mask = os.umask(0)
        assert (mask, "HOME" in os.environ, os.environ["PW_DEVICES"]) == (0o077, False, "3")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    """,
    "terminal": """
        os.close(os.open("/dev/tty", os.O_RDWR))
        mask = os.umask(0)
        assert (mask, os.environ["PW_DEVICES"]) == (0, "3")
    """,
    "busy": """
        beside = [command_line(pid) for pid in descendants(os.getppid())]
        assert sum("parent = os.getppid()" in words for words in beside) == 4
    """,
    "single": """
        assert len(os.sched_getaffinity(0)) == 1
    """,
    "slowed": """
        child = subprocess.Popen(["sleep", "1000"])
        try:
            until(lambda: state(child.pid) == "T", "it is stopped", 60.0)
            until(lambda: state(child.pid) == "S", "it goes on", 60.0)
        finally:
            child.kill()
            child.wait()
    """,
    "clock": """
        words = (
            "import time\\nfirst = time.time()\\nbegun = time.monotonic()\\n"
            "while abs(time.time() - first) < 100: assert time.monotonic() < begun + 60"
        )
        variables = os.environ | {"PYTHONPATH": python_path()}
        subprocess.run([sys.executable, "-c", words], env=variables, check=True)
    """,
}


def test_each_condition_has_a_test() -> None:
    assert conditions(0).keys() == SEEN.keys()


@pytest.mark.parametrize("name", SEEN)
def test_a_condition_is_what_it_says(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_tiny.py"
    file.write_text(f"{PRELUDE}\ndef test_tiny():{SEEN[name]}")
    code = main(["--only", name, "--seed", "3", "--workers", "0", str(file)])
    printed = capfd.readouterr().out
    assert code == 0, printed
    last = printed.splitlines()[-1]
    assert last.startswith(f"rough: {name}: passed (")


def test_a_failure_says_how_to_repeat_it(tmp_path: Path) -> None:
    file = tmp_path / "test_tiny.py"
    file.write_text("def test_tiny():\n    raise ValueError\n")
    arguments = [
        "-m",
        "tests.rough",
        "--only",
        "single",
        "--seed",
        "3",
        "--workers",
        "0",
        str(file),
    ]
    done = run_python(arguments)
    assert done.returncode == 1, done.stderr
    again = " ".join(["python", *arguments])
    assert f"rough: single: failed; again: {again} (" in done.stdout.splitlines()[-1]
