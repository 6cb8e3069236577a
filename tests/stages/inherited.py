"""What all processes of a test run inherit, whatever the shell, the script or the service that starts it has.

`settle` is the first thing that a run does. The workers of xdist, fork servers, daemons and scripts inherit
its result. What a run keeps of its start, and what it sets, are the tables below.
"""

from __future__ import annotations

import atexit
import contextlib
import locale
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "PW_TEST_PLATFORM"
"""A variable: the platform of JAX on which the tests run, cpu by default."""
CLOCK = "PW_TEST_CLOCK"
"""A variable: the seed of a wall clock that jumps, in all interpreters of the run (`tests/rough/clock`)."""

KEPT = (
    *("PATH", "USER", "LOGNAME", "SHELL", "TMPDIR"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD"),  # the Python of the machine may need them
    *("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"),  # they avoid a fault of some processors
    "CI",  # the same examples of hypothesis each time, and no browser
    *("PW_TEST_", "PYTEST_"),
)
"""Variables that a run keeps; a name that ends in `_` keeps all that begin so. All others are removed."""
KEPT_OF_ACCELERATORS = ("CUDA_", "NVIDIA_", "ROCR_", "HIP_", "TPU_")
"""Variables that a run keeps too, if it is not on CPUs."""

VARIABLES = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "JAX_NUM_CPU_DEVICES": "8",
    # XLA sizes its thread pool from the number of cores. On a small machine, collectives over more devices
    # than threads would wait for each other until the process aborts.
    "NPROC": "64",
    "PJRT_NPROC": "64",
    "OPENBLAS_NUM_THREADS": "1",  # idle threads of numpy would look for work
    "PW_ADVICE": "0",  # tests wait for each result
}
"""Variables that a run sets."""
QUICKLY = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",  # their code takes LLVM a third longer
)
"""Flags of XLA on CPUs. Tests run a computation once or twice: without optimization, half the time."""

UMASK = 0o022
LIMITS = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_CORE: 0, resource.RLIMIT_STACK: 8 << 20}
"""Soft limits; a lower hard limit stays."""
RAISED = (
    *(resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU),
    *(resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC),
)
"""Soft limits that become the hard limit."""
PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that each interpreter ignores, and sets again for the processes that it starts."""


def settle() -> None:
    """Set what this process and its children inherit. Call it before jax is imported."""
    _open_streams()
    _restore_signals()
    os.umask(UMASK)
    _set_limits()
    sys.dont_write_bytecode = False  # the tests start hundreds of interpreters
    if not _is_worker():  # whose variables are those of its parent
        _set_variables()
        time.tzset()
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "")


def python_path() -> str:
    """Return the PYTHONPATH of interpreters that tests start."""
    clock = [str(ROOT / "tests" / "rough" / "clock")] if CLOCK in os.environ else []
    return os.pathsep.join([*clock, str(ROOT)])


def _remove(home: Path, owner: int) -> None:
    """Remove the folder at the end of the process that owns it, not of its forks."""
    if os.getpid() == owner:
        shutil.rmtree(home, ignore_errors=True)


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _open_streams() -> None:
    """Open standard streams that are closed: their numbers would go to other files."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


def _restore_signals() -> None:
    """Handle no signal in a way that came from outside, and block none.

    A run that `nohup` has started, and each worker, goes on when the terminal closes: by a handler, which
    its children do not inherit.
    """
    stays = _is_worker() or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - PYTHON_IGNORES:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if stays:
        signal.signal(signal.SIGHUP, _go_on)


def _go_on(number: int, frame: types.FrameType | None) -> None:
    """Do nothing about a signal."""


def _set_limits() -> None:
    for kind, wanted in LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (soft, hard))
    for kind in RAISED:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))


def _set_variables() -> None:
    """Keep and set variables. What workers compile is kept for this run of the tests, and no longer."""
    platform = os.environ.get(PLATFORM, "cpu")
    kept = KEPT if platform == "cpu" else (*KEPT, *KEPT_OF_ACCELERATORS)
    prefixes = tuple(name for name in kept if name.endswith("_"))
    for name in list(os.environ):
        if name not in kept and not name.startswith(prefixes):
            del os.environ[name]
    home = Path(tempfile.mkdtemp(prefix="pw-tests-"))
    atexit.register(_remove, home, os.getpid())
    os.environ.update(VARIABLES)
    os.environ["JAX_PLATFORMS"] = platform
    if platform == "cpu":
        os.environ["XLA_FLAGS"] = " ".join(QUICKLY)
    os.environ["HOME"] = str(home)  # of a user who has joined no cluster
    os.environ["XDG_CACHE_HOME"] = str(home / ".cache")
    if CLOCK in os.environ:
        os.environ["PYTHONPATH"] = python_path()
