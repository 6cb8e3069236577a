"""`pw-worker`: the small parent of a host's runtime.

It starts the runtime (`pw.cli.host`) as a child, and restarts it as a new incarnation when an epoch
has ended or the child has died. A host that is stuck in a collective can only be killed. That is
why the runtime is a child, and why this process does no work and imports nothing heavy. It kills a
child whose event loop does not turn, and keeps a child's parcel for the next one
(`pw.cli.supervision`).

A runtime spends most of its start on importing JAX. So a standby child has imported everything and
waits for the word to begin: then a host is back in a tenth of a second.

What follows depends on how a child ends:

    told to stop, drained, or an error that
    would come again                         -> this process ends as well
    its epoch is over                        -> the next child, at once
    it crashed or was killed                 -> the next child, after a pause unless it lived long;
                                                a bounded number of times
    the controller cannot be reached         -> if it never was: the end; otherwise the next child
                                                until no controller is found for `reconnect_s`
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
from dataclasses import dataclass
from typing import Annotated

import typer

from pw.cli.process import (
    ALLOW_REMOTE_HELP,
    EXIT_AGAIN,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    LEAST_HEARTBEAT_S,
    LEAST_LEASE_S,
    LOG_LEVELS,
    SECRET_HELP,
    SILENT_HEARTBEATS,
    STALL_HELP,
    check_bind,
    check_log_level,
    check_reachable,
    command,
    configure_logging,
    fail,
    size_of,
)
from pw.cli.supervision import ChildLink, Parcel, Watch
from pw.core.errors import Error
from pw.core.watchdog import STALL_S
from pw.transport.log import log
from pw.transport.private import PrivateFolder, free_endpoint
from pw.transport.secret import of_cluster

RUNTIME = "pw.cli.host"
STOP_S = 1.5
LEAST_SILENCE_S = 3.0
"""Shortest silence after which a child is killed: a busy machine may delay a beat or two."""
CRASHES = 10
WITHIN_S = 600.0
LONGEST_PAUSE_S = 2.0
LONG_LIFE_S = 10.0
"""A child that crashes after such a life is replaced at once."""
STANDBY_AFTER_S = 5.0
"""How long a child runs before a standby child is started."""


class _Child:
    """One runtime process, and the socket to it."""

    def __init__(self, arguments: list[str], watch: Watch) -> None:
        self.link = ChildLink(watch)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", RUNTIME, *arguments),
                *("--supervisor-fd", str(self.link.child_descriptor)),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[self.link.child_descriptor],
            start_new_session=True,
        )
        self.link.started()

    def end(self) -> None:
        """End the process, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.link.close()


