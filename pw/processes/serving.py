"""The process of a `ForkServer`: it starts no thread, opens no device, and ends when its client does.

As a new interpreter, its arguments are the modules to import first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping

import msgspec

from pw.processes.channel import Channel
from pw.processes.child import PARENT, parent
from pw.processes.forking import become, end_with_parent, keep_open, preload

CODE = struct.Struct("<i")
DESCRIPTORS = 3
"""Descriptors of a request: the pipe for answers, the fork's end of its channel, perhaps standard error."""


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """To a fork server: fork, and run the main function of a module there."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None
    """Variables of a process of its own; None for a part of the server, which ends with it."""
    folder: str
    """Working folder of a process of its own."""


def serve(client: Channel[ForkRequest]) -> None:
    """Fork until the client ends."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pipes: dict[int, int] = {}
    while True:
        ready = select.select([client.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(pipes)
        if client.fileno() not in ready:
            continue
        try:
            request, _, (pipe, *descriptors) = client.receive()
        except EOFError:
            return
        process = os.fork()
        if process == 0:
            name = "pw-" + request.module.rpartition(".")[2]
            become(name, _main(request, *descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        pipes[process] = pipe
        _say(pipe, process)


def _main(request: ForkRequest, end: int, error: int = 2) -> Callable[[], object]:
    """Make this process the one that a request is for; return its main function."""
    os.setsid()
    if request.environment is None:
        end_with_parent(signal.SIGKILL)
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(error, 2)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
    keep_open([end])
    sys.argv = [request.module, *request.arguments, f"{PARENT}{end}"]
    main: Callable[[], object] = importlib.import_module(request.module).main
    return main


def _reap(pipes: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            pipe = pipes.pop(process)
            _say(pipe, os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _say(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, CODE.pack(number))


def main() -> None:
    """Serve the parent of this interpreter."""
    preload(sys.argv[1:-1])
    serve(parent(ForkRequest, descriptors=DESCRIPTORS))


if __name__ == "__main__":
    main()
