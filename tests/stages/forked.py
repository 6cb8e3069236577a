"""The main function of a fork that takes the place of a new interpreter: `-c CODE`, `-m MODULE` or a file.

The process that forks has imported JAX and `pw`, and has no backend yet (`tests.stages.programs`).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import sys
import tempfile
import threading
import types

import jax
import msgspec
import numpy as np

from pw.processes import daemons
from pw.processes.channel import Channel
from pw.processes.child import parent

MARKER = "PW_TEST_MARKER"
MARKER_CHARACTERS = 16
PLATFORMS, DEVICES, TARGET = "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_BACKEND_TARGET"

_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_void_p
_marker_address: int | None = _libc.getenv(MARKER.encode())
"""Address of the marker in the memory that /proc shows as the environment of this process."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """To a fork: its working folder. The descriptors of its standard streams come along."""

    folder: str


def _take_place() -> None:
    """Take the working folder and the standard streams of the program."""
    channel: Channel[Place] = parent(Place, descriptors=3)
    place, _, streams = channel.receive()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    channel.close()
    os.chdir(place.folder)
    sys.argv.pop()


def _become_program() -> None:
    """Change what the server has read from its environment to what this process would have read."""
    if (marker := os.environ.get(MARKER, "").encode()) and _marker_address is not None:
        assert len(marker) == MARKER_CHARACTERS
        ctypes.memmove(_marker_address, marker, MARKER_CHARACTERS)
    tempfile.tempdir = None
    np.random.seed()
    daemons.fork_children(daemons.inherited())
    jax.config.update("jax_platforms", os.environ.get(PLATFORMS) or None)
    jax.config.update("jax_num_cpu_devices", int(os.environ.get(DEVICES, "-1")))
    jax.config.update("jax_backend_target", os.environ.get(TARGET, "").lower())


def _run(first: str, *arguments: str) -> None:
    """Run the program under the names and the path that an interpreter gives it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if first == "-m":
        module, *rest = arguments
        sys.modules.pop(module, None)
        sys.path[0], sys.argv = os.getcwd(), ["-m", *rest]
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        return
    if first == "-c":
        source, *rest = arguments
        sys.path[0], sys.argv, name = "", ["-c", *rest], "<string>"
    else:
        sys.path[0], sys.argv, name = (
            os.path.dirname(os.path.abspath(first)),
            [*sys.argv[1:]],
            first,
        )
        main.__file__ = first
        with open(first) as file:
            source = file.read()
    exec(compile(source, name, "exec"), main.__dict__)


def main() -> None:
    """Run the program of the arguments, and end as an interpreter ends."""
    _take_place()
    _become_program()
    code, interrupted = 0, False
    try:
        _run(*sys.argv[1:])
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - the edge of the process
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    if interrupted:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(code)