@dataclass(eq=False)
class Supervisor:
    """Keeps one runtime child alive.

    Args:
        name: the host's name, for logs.
        arguments: command line of the child.
        reconnect_s: how long to look for a lost controller.
        heartbeat_s: how often the child beats.
        spare: the first child, too, only takes the place of a lost host; later children always do.
        wants_standby: keep a standby child.
        parent_fd: a pipe; this process ends when the pipe does. -1 for none.
    """

    _name: str
    _arguments: list[str]
    _reconnect_s: float
    _heartbeat_s: float
    _spare: bool
    _wants_standby: bool
    _parent_fd: int
    _standby: _Child | None = None
    _parcel: Parcel | None = None

    def __post_init__(self) -> None:
        self._silence_s = max(LEAST_SILENCE_S, SILENT_HEARTBEATS * self._heartbeat_s)
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Restart children until told to stop, or another child would not help."""
        try:
            return self._run()
        finally:
            if self._standby is not None:
                self._standby.end()

    def _run(self) -> int:
        short_lives = 0
        crashes: list[float] = []
        lost_since: float | None = None
        served = False
        while True:
            begun_s = time.monotonic()
            child = self._next_child()
            child.link.begin(time.time_ns(), self._spare or served, self._parcel)
            code = self._wait(child)
            if code is None:
                child.end()
                return EXIT_OK
            if code in (EXIT_OK, EXIT_ERROR):
                return code
            now = time.monotonic()
            short_lives = 0 if now - begun_s > LONG_LIFE_S else short_lives + 1
            if code == EXIT_UNAVAILABLE:
                lost_since = (
                    lost_since or begun_s
                )  # a child that had a controller has looked for it
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
            pause_s = pause_before(code, short_lives)
            level = "info" if code == EXIT_AGAIN else "warning"
            log(level, "runtime ended", self._name, exit_code=code, next_in_s=pause_s)
            if self._pause(pause_s):
                return EXIT_OK

    def _new_child(self) -> _Child:
        watch = Watch(self._heartbeat_s, self._silence_s)
        return _Child(self._arguments, watch)

    def _next_child(self) -> _Child:
        child, self._standby = self._standby, None
        if child is not None and child.process.poll() is not None:
            child.link.close()
            child = None
        return child or self._new_child()

    def _wait(self, child: _Child) -> int | None:
        """Return the child's exit code, or None when this process must end."""
        begun_s = time.monotonic()
        while (code := child.process.poll()) is None:
            if self._told_to_stop(self._heartbeat_s, child.link):
                return None
            self._parcel = child.link.listen(self._parcel)
            now_s = time.monotonic()
            # Not earlier, so that two children do not compete for the processor while one starts.
            if self._wants_standby and not self._standby and now_s - begun_s > STANDBY_AFTER_S:
                self._standby = self._new_child()
            if child.link.watch.is_silent(now_s):
                fields = {"process": child.process.pid, "silence_s": self._silence_s}
                log("error", "runtime is stuck and is killed", self._name, **fields)
                child.process.kill()
                child.process.wait()
        self._parcel = child.link.listen(self._parcel)
        child.link.close()
        return code

    def _pause(self, pause_s: float) -> bool:
        """Wait; return true at once when this process must end."""
        end_s = time.monotonic() + pause_s
        while not self._told_to_stop(max(0.0, end_s - time.monotonic())):
            if time.monotonic() >= end_s:
                return False
        return True

    def _told_to_stop(self, timeout_s: float, link: ChildLink | None = None) -> bool:
        """Wait for a reason to stop (true), for a message of a child, or for the time (false)."""
        watched: list[int] = [self._wake_read]
        if self._parent_fd >= 0:
            watched.append(self._parent_fd)
        if link is not None and not link.ended:
            watched.append(link.fileno())
        ready = select.select(watched, [], [], timeout_s)[0]
        if self._parent_fd in ready:
            return True
        # A signal writes its number here.
        numbers = os.read(self._wake_read, 64) if self._wake_read in ready else b""
        return any(number != signal.SIGCHLD for number in numbers)


def pause_before(code: int, short_lives: int) -> float:
    """Return the seconds before the next child, after this exit code and so many short lives."""
    if not short_lives or (code == EXIT_AGAIN and short_lives <= CRASHES):
        return 0.0
    return min(LONGEST_PAUSE_S, 0.05 * 2.0 ** min(short_lives, 10))


