"""`python -m pw.cli.fork_server FD`: forks the daemons of one client (`pw.client.connection.fork_server`).

It imports what daemons need, opens no device, starts no thread, and ends when the client does.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

from pw.cli.forking import become, keep_open, preload
from pw.client.connection.fork_server import REQUEST_BYTES, STATUS, ForkRequest, decode

PRELOADED = ("pw.cli.host", "pw.cli.worker", "pw.cli.controller")
_MOST_DESCRIPTORS = 16


def serve(client: socket.socket) -> None:
    """Fork daemons until the client ends."""
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
            name = request.module.replace("pw.cli.", "pw-")
            become(name, _daemon(request, theirs))
        for descriptor in theirs:
            os.close(descriptor)
        pipes[process] = pipe
        _say(pipe, process)


def _daemon(request: ForkRequest, descriptors: list[int]) -> Callable[[], object]:
    """Make this process the one that a request is for; return its main function."""
    os.setsid()
    beyond = max(*request.descriptors, *descriptors, 2) + 1
    apart = [fcntl.fcntl(one, fcntl.F_DUPFD, beyond) for one in descriptors]
    for number, one in zip(request.descriptors, apart, strict=True):
        os.dup2(one, number)
    keep_open(request.descriptors)
    os.environ.clear()
    os.environ.update(request.environment)
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
        os.write(pipe, STATUS.pack(number))


def main() -> None:
    """Serve the client at the other end of the descriptor that is given as an argument."""
    client = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    preload(PRELOADED)
    serve(client)


if __name__ == "__main__":
    main()
