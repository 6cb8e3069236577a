"""Tests and their programs inherit the same on every machine; `tests.rough` runs this where much differs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.stages.programs import ROOT, run_python

pytestmark = pytest.mark.processes

SHOW = """
import locale, os, resource, signal, sys, time
python_ignores = {signal.SIGPIPE, signal.SIGXFSZ}
of_c = {signal.SIGKILL, signal.SIGSTOP}
handled = {n for n in signal.valid_signals() - of_c if signal.getsignal(n) == signal.SIG_IGN}
mask = os.umask(0)
os.umask(mask)
print(sorted(handled - python_ignores), signal.getsignal(signal.SIGINT) == signal.default_int_handler)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), oct(mask), time.tzname[0])
print(locale.getencoding(), sys.flags.utf8_mode, sys.flags.optimize, sys.flags.dont_write_bytecode)
print([resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)])
print(os.path.isdir(os.environ["HOME"]), os.access(os.environ["HOME"], os.W_OK))
ours, settings = ("PW_", "JAX_", "XLA_", "http", "GIT_"), sorted(os.environ)
print([name for name in settings if name.startswith(ours) and not name.startswith("PW_TEST_")])
print([os.path.exists(f"/proc/self/fd/{number}") for number in range(3)])
"""
EXPECTED = """\
[] True
set() 0o22 UTC
UTF-8 0 0 0
[1024, 0]
True True
['JAX_NUM_CPU_DEVICES', 'JAX_PLATFORMS', 'PW_ADVICE', 'XLA_FLAGS']
[True, True, True]
"""


def test_a_program_inherits_the_same_everywhere() -> None:
    assert run_python(["-c", SHOW]).stdout == EXPECTED


def test_an_interpreter_of_a_test_inherits_the_same_everywhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == EXPECTED


def test_the_process_of_a_test_inherits_the_same_everywhere(
    capfd: pytest.CaptureFixture[str],
) -> None:
    exec(SHOW, {})
    assert capfd.readouterr().out.startswith("[] True\nset() 0o22 UTC\nUTF-8")
