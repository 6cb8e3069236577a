"""Plain JAX scripts under JAX_PLATFORMS=pw: what they print, and what is left when they end."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stages.daemons import Program
from tests.stages.samples import long

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

PAPER = """
import jax, numpy, pw

def get_devices(n):
    return jax.devices()[:n]

a = jax.pmap(lambda x: x * 2., devices=get_devices(2))
b = jax.pmap(lambda x: x + 1., devices=get_devices(2))
c = jax.pmap(lambda x: x / 2., devices=get_devices(2))

def f(v):
    x = a(v)
    y = b(x)
    z = a(c(x))
    return (y, z)

print(f(numpy.array([1., 2.])))
assert len(jax.devices()) == 3
"""
PAPERS_VALUES = "(Array([3., 5.], dtype=float32), Array([2., 4.], dtype=float32))\n"

WORKING = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
x = jax.jit(lambda x: x + 1)(np.ones(4, np.float32))
x.block_until_ready()
never_ends = jax.jit(lambda x: jax.lax.while_loop(lambda v: v[0] < 9, jnp.sin, x))
for _ in range(8):
    x = never_ends(x)
print("up", flush=True)
"""

WAITING = """
while True:  # another thread may get the signal, and does not wake this one from a long sleep
    time.sleep(0.1)
"""

ENDS = {
    "gets Ctrl-C": (WORKING + WAITING, signal.SIGINT, -signal.SIGINT),
    "gets SIGKILL": (WORKING + WAITING, signal.SIGKILL, -signal.SIGKILL),
    "is the paper's program": (PAPER + "print('up')", None, 0),
    "ends while work is pending": (WORKING, None, 0),
    "raises": (WORKING + "raise KeyError('mine')", None, 1),
    "leaves by sys.exit": (WORKING + "sys.exit(3)", None, 3),
    "leaves by os._exit": (WORKING + "os._exit(4)", None, 4),
}
LIKE_OTHERS = ("leaves by sys.exit", "leaves by os._exit", "gets SIGKILL", "is the paper's program")
"""Ends like `raises`, and like what other files of tests do."""
OWN_WORDS = {"raises": "KeyError: 'mine'", "gets Ctrl-C": "KeyboardInterrupt"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Start a script of plain JAX on three devices of its own cluster."""
    started: list[Program] = []

    def start(body: str) -> Program:
        variables = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "3"}
        started.append(Program(tmp_path, ["-c", body], **variables))
        return started[-1]

    yield start
    for script in started:
        script.kill()


@pytest.mark.parametrize("how", [long(how) if how in LIKE_OTHERS else how for how in ENDS])
def test_the_end_is_silent_and_leaves_nothing_of_a_script_that(
    how: str, start: Callable[[str], Program]
) -> None:
    body, number, code = ENDS[how]
    script = start(body)
    script.until_says("up")
    if number is not None:
        os.killpg(script.process.pid, number)
    assert script.end() == code, script.err
    script.until_alone()
    lines = script.err.splitlines()
    if how in OWN_WORDS:
        assert lines[0].startswith("Traceback"), script.err
        assert lines[-1] == OWN_WORDS[how], script.err
    else:
        assert lines == []
    if body.startswith(PAPER):
        assert script.out.startswith(PAPERS_VALUES)


def test_pw_run_gives_a_script_a_cluster_of_islands(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import sys
            import jax, jax.numpy as jnp
            print([(device.slice_index, device.island) for device in jax.devices()], sys.argv[1:])
            x = jax.device_put(jnp.arange(3.), jax.devices()[0])
            print(jax.device_put(x, jax.devices()[-1]) * 2)
            sys.exit(5)
            """
        )
    )
    shape = ["--islands", "2", "--devices-per-host", "2"]
    command = ["-m", "pw.cli.main", "run", "--jax", *shape, str(tmp_path / "script.py"), "--flag"]
    program = Program(tmp_path, command)
    try:
        assert program.end(90) == 5, program.err
        assert (
            program.out
            == "[(0, 'island-0'), (0, 'island-0'), (0, 'island-1'), (0, 'island-1')] ['--flag']\n[0. 2. 4.]\n"
        )
        assert program.err == ""
        program.until_alone()
    finally:
        program.kill()


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[Program]:
    """A controller without workers."""
    controller = Program(
        tmp_path, ["-m", "pw.cli.controller", "--bind", f"ipc://{tmp_path / 'controller'}"]
    )
    yield controller
    controller.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_script_that_waits_for_an_island_leaves_nothing(
    number: signal.Signals, lonely: Program, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path / 'controller'}"
    body = "import jax; jax.devices()"
    script = Program(tmp_path, ["-c", body], JAX_PLATFORMS="pw", PW_ADDRESS=address)
    try:
        lonely.until_says("client attached")
        script.process.send_signal(number)
        assert script.end() == -number
        script.until_alone()
    finally:
        script.kill()


REFUSED: dict[str, dict[str, str]] = {
    "PW_DEVICES must be a number of 1 or more, not '0'": {"PW_DEVICES": "0"},
    "5 devices do not divide over 2 islands": {"PW_DEVICES": "5", "PW_ISLANDS": "2"},
    "could not be reached at tcp://127.0.0.1:1": {"PW_ADDRESS": "tcp://127.0.0.1:1"},
}


@pytest.fixture(scope="module", autouse=True)
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    """All scripts of the table, by what they should say; one waits while other tests run."""
    folder = tmp_path_factory.mktemp("refused")
    command = ["-c", "import jax; jax.devices()"]
    scripts = {
        words: Program(folder, command, JAX_PLATFORMS="pw", **variables)
        for words, variables in REFUSED.items()
    }
    yield scripts
    for script in scripts.values():
        script.kill()


@pytest.mark.parametrize("words", REFUSED)
def test_devices_that_there_are_not_are_refused_in_words(
    words: str, refused: dict[str, Program]
) -> None:
    script = refused[words]
    assert script.end() == 1
    assert words in script.err
    script.until_alone()
