"""A process that parses, vets and compiles what clients have sent.

A fork server starts it (`pw.processes.fork_server`), so that it is there after some 50 ms, also
when the one before it has crashed. It ends with its host.

    host -> process   Begin, then a `CompileTask` for each artifact
    process -> host   Answer for each task
"""

from __future__ import annotations

import contextlib
import os
import resource

import jax
import msgspec

from pw.core.errors import CompileError, ErrorReport
from pw.devices.jax import making
from pw.devices.jax.group import POOL_VARIABLES
from pw.processes.channel import Channel
from pw.processes.child import parent

_SLACK_BYTES = 2 << 30
"""The host ends a child that uses too much memory; this bound of the system comes after it."""


class BeginCompile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host tells a child how to begin."""

    devices: int
    """Devices to make."""
    pool: str
    """Number of XLA's threads in the host: code is divided for so many."""
    memory_bytes: int


class CompileTask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host has a child work on an artifact."""

    order: making.Order
    only_examine: bool


class CompileAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a child has found: an executable for `making.load`, if one was wanted, or an error."""

    data: bytes = b""
    error: ErrorReport | None = None


def work(host: Channel[BeginCompile | CompileTask]) -> None:
    """Do what the host asks for, until it ends. Raises EOFError or OSError then."""
    begin = host.receive().message
    assert isinstance(begin, BeginCompile)
    _bound(begin.memory_bytes)
    for variable in POOL_VARIABLES:
        os.environ[variable] = begin.pool
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", begin.devices)
    while True:
        task = host.receive().message
        assert isinstance(task, CompileTask)
        host.send(_done(task))


def _done(task: CompileTask) -> CompileAnswer:
    try:
        if task.only_examine:
            making.examine(task.order)
            return CompileAnswer()
        physical = jax.devices()[: len(task.order.devices)]
        return CompileAnswer(making.saved(*making.make(task.order, physical)))
    except Exception as error:  # noqa: BLE001 - the error is the answer
        return CompileAnswer(error=ErrorReport.of(error, kind=CompileError))


def _bound(memory_bytes: int) -> None:
    """Bound what this process may take; have the system end it before the host if memory is short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound = memory_bytes + _SLACK_BYTES
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or bound < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def main() -> None:
    """Serve the host until it ends."""
    with contextlib.suppress(EOFError, OSError):
        work(parent(BeginCompile | CompileTask))
    os._exit(0)