def serve(
    controller: Annotated[str, typer.Option(help="The controller's address, tcp://host:port.")],
    island: Annotated[
        str, typer.Option(help="Name of the island to join; optional for a spare.")
    ] = "",
    island_hosts: Annotated[
        int,
        typer.Option(min=1, help="How many hosts the island has; it is formed when all are here."),
    ] = 1,
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of this host; on cpu, how many to make.")
    ] = 1,
    platform: Annotated[str, typer.Option(help="What the devices are: cpu, cuda or tpu.")] = "cpu",
    device_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device that runs may use, as in 4GiB; by default what the device says that it "
            "has, which CPU devices do not.",
        ),
    ] = "",
    spare: Annotated[
        bool,
        typer.Option(
            "--spare",
            help="Only take the place of a host that is lost, in --island or, without it, in any.",
        ),
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby/--no-standby",
            help="Keep the next runtime ready beside this one (some 80 MB), to be back at once.",
        ),
    ] = True,
    name: Annotated[
        str, typer.Option(help="Unique name of this host in the cluster; made up by default.")
    ] = "",
    bind: Annotated[
        str,
        typer.Option(
            help="Where other hosts and clients reach this one; by default at a free port of the loopback, or "
            "beside the unix socket of the controller."
        ),
    ] = "",
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help=ALLOW_REMOTE_HELP)] = False,
    heartbeat: Annotated[
        float,
        typer.Option(
            min=LEAST_HEARTBEAT_S,
            help="Seconds between heartbeats; a host that misses three of them counts as lost.",
        ),
    ] = 1.0,
    lease: Annotated[
        float,
        typer.Option(
            min=LEAST_LEASE_S,
            help="Seconds after which a silent client, or the controller, counts as lost.",
        ),
    ] = 10.0,
    connect_timeout: Annotated[
        float, typer.Option(min=0.5, help="Seconds within which the controller must answer.")
    ] = 8.0,
    reconnect: Annotated[
        float,
        typer.Option(min=0, help="Seconds to look for a lost controller."),
    ] = 60.0,
    allow_python: Annotated[
        bool,
        typer.Option(
            "--allow-python",
            help="Run Python functions that clients send (pw.host_function): each client can then do here "
            "what this process can.",
        ),
    ] = False,
    compile_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for compiled computations, which outlive restarts and serve all workers that see it; "
            "by default ~/.cache/pw/executables, and '' keeps nothing.",
        ),
    ] = None,
    stall_after: Annotated[float, typer.Option(min=0.1, help=STALL_HELP)] = STALL_S,
    secret_file: Annotated[str, typer.Option(metavar="FILE", help=SECRET_HELP)] = "",
    log_level: Annotated[
        str, typer.Option(help=f"How much to say: {', '.join(LOG_LEVELS)}.")
    ] = "info",
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Run one host of a pw cluster until SIGTERM, or until it has been drained.

    Exit codes: 0 after SIGTERM or Ctrl-C, or when drained; 1 after an error, which is one line on
    standard error.
    """
    if not hasattr(os, "memfd_create"):  # parcels are such files
        raise Error(
            "workers run on Linux only; on this system, call pw.connect() without an address, which starts "
            "a cluster beside the script"
        )
    if platform not in ("cpu", "cuda", "tpu"):
        raise typer.BadParameter(f"no platform {platform!r}; there are cpu, cuda and tpu")
    if not island and not spare:
        raise typer.BadParameter("a host needs the name of its --island, unless it is a --spare")
    check_log_level(log_level)
    bound_bytes = size_of(device_memory)
    if not controller.startswith(("tcp://", "ipc://")):
        raise typer.BadParameter(f"{controller!r} is no address; it looks like tcp://host:port")
    folder = PrivateFolder.of(controller)
    bind = bind or free_endpoint(folder.path if folder else None, "host")
    check_bind(bind, allow_remote)
    check_reachable(controller, bind)
    configure_logging(log_level)
    of_cluster(controller, secret_file)  # its errors come before anything is started
    name = name or f"{island or 'spare'}-{socket.gethostname()}-{os.getpid()}"
    arguments = [
        *("--controller", controller),
        *("--island", island),
        *("--island-hosts", "0" if spare else str(island_hosts)),
        *("--devices", str(devices)),
        *("--platform", platform),
        *("--device-memory", str(bound_bytes or 0)),
        *("--name", name),
        *("--bind", bind),
        *("--heartbeat", str(heartbeat)),
        *("--lease", str(lease)),
        *("--connect-timeout", str(connect_timeout)),
        *("--reconnect", str(reconnect)),
        *("--stall-after", str(stall_after)),
        *("--log-level", log_level),
        *(["--allow-python"] if allow_python else []),
        *(["--secret-file", secret_file] if secret_file else []),
        *([] if compile_cache is None else ["--compile-cache", compile_cache]),
    ]
    supervisor = Supervisor(name, arguments, reconnect, heartbeat, spare, standby, parent_fd)
    try:
        code = supervisor.run()
    finally:
        if folder is not None:
            folder.leave()
    raise SystemExit(code)


def main() -> None:
    """Entry point of `pw-worker`."""
    command("pw-worker", serve)


if __name__ == "__main__":
    main()
