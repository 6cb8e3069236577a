"""A program that is a fork looks, from inside and from outside, as if an interpreter had been started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.stages.daemons import Program
from tests.stages.programs import run_python

pytestmark = pytest.mark.processes

SHOW = """
import os, sys
print(sys.argv, sys.path[0], __name__, os.environ.get("SAID"), "jax" in sys.modules)
print([one.id for one in __import__("jax").devices()])
"""
BEHIND = """
import atexit, threading
atexit.register(print, "exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
print("main")
"""
RAISES = "def f():\n    1 / 0\nf()\n"


def test_names_paths_variables_and_devices_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHOW)
    variables = os.environ | {"SAID": "yes", "JAX_NUM_CPU_DEVICES": "2"}
    for arguments, name, folder in (
        (["-c", SHOW], "-c", ""),
        ([str(script)], str(script), str(tmp_path)),
    ):
        done = run_python([*arguments, "more"], environment=variables)
        assert done.stderr == ""
        expected = f"{[name, 'more']} {folder} __main__ yes True\n[0, 1]\n"
        assert done.stdout == expected


def test_what_is_read_at_the_start_makes_a_new_interpreter() -> None:
    done = run_python(["-c", SHOW], environment=os.environ | {"PYTHONHASHSEED": "7"})
    assert " False\n" in done.stdout


def test_it_ends_as_an_interpreter_does() -> None:
    assert run_python(["-c", BEHIND]).stdout == "main\nthread\nexit\n"
    for code, status, words in (
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ):
        done = run_python(["-c", code])
        assert done.returncode == status
        assert done.stderr.endswith(words)
    plain, fork = (
        run_python(["-c", RAISES], environment=os.environ | variables)
        for variables in ({"PYTHONHASHSEED": "7"}, {})
    )
    assert (fork.returncode, fork.stderr) == (plain.returncode, plain.stderr)


def test_its_marker_is_found_from_outside(tmp_path: Path) -> None:
    program = Program(tmp_path, ["-c", "import signal; print('up', flush=True); signal.pause()"])
    try:
        program.until_says("up")
        assert program.process.pid in program.family()
    finally:
        program.kill()
    assert not program.family()
