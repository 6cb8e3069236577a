"""The process of a `ForkServer`: it starts no thread, opens no device, and ends when its client does.

As a new interpreter: `python -m pw.processes.serving FD MODULE...`, with the modules to import first.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable

import msgspec

from pw.processes.forking import become, die_with_parent, keep_open, preload

CODE = struct.Struct("<i")
REQUEST_BYTES = 1 << 17
_MOST_DESCRIPTORS = 16


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """To a fork server: fork, and run the main function of a module there."""

    module: str
    arguments: tuple[str, ...]
    descriptors: tuple[int, ...]
    """The numbers that the descriptors of the request get in the fork; the pipe comes before them."""
    environment: dict[str, str] | None = None
    """None for that of the server."""
    folder: str = ""
    """Working folder; empty for that of the server."""
    ends_with_server: bool = False


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ForkRequest).decode


def serve(client: socket.socket) -> None:
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
        data, descriptors, _, _ = socket.recv_fds(client, REQUEST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return
        pipe, *theirs = descriptors
        process = os.fork()
        if process == 0:
            request = decode(data)
            become("pw-" + request.module.rpartition(".")[2], _main(request, theirs))
        for descriptor in theirs:
            os.close(descriptor)
        pipes[process] = pipe
        _say(pipe, process)


def _main(request: ForkRequest, descriptors: list[int]) -> Callable[[], object]:
    """Make this process the one that a request is for; return its main function."""
    os.setsid()
    if request.ends_with_server:
        die_with_parent()
    beyond = max((2, *request.descriptors, *descriptors)) + 1
    apart = [fcntl.fcntl(one, fcntl.F_DUPFD, beyond) for one in descriptors]
    for number, one in zip(request.descriptors, apart, strict=True):
        os.dup2(one, number)
    keep_open(request.descriptors)
    if request.environment is not None:
        os.environ.clear()
        os.environ.update(request.environment)
    if request.folder:
        os.chdir(request.folder)
    sys.argv = [request.module, *request.arguments]
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
    """Serve the client at the other end of the descriptor that is given as an argument."""
    descriptor, *modules = sys.argv[1:]
    preload(modules)
    serve(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main()
