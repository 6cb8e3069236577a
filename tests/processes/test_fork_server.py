"""Daemons that are forked from one process, and what their parent sees of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pw.processes.child import Child
from pw.processes.daemons import LocalDaemon, inherited, start_fork_server
from pw.processes.fork_server import ForkServer
from tests.stages.daemons import command_line, until

pytestmark = pytest.mark.processes


@pytest.fixture
def server() -> Iterator[ForkServer]:
    started = ForkServer.interpreter([], inherited())
    yield started
    started.close()


def _daemon(server: ForkServer, module: str, *arguments: str, **variables: str) -> Child[None]:
    return Child(server.fork(module, arguments, {**inherited(), **variables}))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that a fork imports: it does what its arguments say."""
    path = tmp_path / "told.py"
    path.write_text(
        "import os, signal, sys\n"
        "def main():\n"
        "    what, *rest = sys.argv[1:]\n"
        "    if what == 'exit': sys.exit(int(rest[0]))\n"
        "    if what == 'raise': raise ValueError('told to')\n"
        "    if what == 'write':\n"
        "        open(rest[0], 'w').write(os.getcwd() + ' ' + os.environ['TOLD'])\n"
        "    if what == 'descriptors':\n"
        "        open(rest[0], 'w').write(' '.join(sorted(os.listdir('/proc/self/fd'), key=int)))\n"
        "    if what == 'wait': signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize(
    ("arguments", "code"), [(("exit", "0"), 0), (("exit", "7"), 7), (("raise",), 1)]
)
def test_exit_codes_are_those_of_an_interpreter(
    module: Path, server: ForkServer, arguments: tuple[str, ...], code: int
) -> None:
    daemon = _daemon(server, module.stem, *arguments)
    assert daemon.wait(60) == code == daemon.exit_code()


def test_a_fork_has_the_folder_the_variables_and_no_descriptors_but_its_own(
    module: Path, server: ForkServer
) -> None:
    wrote, has = module.parent / "wrote", module.parent / "has"
    assert _daemon(server, module.stem, "write", str(wrote), TOLD="told").wait(60) == 0
    assert wrote.read_text() == f"{module.parent} told"
    other = _daemon(server, module.stem, "wait")  # the next fork has nothing of this one
    assert _daemon(server, module.stem, "descriptors", str(has)).wait(60) == 0
    numbers = set(map(int, has.read_text().split()))
    assert {0, 1, 2} <= numbers
    assert len(numbers) == 6  # and its end of the channel, the file, and the folder that it lists
    other.kill()
    assert other.wait(60) == -signal.SIGKILL


def test_daemons_outlive_a_killed_server_and_the_next_ones_are_interpreters(module: Path) -> None:
    server = ForkServer.interpreter([], inherited())
    daemon = _daemon(server, module.stem, "wait")
    os.kill(server.child.pid, signal.SIGKILL)
    until(lambda: not server.can_start(inherited()), "the end of the server")
    server.close()
    assert daemon.exit_code() is None
    daemon.kill()
    assert daemon.wait(60) == -signal.SIGKILL


def _controller(**variables: str) -> LocalDaemon:
    arguments = ["--bind", "tcp://127.0.0.1:0", "--insecure"]
    daemon = LocalDaemon("pw.cli.controller", arguments, variables)
    assert daemon.address(60).startswith("tcp://")
    return daemon


def test_what_libraries_read_at_import_makes_a_new_interpreter() -> None:
    start_fork_server()
    fork, interpreter = _controller(), _controller(XLA_FLAGS="--xla_dump_max_hlo_modules=1")
    try:
        assert "pw.processes.serving" in command_line(fork.pid)
        assert "pw.cli.controller" in command_line(interpreter.pid)
    finally:
        fork.stop(), interpreter.stop()
    assert fork.exit_code() == 0
    assert interpreter.exit_code() in (0, -signal.SIGTERM), "the signal may come while it imports"


def test_a_forked_copy_of_this_process_has_no_server(server: ForkServer) -> None:
    process = os.fork()
    if process == 0:
        os._exit(int(server.can_start(inherited())))
    assert os.waitpid(process, 0)[1] == 0
    assert server.can_start(inherited())
