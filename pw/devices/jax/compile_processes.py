"""Has processes beside the host parse, vet and compile what clients have sent.

A process that crashes, takes too much memory or too long is ended, and only the artifact that it held
fails. Clients take turns. A client has one task at a time, and a second one only in one of the processes
that are there for this (`SECOND`), so a client waits for at most one task of each other client. If a task
takes long while another client waits, one more process is started, up to `PROCESSES`.

An artifact that has ended a process `STRIKES` times is refused from then on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from pw.core.errors import CompileError, ErrorReport
from pw.core.messages import ThreadReport
from pw.devices.jax.compile_process import (
    Bounds,
    CompileProcess,
    Done,
    Ended,
    Job,
    pool,
    started_server,
)
from pw.devices.jax.compile_server import BeginCompile, CompileTask
from pw.devices.jax.making import Order
from pw.processes.fork_server import ForkServer

PROCESSES = 4
"""Processes at a time, beside those for second tasks."""

SECOND = max(1, min(3, (os.cpu_count() or 1) // 2))
"""Processes for tasks of clients that have one in work already: small functions come many at a time."""

LONG_S = 0.3
"""Seconds after which a task does not hold up other clients: they get another process."""

IDLE_S = 30.0
"""All processes but one end after such a time without a task."""

TASKS = 256
"""Tasks after which a process is replaced: XLA and JAX keep some memory of each."""

STRIKES = 2
"""Processes that an artifact may end."""

STRIKES_KEPT = 1024


class CompileProcesses:
    """The processes of one host.

    Args:
        devices: returns the number of devices of the largest computation, when a process is started.
        failed: takes what a thread raises.
        bounds: bounds of one compilation.
        server: a fork server; without it, one is started when it is needed.
        processes: how many at a time, beside those for second tasks.
        second: processes for tasks of clients that have one in work already.
        long_s: seconds after which a task does not hold up other clients any more.
    """

    def __init__(
        self,
        devices: Callable[[], int],
        failed: Callable[[BaseException], None],
        bounds: Bounds | None = None,
        server: ForkServer | None = None,
        *,
        processes: int = PROCESSES,
        second: int = SECOND,
        long_s: float = LONG_S,
    ) -> None:
        self._devices = devices
        self._failed = failed
        self.bounds = bounds or Bounds()
        """Bounds of one compilation."""
        self.server = server
        """The fork server; None until it is needed."""
        self._most, self._second, self._long_s = processes, second, long_s
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[Job]] = {}
        """Jobs by client; the client that waits for its turn longest comes first."""
        self._running: dict[threading.Thread, tuple[Job, float]] = {}
        self._threads: set[threading.Thread] = set()
        self._strikes: dict[tuple[int, bytes], tuple[int, ErrorReport]] = {}
        self._number = 0
        self._closed = False
        self.ended = 0
        """Processes that a task has ended."""

    def put(
        self, client: int, name: str, digest: bytes, order: Order, done: Done, *, only_examine: bool
    ) -> Job:
        """Work on an artifact, and call `done` with bytes for `making.load` or an error.

        `done` is called on another thread, unless the job is cancelled.
        """
        job = Job(client, name, digest, CompileTask(order, only_examine), done)
        strikes, refusal = self._strikes.get((client, digest), (0, None))
        if refusal is not None and strikes >= STRIKES:
            words = f"{refusal.message}. It is not tried again"
            done(ErrorReport(refusal.kind, words))
            return job
        with self._changed:
            self._waiting.setdefault(client, deque()).append(job)
            is_full = len(self._running) == len(self._threads) <= self._second
            if is_full and self._turn() is not None:
                self._start_thread()
            self._changed.notify()
        return job

    def wait_for(self, client: int, name: str, digest: bytes, order: Order) -> None:
        """Parse and vet an artifact. Raises CompileError."""
        over = threading.Event()
        answers: list[bytes | ErrorReport] = []

        def done(answer: bytes | ErrorReport) -> None:
            answers.append(answer)
            over.set()

        self.put(client, name, digest, order, done, only_examine=True)
        over.wait()
        if isinstance(answers[0], ErrorReport):
            raise answers[0].exception()

    def cancel(self, job: Job) -> None:
        """End a task that is not wanted any more."""
        with self._changed:
            job.cancelled = True
            jobs = self._waiting.get(job.client)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._waiting[job.client]

    def whereabouts(self) -> list[ThreadReport]:
        """What is being compiled, and for how long."""
        now_s = time.monotonic()
        with self._changed:
            running = list(self._running.items())
        return [
            ThreadReport(
                thread.name, f"the compilation of {job.name!r}", now_s - since_s, (), job.client
            )
            for thread, (job, since_s) in running
        ]

    def close(self) -> list[threading.Thread]:
        """Cancel all tasks; return the threads that end now."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for job, _ in self._running.values():
                job.cancelled = True
            self._changed.notify_all()
            threads = list(self._threads)
            if not threads:
                self._drop_server()
        return threads

    def _start_thread(self) -> None:
        self._number += 1
        thread = threading.Thread(
            target=self._serve, name=f"pw-compile-{self._number}", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        """Have one process work on task after task."""
        me = threading.current_thread()
        process: CompileProcess | None = None
        try:
            while (job := self._next(me)) is not None:
                try:
                    answer, process = self._worked(job, process)
                finally:
                    with self._changed:
                        del self._running[me]
                        self._changed.notify_all()
                if not job.cancelled:
                    job.done(answer)
                del job, answer
        except BaseException as error:  # noqa: BLE001 - the loop reports it
            self._failed(error)
        finally:
            if process is not None:
                process.end()
            with self._changed:
                self._threads.discard(me)
                if self._closed and not self._threads:
                    self._drop_server()

    def _next(self, me: threading.Thread) -> Job | None:
        """The next task, of the client whose turn it is; None to end this thread."""
        deadline_s = time.monotonic() + IDLE_S
        with self._changed:
            while not self._closed:
                client = self._turn()
                if client is not None:
                    jobs = self._waiting.pop(client)
                    job = jobs.popleft()
                    if jobs:
                        self._waiting[client] = jobs  # behind the other clients
                    self._running[me] = (job, time.monotonic())
                    return job
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 and len(self._threads) > 1:
                    return None
                self._changed.wait(left_s if left_s > 0 else None)
        return None

    def _turn(self) -> int | None:
        """The client whose task is next, if one may begin now."""
        tasks = Counter(job.client for job, _ in self._running.values())
        second = tasks.total() - len(tasks)
        idle = (client for client in self._waiting if client not in tasks)
        return next(idle, None if second >= self._second else next(iter(self._waiting), None))

    def _help(self) -> None:
        """Start another process if a client waits, and all processes are busy with long tasks."""
        with self._changed:
            busy = {job.client for job, _ in self._running.values()}
            long_s = time.monotonic() - self._long_s
            if (
                not self._closed
                and len(self._threads) < self._most + self._second
                and len(self._running) == len(self._threads)
                and all(since_s < long_s for _, since_s in self._running.values())
                and any(client not in busy for client in self._waiting)
            ):
                self._start_thread()

    def _worked(
        self, job: Job, process: CompileProcess | None
    ) -> tuple[bytes | ErrorReport, CompileProcess | None]:
        """Do a task; return the answer, and the process if it can do another one."""
        fits = process is not None and len(job.task.order.devices) <= process.devices
        if process is not None and not (fits and process.tasks < TASKS):
            process.end()
            process = None
        try:
            if process is None:
                process = self._forked(len(job.task.order.devices))
            process.tasks += 1
            answer = process.work(job, self.bounds, self._help)
        except Ended as ended:
            if process is not None:
                process.end()
            if job.cancelled:
                return b"", None
            self.ended += 1
            return self._strike(job, str(ended)), None
        self._strikes.pop((job.client, job.digest), None)
        return answer.error or answer.data, process

    def _strike(self, job: Job, how: str) -> ErrorReport:
        named = f"the function {job.name!r}" if job.name else "the function"
        report = ErrorReport.of(CompileError(f"{named} cannot be compiled: {how}"))
        key = (job.client, job.digest)
        self._strikes[key] = (self._strikes.pop(key, (0, report))[0] + 1, report)
        if len(self._strikes) > STRIKES_KEPT:
            del self._strikes[next(iter(self._strikes))]
        return report

    def _forked(self, devices: int) -> CompileProcess:
        with self._changed:
            for _ in range(2):  # the system may have ended the server
                try:
                    if self.server is None:
                        self.server = started_server()
                    begin = BeginCompile(
                        max(devices, self._devices()), pool(), self.bounds.memory_bytes
                    )
                    return CompileProcess(self.server, begin)
                except OSError:
                    self._drop_server()
        raise Ended("the host has no room for another process")

    def _drop_server(self) -> None:
        if self.server is not None:
            self.server.close()
        self.server = None
