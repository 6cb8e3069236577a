"""`pw-worker`: the small parent of a host's runtime.

It starts the runtime (`pw.cli.host`) as a child and starts it anew, as a new incarnation, when an epoch
has ended or the child has died. A host stuck in a collective can only be killed: that is why the runtime
is a child, and why this process does no work and imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Annotated

import typer

from pw.cli.process import (
    EXIT_AGAIN,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    LOG_LEVELS,
    configure_logging,
    fail,
)

STOP_S = 1.5
RESTARTS = 10
RESTARTS_WITHIN_S = 600.0
UNAVAILABLE_S = 60.0
"""How long a host that was in a cluster looks for a controller that has gone."""


class Supervisor:
    """Keeps one runtime child alive."""

    def __init__(self, arguments: list[str], parent_fd: int) -> None:
        self._arguments = arguments
        self._parent_fd = parent_fd
        self._child: subprocess.Popen[bytes] | None = None
        self._child_pipe = -1
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Watch over children until told to stop or it makes no sense to go on."""
        restarts: list[float] = []
        served = False
        lost_since: float | None = None
        while True:
            self._start()
            code = self._wait()
            if code is None:
                self._end_child()
                return EXIT_OK
            if code in (EXIT_OK, EXIT_ERROR):
                return code
            now = time.monotonic()
            if code == EXIT_UNAVAILABLE:
                lost_since = lost_since or now
                if not served or now - lost_since > UNAVAILABLE_S:
                    return EXIT_ERROR
            else:
                served = served or code == EXIT_AGAIN
                lost_since = None
            restarts = [moment for moment in restarts if now - moment < RESTARTS_WITHIN_S] + [now]
            if code != EXIT_UNAVAILABLE and len(restarts) > RESTARTS:
                fail(
                    "pw-worker",
                    f"the runtime ended {len(restarts)} times within {RESTARTS_WITHIN_S:.0f} s, "
                    f"last with exit code {code}; not starting it again",
                )
                return EXIT_ERROR
            if self._pause(min(2.0, 0.05 * 2 ** len(restarts)) if code != EXIT_AGAIN else 0.0):
                return EXIT_OK

    def _start(self) -> None:
        parent_read, self._child_pipe = os.pipe()
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "pw.cli.host", *self._arguments),
                *("--incarnation", str(time.time_ns()), "--parent-fd", str(parent_read)),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[parent_read],
            start_new_session=True,
        )
        os.close(parent_read)

    def _wait(self) -> int | None:
        """The child's exit code, or None when this process shall end."""
        assert self._child is not None
        pidfd = os.pidfd_open(self._child.pid)
        try:
            if self._told_to_stop([pidfd], None):
                return None
            code = self._child.wait()
            os.close(self._child_pipe)
            return code
        finally:
            os.close(pidfd)

    def _pause(self, pause_s: float) -> bool:
        return self._told_to_stop([], pause_s)

    def _told_to_stop(self, others: list[int], timeout_s: float | None) -> bool:
        """Wait for a signal or the parent's end (true), one of `others`, or the time (false)."""
        watched = [self._wake_read, *others]
        if self._parent_fd >= 0:
            watched.append(self._parent_fd)
        ready = select.select(watched, [], [], timeout_s)[0]
        return self._wake_read in ready or self._parent_fd in ready

    def _end_child(self) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def serve(
    controller: Annotated[str, typer.Option(help="The controller's address, tcp://host:port.")],
    island: Annotated[str, typer.Option(help="Name of the island to join.")],
    island_hosts: Annotated[
        int, typer.Option(min=1, help="How many hosts the island has; it is formed when all are here.")
    ] = 1,
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of this host; on cpu, how many to make.")
    ] = 1,
    platform: Annotated[str, typer.Option(help="cpu, cuda or tpu.")] = "cpu",
    name: Annotated[str, typer.Option(help="Unique name of this host in the cluster.")] = "",
    bind: Annotated[
        str, typer.Option(help="Where other hosts and clients reach this one.")
    ] = "tcp://127.0.0.1:0",
    log_level: Annotated[str, typer.Option(help=", ".join(LOG_LEVELS))] = "info",
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Run one host of a pw cluster until SIGTERM."""
    if platform not in ("cpu", "cuda", "tpu"):
        raise typer.BadParameter(f"no platform {platform!r}; there are cpu, cuda and tpu")
    if log_level not in LOG_LEVELS:
        raise typer.BadParameter(f"no log level {log_level!r}; there are {', '.join(LOG_LEVELS)}")
    if not controller.startswith(("tcp://", "ipc://")):
        raise typer.BadParameter(f"{controller!r} is no address; it looks like tcp://host:port")
    configure_logging(log_level)
    arguments = [
        *("--controller", controller),
        *("--island", island),
        *("--island-hosts", str(island_hosts)),
        *("--devices", str(devices)),
        *("--platform", platform),
        *("--name", name or f"{island}-{socket.gethostname()}-{os.getpid()}"),
        *("--bind", bind),
        *("--log-level", log_level),
    ]
    raise SystemExit(Supervisor(arguments, parent_fd).run())


def main() -> None:
    """Entry point of `pw-worker`."""
    typer.run(serve)


if __name__ == "__main__":
    main()
