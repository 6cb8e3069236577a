"""The small parent of a host's runtime: what `pw-worker` does once it has read its options.

It starts the runtime (`pw.cli.host`) as a child, and restarts it as a new incarnation when an epoch
has ended or the child has died. A host that is stuck in a collective can only be killed. That is
why the runtime is a child, and why this process does no work. It kills a child whose event loop does
not turn, and keeps a child's parcel for the next one (`pw.cli.supervision`).

A runtime would spend most of its start on importing JAX. So this process imports all that it needs,
once, and forks it: then a host is back in two tenths of a second. It has no threads and opens no
devices, so a fork is as good as a new interpreter.

What follows depends on how a child ends:

    told to stop, drained, or an error that
    would come again                         -> this process ends as well
    its epoch is over                        -> the next child, at once
    it crashed or was killed                 -> the next child, after a pause unless it lived long;
                                                a bounded number of times
    the controller cannot be reached         -> if it never was: the end; otherwise the next child
                                                until no controller is found for `reconnect_s`
    its credentials cannot be used, or are
    refused                                  -> the next child, after 2 s, then 4 s and so on up to
                                                60 s: the operator may put others in their place
"""

from __future__ import annotations

import importlib
import math
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import Any

from pw.cli.host_options import HostOptions
from pw.cli.parcel_files import ParcelFile
from pw.cli.process import (
    EXIT_AGAIN,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_UNAVAILABLE,
    fail,
    longest_silence_s,
)
from pw.cli.supervision import ChildLink, Parcel, SupervisorLink, ToSupervisor, Watch
from pw.processes.channel import Channel
from pw.processes.child import Child
from pw.processes.forking import Process, fork, preload
from pw.transport.log import log

RUNTIME = "pw.cli.host"
STOP_S = 1.5
CRASHES = 10
WITHIN_S = 600.0
LONGEST_PAUSE_S = 2.0
FIRST_REFUSED_S, LONGEST_REFUSED_S = 2.0, 60.0
"""Pauses after children that were refused."""
LONG_LIFE_S = 10.0
"""Seconds of life after which a child that crashes is replaced at once."""


