"""Python programs as processes: forks of one that has imported JAX, wherever that makes no difference.

An interpreter takes more than a second to import JAX and `pw`. A fork has them already and takes some 50 ms;
`tests.stages.forked` makes it look like a new interpreter. A test of what happens when an interpreter starts
or imports asks for a new one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pw.processes.channel import Channel
from pw.processes.daemons import inherited
from pw.processes.fork_server import ForkServer
from pw.processes.forking import Process
from tests.stages import forked
from tests.stages.forked import DEVICES, MARKER, MARKER_CHARACTERS, PLATFORMS, TARGET, Place
from tests.stages.inherited import ROOT, python_path

HERE = {"PYTHONPATH": python_path()}
PRELOADED = (
    *("tests.stages.forked", "pw", "pw.jax", "jax.experimental.shard_map", "jax.extend", "optax"),
    *("pw.cli.gateway", "pw.cli.main", "pw.cli.preloaded", "rich.console", "rich.table"),
    *(
        "pw.client.looking.status",
        "pw.operating.timeline",
        "jaxlib.mlir.dialects.mhlo",
        "encodings.idna",
    ),
    *(
        "numpy.testing",
        "pw.cli.requests",
        "pw.operating.timeline.tracing",
        "pw.client.functions.jit",
    ),
)
READ_AT_START = ("JAX_", "TF_", "PYTHON", "LD_", "MALLOC_", "OMP_", "OPENBLAS_")
"""Variables that an interpreter or a library reads at its start, except three that a fork can change."""

_server: ForkServer | None = None


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    changeable = (PLATFORMS, DEVICES, TARGET)
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and name not in changeable
    }


def start_server() -> None:
    """Start the process that programs are forks of."""
    global _server
    marker = {MARKER: "0" * MARKER_CHARACTERS}
    _server = ForkServer.interpreter(PRELOADED, HERE | inherited() | marker)


def stop_server() -> None:
    """End the process that programs are forks of; programs that still run go on."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def without_address() -> dict[str, str]:
    """Return the environment of this process, without a cluster's address."""
    return {name: value for name, value in os.environ.items() if name != "PW_ADDRESS"}


def start(
    arguments: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    streams: tuple[int, int, int],
    *,
    new_interpreter: bool = False,
) -> subprocess.Popen[bytes] | Process:
    """Start what `python ARGUMENTS` would: `-c CODE`, `-m MODULE` or a file, and its own arguments.

    Args:
        arguments: of the interpreter.
        environment: all variables.
        folder: working folder.
        streams: descriptors of its standard streams.
        new_interpreter: never fork.
    """
    variables = HERE | environment
    other = _read_at_start(variables) != _read_at_start(HERE | inherited())
    if _server is None or new_interpreter or other:
        command = [sys.executable, *arguments]
        stdin, stdout, stderr = streams
        return subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = _server.fork(forked.__name__, arguments, variables)(theirs.fileno())
        channel: Channel[None] = Channel(ours, None)
        channel.send(Place(str(folder)), descriptors=streams)
        channel.close()
    return process


def run_python(
    arguments: Sequence[str],
    folder: Path = ROOT,
    timeout_s: float = 100.0,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run what `python ARGUMENTS` would, to its end. Raises subprocess.TimeoutExpired."""
    with (
        open(os.devnull) as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        streams = (nothing.fileno(), out.fileno(), err.fileno())
        process = start(arguments, environment or dict(os.environ), folder, streams)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())
