"""A local cluster leaves nothing behind, however its script ends."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages.daemons import Program, left_in_shared_memory

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

PRELUDE = """
import os, signal, sys, threading, time
from pw.client.connection import current
from pw.operating.deploy.local_cluster import LocalCluster
from pw.client.connection.runtime import Runtime
from pw.core.errors import Disconnected, Error
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for script in started:
        script.kill()


def start(scripts: list[Program], folder: Path, body: str, **variables: str) -> Program:
    script = Program(folder, ["-c", PRELUDE + textwrap.dedent(body)], **variables)
    scripts.append(script)
    return script


def sockets(script: Program) -> list[str]:
    """Unix sockets that are listened on in the script's private directories."""
    names = re.findall(r"\S+$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return [name for name in names if name.startswith(str(script.temporary))]


WAITING = """
    with LocalCluster():
        print("up", flush=True)
        while True:
            signal.pause()
"""

ENDS = {
    "leaves the block": ("with LocalCluster(log_level='info'): print('up', flush=True)", None, 0),
    "raises": ("with LocalCluster(): print('up', flush=True); raise KeyError('mine')", None, 1),
    "never closes": (
        "import jax; cluster = LocalCluster(hosts_per_island=2); print('up', flush=True)",
        None,
        0,
    ),
    "gets Ctrl-C": (WAITING, signal.SIGINT, -signal.SIGINT),
    "gets SIGTERM": (WAITING, signal.SIGTERM, 128 + signal.SIGTERM),
    "gets SIGKILL": (
        WAITING.replace("()", "(hosts_per_island=2)", 1),
        signal.SIGKILL,
        -signal.SIGKILL,
    ),
}


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    """All scripts of the table, at the same time: most of their time they wait."""
    scripts: list[Program] = []
    folder = tmp_path_factory.mktemp("ending")
    yield {how: start(scripts, folder, body) for how, (body, _, _) in ENDS.items()}
    for script in scripts:
        script.kill()


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_of_a_cluster_whose_script(how: str, ending: dict[str, Program]) -> None:
    _, number, code = ENDS[how]
    script = ending[how]
    script.until_says("up")
    pids = script.family()
    if number is not None:
        assert len(pids) >= 4  # script, controller, a supervisor and its runtime, at least
        assert sockets(script)
        os.killpg(script.process.pid, number)
    assert script.end() == code, script.err
    script.until_alone()
    assert sockets(script) == []
    assert left_in_shared_memory() == []
    assert script.err == "" or how != "never closes", "libraries of the daemons write to their logs"
    assert ("Traceback" in script.err) == (how in ("raises", "gets Ctrl-C")), script.err


def test_logs_are_lines_of_time_level_event_and_pairs(ending: dict[str, Program]) -> None:
    script = ending["leaves the block"]
    script.end()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    line = when + r" (INFO|WARNING) pw(\.audit)?: [\w ]+( \w+=('.*?'|\".*?\"|\S+))+"
    lines = script.err.splitlines()
    assert [text for text in lines if not re.fullmatch(line, text)] == []
    for event in ("listening node=controller", "host registered node=controller actor=resources"):
        assert any(event in text for text in lines)


def test_a_cluster_ends_with_its_script_and_not_with_what_that_forked(
    scripts: list[Program], tmp_path: Path
) -> None:
    script = start(
        scripts,
        tmp_path,
        """
        cluster = LocalCluster()
        forked = os.fork()
        if not forked:
            while True:
                signal.pause()
        print(f"forked {forked}.", flush=True)
        signal.pause()
        """,
    )
    script.until_says(".")
    forked = int(script.out.removeprefix("forked ").strip(" .\n"))
    script.process.kill()
    script.end()
    script.until_alone(forked)
    assert forked in script.family()


def test_a_forked_child_has_no_session_and_does_not_disturb_the_one_of_its_parent(
    scripts: list[Program], tmp_path: Path
) -> None:
    """The child leaves through the with block and atexit, as forked children do."""
    script = start(
        scripts,
        tmp_path,
        """
        with LocalCluster(log_level="info") as cluster:
            session = current.runtime()

            locked, forking = threading.Event(), threading.Event()
            os.register_at_fork(before=forking.set)

            def lock():  # as the thread of the session does now and then; the child does not have that thread
                with session.lock:
                    locked.set()
                    forking.wait()

            for anew in (False, True):
                locked.clear(), forking.clear()
                threading.Thread(target=lock).start()
                locked.wait()
                forked = os.fork()
                if not forked:
                    for use in (current.runtime, session.ask.status, lambda: session.allocate_slice(1)):
                        try:
                            use()
                        except Disconnected as error:
                            assert "fork" in str(error)
                        else:
                            os._exit(9)
                    if anew:
                        assert len(current.connect(cluster.address).allocate_slice(1).devices) == 1
                        assert len(current.runtime().ask.status().clients) == 2
                    sys.exit(5)
                assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 5
                assert len(session.allocate_slice(1).devices) == 1
        print("ok")
        """,
    )
    assert script.end() == 0, script.err
    assert script.out == "ok\n"
    script.until_alone()


def test_threads_hear_that_the_session_is_over(scripts: list[Program], tmp_path: Path) -> None:
    """The interpreter waits for them, so they must not wait for an answer that never comes."""
    script = start(
        scripts,
        tmp_path,
        """
        def ask(session):
            try:
                while True:
                    session.ask.status()
                    asked.set()
            except Disconnected as error:
                os.write(1, b"told\\n")

        asked = threading.Event()
        with LocalCluster():
            for _ in range(4):
                threading.Thread(target=ask, args=(current.runtime(),)).start()
            asked.wait()
            os.write(1, b"asked\\n")
            sys.exit(4)
        """,
    )
    script.until_says("asked")
    assert script.end() == 4, script.err
    assert script.out == "asked\n" + "told\n" * 4
    script.until_alone()


def test_clusters_may_be_nested_and_started_from_threads(
    scripts: list[Program], tmp_path: Path
) -> None:
    script = start(
        scripts,
        tmp_path,
        """
        def in_thread():
            with LocalCluster(connect=False) as other:
                session = Runtime(runtime_threads.remote(other.address), 1.0, 0)
                assert len(session.ask.status().clients) == 1
                session.close()

        from pw.client.connection import threads as runtime_threads
        with LocalCluster() as outer:
            thread = threading.Thread(target=in_thread)
            thread.start()
            thread.join()
            assert current.runtime().address == outer.address
            assert current.runtime().allocate_slice(1).island == "island-0"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        print("ok")
        """,
    )
    assert script.end() == 0, script.err
    assert script.out == "ok\n"
    script.until_alone()


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(
    scripts: list[Program], tmp_path: Path
) -> None:
    script = start(scripts, tmp_path, "LocalCluster(platform='abacus')")
    assert script.end() == 1
    assert "pw-worker: error: " in script.err
    assert "no platform 'abacus'" in script.err
    assert "ConnectionFailed" in script.err
    script.until_alone()


def test_the_processes_of_hosts_can_be_found_and_ended(
    scripts: list[Program], tmp_path: Path
) -> None:
    """A spare host takes the place of one that is lost for good; runtimes are started again."""
    script = start(
        scripts,
        tmp_path,
        """
        from tests.stages.daemons import until

        def ready():
            (island,) = current.runtime().ask.status().islands
            return [(host.name, host.pid) for host in island.hosts if island.state == "ready"]

        with LocalCluster(spare_hosts=1) as cluster:
            host, spare = cluster.hosts
            assert (host.name, spare.name) == ("island-0-host-0", "spare-0")
            assert cluster.pids[1:] == [host.pid, spare.pid]
            first = host.runtime_pid()
            assert ready() == [(host.name, first)]
            host.kill()
            assert host.runtime_pid() is None
            until(lambda: ready() == [(spare.name, spare.runtime_pid())], "the spare host")
            second = spare.runtime_pid()
            os.kill(second, signal.SIGKILL)
            until(lambda: spare.runtime_pid() not in (second, None), "its other runtime")
            until(lambda: ready() == [(spare.name, spare.runtime_pid())], "the spare host")
        print("ok")
        """,
    )
    assert script.end(60) == 0, script.err
    assert script.out == "ok\n"
    script.until_alone()


def test_a_slice_knows_its_island_after_a_drain(scripts: list[Program], tmp_path: Path) -> None:
    body = """
        import numpy as np
        import pw

        with LocalCluster(islands=2):
            part = pw.make_virtual_device_set().add_slice(devices=1)
            mesh = pw.Mesh(part.devices, ("x",))
            double = pw.jit(lambda x: 2 * x, mesh=mesh)
            y = double(np.float32(3))
            step = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
            state = step(np.float32(0))
            for _ in range(20):
                state = step(state)
            state.block_until_ready()
            before = part.island
            pw.drain(before + "-host-0", timeout_s=60)
            assert float(double(y)) == 12
            assert float(state) == 21
            assert not pw.stats()["controller"].get("runs_repeated"), "it was copied"
            assert {before, part.island} == {"island-0", "island-1"}
            assert part.devices[0].island == part.island
            assert f"island={part.island!r}" in repr(part)
            assert "x" in repr(mesh)
    """
    script = start(scripts, tmp_path, body)
    assert script.end() == 0, script.err
