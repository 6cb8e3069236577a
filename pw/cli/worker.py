"""`pw-worker`: the small parent of a host's runtime.

It starts the runtime (`pw.cli.host`) as a child and starts it anew, as a new incarnation, when an epoch
has ended or the child has died. A host stuck in a collective can only be killed: that is why the runtime
is a child, and why this process does no work and imports nothing heavy.

How a child ends decides what follows:

    told to stop, or an error that would come again -> this process ends as well
    its epoch is over                               -> the next one, at once
    it crashed or was killed                        -> the next one, after a pause; only so many times
    the controller cannot be reached                -> if it never was: the end; otherwise the next one,
                                                       until nobody has been found for `reconnect_s`
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
    ALLOW_REMOTE_HELP,
    EXIT_AGAIN,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    LEAST_LEASE_S,
    LOG_LEVELS,
    check_bind,
    check_log_level,
    check_reachable,
    command,
    configure_logging,
    fail,
)
from pw.transport.log import log

STOP_S = 1.5
CRASHES = 10
WITHIN_S = 600.0
LONGEST_PAUSE_S = 2.0


class Supervisor:
    """Keeps one runtime child alive."""

    def __init__(
        self, name: str, arguments: list[str], reconnect_s: float, parent_fd: int = -1
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._reconnect_s = reconnect_s
        self._parent_fd = parent_fd
        self._child: subprocess.Popen[bytes] | None = None
        self._child_pipe = -1
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Watch over children until told to stop or it makes no sense to go on."""
        ends: list[float] = []
        crashes: list[float] = []
        lost_since: float | None = None
        served = False
        while True:
            self._start()
            code = self._wait()
            if code is None:
                self._end_child()
                return EXIT_OK
            if code in (EXIT_OK, EXIT_ERROR):
                return code
            now = time.monotonic()
            ends = [moment for moment in ends if now - moment < WITHIN_S] + [now]
            if code == EXIT_UNAVAILABLE:
                lost_since = lost_since or now
                if not served:
                    return EXIT_ERROR
                if now - lost_since >= self._reconnect_s:
                    fail("pw-worker", "the controller did not come back; giving up")
                    return EXIT_ERROR
            else:
                served, lost_since = True, None
            if code not in (EXIT_AGAIN, EXIT_UNAVAILABLE):
                crashes = [moment for moment in crashes if now - moment < WITHIN_S] + [now]
                if len(crashes) > CRASHES:
                    fail(
                        "pw-worker",
                        f"the runtime crashed {len(crashes)} times within {WITHIN_S:.0f} s, last "
                        f"with exit code {code}; not starting it again",
                    )
                    return EXIT_ERROR
            crashed = code != EXIT_AGAIN or len(ends) > CRASHES
            pause_s = min(LONGEST_PAUSE_S, 0.05 * 2 ** len(ends)) if crashed else 0.0
            level = "info" if code == EXIT_AGAIN else "warning"
            fields = {"exit_code": code, "next_in_s": pause_s}
            log(level, "runtime ended", self._name, "", fields)
            if self._pause(pause_s):
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
        while (code := self._child.poll()) is None:
            if self._told_to_stop(None):
                return None
        os.close(self._child_pipe)
        return code

    def _pause(self, pause_s: float) -> bool:
        """Wait; true at once when this process shall end."""
        end_s = time.monotonic() + pause_s
        while not self._told_to_stop(max(0.0, end_s - time.monotonic())):
            if time.monotonic() >= end_s:
                return False
        return True

    def _told_to_stop(self, timeout_s: float | None) -> bool:
        """Wait for a reason to stop (true), for the end of a child, or for the time (false)."""
        watched = [self._wake_read]
        if self._parent_fd >= 0:
            watched.append(self._parent_fd)
        ready = select.select(watched, [], [], timeout_s)[0]
        if self._parent_fd in ready:
            return True
        # A signal writes its number here.
        numbers = os.read(self._wake_read, 64) if ready else b""
        return any(number != signal.SIGCHLD for number in numbers)

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
        int,
        typer.Option(min=1, help="How many hosts the island has; it is formed when all are here."),
    ] = 1,
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of this host; on cpu, how many to make.")
    ] = 1,
    platform: Annotated[str, typer.Option(help="What the devices are: cpu, cuda or tpu.")] = "cpu",
    name: Annotated[
        str, typer.Option(help="Unique name of this host in the cluster; by default made up.")
    ] = "",
    bind: Annotated[
        str, typer.Option(help="Where other hosts and clients reach this one.")
    ] = "tcp://127.0.0.1:0",
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help=ALLOW_REMOTE_HELP)] = False,
    lease: Annotated[
        float,
        typer.Option(min=LEAST_LEASE_S, help="Seconds after which a silent peer is given up."),
    ] = 10.0,
    connect_timeout: Annotated[
        float, typer.Option(min=0.5, help="Seconds within which the controller must answer.")
    ] = 8.0,
    reconnect: Annotated[
        float,
        typer.Option(min=0, help="Seconds to look for a controller that was there and has gone."),
    ] = 60.0,
    allow_python: Annotated[
        bool,
        typer.Option(
            "--allow-python",
            help="Run Python functions that clients send (pw.host_function): whoever can connect can "
            "then do here what this process can.",
        ),
    ] = False,
    log_level: Annotated[
        str, typer.Option(help=f"How much to say: {', '.join(LOG_LEVELS)}.")
    ] = "info",
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Run one host of a pw cluster until SIGTERM.

    Exit codes: 0 after SIGTERM or Ctrl-C; 1 after an error, which is one line on standard error.
    """
    if platform not in ("cpu", "cuda", "tpu"):
        raise typer.BadParameter(f"no platform {platform!r}; there are cpu, cuda and tpu")
    check_log_level(log_level)
    if not controller.startswith(("tcp://", "ipc://")):
        raise typer.BadParameter(f"{controller!r} is no address; it looks like tcp://host:port")
    check_bind(bind, allow_remote)
    check_reachable(controller, bind)
    configure_logging(log_level)
    name = name or f"{island}-{socket.gethostname()}-{os.getpid()}"
    arguments = [
        *("--controller", controller),
        *("--island", island),
        *("--island-hosts", str(island_hosts)),
        *("--devices", str(devices)),
        *("--platform", platform),
        *("--name", name),
        *("--bind", bind),
        *("--lease", str(lease)),
        *("--connect-timeout", str(connect_timeout)),
        *("--log-level", log_level),
        *(["--allow-python"] if allow_python else []),
    ]
    raise SystemExit(Supervisor(name, arguments, reconnect, parent_fd).run())


def main() -> None:
    """Entry point of `pw-worker`."""
    command("pw-worker", serve)


if __name__ == "__main__":
    main()
