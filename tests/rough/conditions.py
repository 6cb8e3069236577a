"""The conditions under which `tests.rough` runs the tests, and what differs in each."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.stages.descendants import descendants, state
from tests.stages.inherited import CLOCK

NOWHERE = "/nonexistent"
NO_SERVER = "127.0.0.1:9"
MISLEADING = {
    "PW_ADDRESS": f"tcp://{NO_SERVER}",
    "PW_ADVICE": "1",
    "PW_CREDENTIALS": NOWHERE,
    "PW_DEVICES": "3",
    "PW_EMBEDDED_DEVICES": "3",
    "PW_INSECURE": "1",
    "PW_ISLANDS": "3",
    "PW_KEEP_BYTES": "1",
    "PW_LOG_FORMAT": "json",
    "PW_OUTPUT_TO_CLIENTS_ONLY": "1",
    "PW_PROGRESS": "1",
    "PW_WORKER_OUTPUT": "0",
    "JAX_PLATFORMS": "tpu",
    "JAX_NUM_CPU_DEVICES": "3",
    "JAX_ENABLE_X64": "1",
    "JAX_DISABLE_JIT": "1",
    "JAX_DEBUG_NANS": "1",
    "JAX_TRACEBACK_FILTERING": "off",
    "JAX_COMPILATION_CACHE_DIR": NOWHERE,
    "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "NPROC": "1",
    "PJRT_NPROC": "1",
    "OMP_NUM_THREADS": "3",
    "OPENBLAS_NUM_THREADS": "3",
    "CUDA_VISIBLE_DEVICES": "5",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "1",
    "PYTHONOPTIMIZE": "1",
    "PYTHONPATH": NOWHERE,
    "PYTHONUNBUFFERED": "1",
    "COLUMNS": "33",
    "LINES": "7",
    "GITHUB_ACTIONS": "true",
    "http_proxy": f"http://{NO_SERVER}",
    "https_proxy": f"http://{NO_SERVER}",
    "all_proxy": f"http://{NO_SERVER}",
    "HTTP_PROXY": f"http://{NO_SERVER}",
    "HTTPS_PROXY": f"http://{NO_SERVER}",
    "no_proxy": "",
    "GIT_DIR": NOWHERE,
    "XDG_CACHE_HOME": NOWHERE,
    "XDG_CONFIG_HOME": NOWHERE,
    "XDG_RUNTIME_DIR": NOWHERE,
    "RAY_ADDRESS": NO_SERVER,
    "MPLBACKEND": "tkagg",
}
"""Variables that mislead a test, a tool or a library that reads them."""
BACKGROUND = {"LC_ALL": "POSIX", "TZ": "Asia/Kathmandu", "NO_COLOR": "1", "TERM": "dumb"}
TERMINAL = {
    "LANG": "xx_XX.ISO-8859-1",
    "LC_NUMERIC": "de_DE",
    "TZ": "America/St_Johns",
    "FORCE_COLOR": "1",
    "TERM": "xterm-256color",
    "HOME": NOWHERE,
}
IGNORED = {
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGCHLD,
    signal.SIGUSR1,
}
BLOCKED = {signal.SIGTERM, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH}
FEW_FILES = 64
BUSY_LOOPS = 4
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"
STOPPED_S = 0.2
BETWEEN_S = 0.1

Beside = Callable[[int, random.Random], AbstractContextManager[object]]
"""What goes on beside a run with this process id."""


def nothing_beside(pid: int, choices: random.Random) -> AbstractContextManager[object]:
    """Do nothing beside a run."""
    return contextlib.nullcontext()


def as_it_is() -> None:
    """Start a run as this process is."""


@dataclass(frozen=True)
class Condition:
    """What differs in a run."""

    variables: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Variables that the run does not inherit."""
    at_start: Callable[[], None] = as_it_is
    """Changes what the process of the run inherits; in that process, before it begins."""
    beside: Beside = nothing_beside
    at_terminal: bool = False
    """Whether its standard streams are a terminal of its own."""


def _in_background() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    os.umask(0o077)
    os.nice(5)
    os.close(0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))


def _at_terminal() -> None:
    os.umask(0)
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))


def _on_one_processor() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@contextlib.contextmanager
def _busy_loops(pid: int, choices: random.Random) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(BUSY_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def _stops(pid: int, choices: random.Random) -> Iterator[None]:
    """Stop one process of the run after the other, except those that a test has stopped."""
    over = threading.Event()

    def stop_some() -> None:
        while not over.wait(BETWEEN_S):
            if running := [each for each in descendants(pid) if state(each) in ("R", "S", "D")]:
                stop_for(choices.choice(running), STOPPED_S, over)

    thread = threading.Thread(target=stop_some)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def stop_for(pid: int, seconds: float, over: threading.Event) -> None:
    """Stop a process for a while, or until it is over."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
            over.wait(seconds)
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        finally:
            os.close(handle)


def conditions(seed: int) -> dict[str, Condition]:
    """Return all conditions by name."""
    return {
        "background": Condition(
            MISLEADING | BACKGROUND, without=("HOME", "LANG"), at_start=_in_background
        ),
        "terminal": Condition(MISLEADING | TERMINAL, at_start=_at_terminal, at_terminal=True),
        "busy": Condition(beside=_busy_loops),
        "single": Condition(at_start=_on_one_processor),
        "slowed": Condition(beside=_stops),
        "clock": Condition({CLOCK: str(seed)}),
    }
