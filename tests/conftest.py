"""What every test runs under: eight CPU devices, reproducible examples, and no process left behind.

`tests.stages.inherited` sets what this process and its children inherit, before anything imports jax, which
reads its variables once. A test that starts a worker says how many devices it has.

A runtime made of processes is tested by killing them, so the last check of a run is that none has
survived it. The test process adopts the orphans of its descendants, so that a worker whose parent
was killed is found as well; multiprocessing's resource tracker lives as long as the interpreter
by design and is not counted.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.stages import inherited

inherited.settle()

from jax._src.interpreters import mlir  # noqa: E402 - after the environment is set
from jax._src.lib.mlir import ir  # noqa: E402

from pw.processes.daemons import start_fork_server, stop_fork_server  # noqa: E402
from tests.stages import programs  # noqa: E402
from tests.stages.descendants import descendants  # noqa: E402
from tests.stages.samples import examples  # noqa: E402

# JAX makes a context of MLIR for each function that it lowers, and `pw` for each module that it reads: with
# what this empties of caches, a third of the time of tests that trace. Processes make theirs as for users.
# A context loads its dialects when they are first met, which two threads must not do at once: each has its own.
_make_context = mlir.make_ir_context
_contexts = threading.local()


def _context_of_thread() -> ir.Context:
    if not hasattr(_contexts, "one"):
        _contexts.one = _make_context()
    return _contexts.one


mlir.make_ir_context = _context_of_thread

hypothesis.settings.register_profile("local", deadline=None, max_examples=examples(100))
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=examples(100), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

EXIT_GRACE_S = 5.0
GC_ALLOCATIONS = 100_000
PR_SET_CHILD_SUBREAPER = 36


LONG = {
    *("test_bulk.py", "test_gradients.py", "test_jax_backend.py", "test_links.py"),
    *("test_methods.py", "test_moe.py", "test_pipelines.py", "test_ragged.py", "test_sim.py"),
    *("test_tracing.py", "test_transforms.py", "test_transport.py", "test_while_loop.py"),
    *("test_cli.py", "test_exits.py", "test_gateway.py", "test_gateway_scripts.py", "test_live.py"),
    *(
        "test_embedded.py",
        "test_examples.py",
        "test_islands.py",
        "test_local_cluster.py",
        "test_moe_pipelines.py",
        "test_packaging.py",
        "test_pages.py",
        "test_pipeline_choosing.py",
        "test_secure_cluster.py",
        "test_survival.py",
    ),
}
"""The longest files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that workers end together.

    Files with processes, which wait, alternate with others, which do not: then there is always work.
    """
    processes = {item.path for item in items if item.get_closest_marker("processes")}
    files = sorted({item.path: None for item in items}, key=lambda path: path.name not in LONG)
    waiting = [path for path in files if path in processes]
    working = [path for path in files if path not in processes]
    places = {path: at / len(some) for some in (waiting, working) for at, path in enumerate(some)}
    items.sort(key=lambda item: (places[item.path], item.path not in processes, item.path))


def pytest_collection_finish() -> None:
    """Have the garbage collector begin seldom: it would spend a tenth of the time of tests."""
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_spared() -> None:
    """Spare the garbage collector what exists before a module: JAX, its caches, all tests and their tables."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def fork_server(no_process_left_behind: None) -> Iterator[None]:
    """Fork the daemons and the programs of all tests from processes that have imported JAX."""
    start_fork_server()
    programs.start_server()
    yield
    programs.stop_server()
    stop_fork_server()


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail the run if a process that the tests started still runs at its end, and kill it."""
    if not sys.platform.startswith("linux"):
        yield
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    already_there = set(_descendants())
    yield
    survivors = _outliving(set(_descendants()) - already_there, EXIT_GRACE_S)
    if survivors:
        lines = [f"  {pid}: {_command_line(pid)}" for pid in sorted(survivors)]
        for pid in survivors:
            _kill(pid)
        pytest.fail(
            "processes outlived the tests (now killed):\n" + "\n".join(lines), pytrace=False
        )


def _descendants() -> list[int]:
    """Return the descendants of this process that a test has started."""
    tracker = "multiprocessing.resource_tracker"
    return [pid for pid in descendants(os.getpid()) if tracker not in _command_line(pid)]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


def _outliving(pids: set[int], grace_s: float) -> set[int]:
    """Those of the processes that have not exited within the grace."""
    deadline = time.monotonic() + grace_s
    survivors = set()
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                survivors.add(pid)
        finally:
            os.close(handle)
    return survivors


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself meanwhile