@dataclass(eq=False)
class Supervisor:
    """Keeps one runtime child alive.

    Args:
        options: of the host. With `spare` the first child, too, only takes the place of a lost host;
            later children always do.
    """

    _options: HostOptions
    _parcel: Parcel | None = None
    _file: ParcelFile | None = None
    """File of the parcel that the next supervisor begins with; None without a folder for it."""

    def __post_init__(self) -> None:
        self._name, self._heartbeat_s = self._options.name, self._options.heartbeat
        self._drained_by_s: float | None = None
        """Time, in seconds, at which this process ends at the latest; None until it is told to end."""
        self._silence_s = longest_silence_s(self._heartbeat_s)
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Restart children until told to stop, or another child would not help."""
        if self._options.keep_files:
            self._file = ParcelFile(self._options.keep_files, self._name)
            self._load()
        preload([RUNTIME])
        code = self._run()
        if self._file is not None and self._parcel is not None and self._parcel.index_offset:
            self._store(self._file, self._parcel)
        return code

    def _run(self) -> int:
        short_lives = refusals = 0
        crashes: list[float] = []
        lost_since: float | None = None
        served = was_refused = False
        while True:
            begun_s = time.monotonic()
            child: Child[ToSupervisor] = Child(self._fork, ToSupervisor, descriptors=1)
            link = ChildLink(child.channel, Watch(self._heartbeat_s, self._silence_s))
            is_spare, is_to_end = self._options.spare or served, self._drained_by_s is not None
            link.begin(time.time_ns(), is_spare, self._parcel, is_to_end=is_to_end)
            code = self._wait(child, link)
            if code is None:
                child.let_go()  # it ends when it sees that, also if it does not heed signals
                child.stop(STOP_S)
                return EXIT_OK
            if code in (EXIT_OK, EXIT_ERROR):
                return code
            now = time.monotonic()
            if code == EXIT_REFUSED:
                was_refused, lost_since = True, None
                pause_s = pause_when_refused(refusals)
                refusals += 1
                meaning = (
                    "put credentials that the cluster takes in the place of this worker's, or start it with "
                    "the name and island that they allow; it tries again"
                )
                log("warning", "refused", self._name, meaning=meaning, next_in_s=pause_s)
                if self._pause(pause_s):
                    return EXIT_OK
                continue
            refusals = 0
            short_lives = 0 if now - begun_s > LONG_LIFE_S else short_lives + 1
            if code == EXIT_UNAVAILABLE:
                # A child that had a controller has looked for it.
                lost_since = lost_since or begun_s
                if not (served or was_refused):
                    return EXIT_ERROR
                if now - lost_since >= self._options.reconnect:
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

    def _fork(self, end: int) -> Process:
        """Start a runtime with this end of its channel."""

        def run() -> None:
            importlib.import_module(RUNTIME).run(self._options, SupervisorLink(end))

        return fork("pw-runtime", run, [end])

    def _wait(self, child: Child[ToSupervisor], link: ChildLink) -> int | None:
        """Return the child's exit code, or None when this process must end."""
        while (code := child.exit_code()) is None:
            must_end = self._must_end(self._heartbeat_s, child.channel)
            if must_end and self._options.drain and self._drained_by_s is None:
                self._drained_by_s = time.monotonic() + self._options.drain
                log(
                    "info",
                    "told to end, and drains first",
                    self._name,
                    at_most_s=self._options.drain,
                )
                link.drain()
            elif must_end or time.monotonic() > (self._drained_by_s or math.inf):
                return None
            self._listen(link)
            if link.watch.is_silent(time.monotonic()):
                fields = {"process": child.pid, "silence_s": self._silence_s}
                log("error", "runtime is stuck and is killed", self._name, **fields)
                child.kill()
                child.wait()
        self._listen(link)
        child.let_go()
        return code

    def _listen(self, link: ChildLink) -> None:
        before, self._parcel = self._parcel, link.listen(self._parcel)
        if self._file is not None and before is not None and self._parcel is not before:
            self._file.remove()

    # --- what outlives this process --------------------------------------------------------------

    def _load(self) -> None:
        """Begin with what the last worker of this name has left in the folder."""
        assert self._file is not None
        try:
            self._parcel = self._file.load()
        except OSError as error:
            log("error", "what the last worker has left is not used", self._name, reason=error)
            self._file.remove()
        if self._parcel is not None:
            log("info", "begins with what the last worker has left", self._name)

    def _store(self, file: ParcelFile, parcel: Parcel) -> None:
        begun_s = time.monotonic()
        try:
            size_bytes = file.store(parcel)
        except OSError as error:
            log("error", "what is nowhere else is lost", self._name, reason=error)
            return
        took_s = round(time.monotonic() - begun_s, 3)
        log("info", "left for the next worker", self._name, bytes=size_bytes, took_s=took_s)

    def _pause(self, pause_s: float) -> bool:
        """Wait; return true at once when this process must end."""
        end_s = time.monotonic() + pause_s
        while not self._must_end(max(0.0, end_s - time.monotonic())):
            if time.monotonic() >= end_s:
                return False
        return True

    def _must_end(self, timeout_s: float, channel: Channel[Any] | None = None) -> bool:
        """Wait for a signal, a message of a child or the timeout; return whether this process must end."""
        watched: list[int] = [self._wake_read]
        if self._options.parent_fd >= 0:
            watched.append(self._options.parent_fd)
        if channel is not None and not channel.ended:
            watched.append(channel.fileno())
        ready = select.select(watched, [], [], timeout_s)[0]
        if self._options.parent_fd in ready:
            return True
        # A signal writes its number here.
        numbers = os.read(self._wake_read, 64) if self._wake_read in ready else b""
        return any(number != signal.SIGCHLD for number in numbers)


def pause_before(code: int, short_lives: int) -> float:
    """Return the seconds before the next child, after this exit code and so many short lives."""
    if not short_lives or (code == EXIT_AGAIN and short_lives <= CRASHES):
        return 0.0
    return min(LONGEST_PAUSE_S, 0.05 * 2.0 ** min(short_lives, 10))


def pause_when_refused(times: int) -> float:
    """Return the seconds before the next child, after one that was refused and so many before it."""
    return min(LONGEST_REFUSED_S, FIRST_REFUSED_S * 2.0 ** min(times, 10))
