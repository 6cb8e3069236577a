"""Both ends of a contender that runs in processes of its own.

The benchmark starts the processes, waits until they are ready, and then sends one request a round:
do this case so many times. Each process answers how long that took. Between requests it blocks in
a read and uses no processor. It ends when its standard input ends, so it does not outlive the
benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from bench.baselines.guard import members
from bench.measure import GaveUp
from bench.processor import busy_s

ROOT = Path(__file__).resolve().parent.parent.parent
ANSWER_S = 60.0
# On a machine where nothing is installed, PYTHONPATH names the folders of pw's dependencies.
SEARCHED = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# The daemons of pw do not inherit these settings either.
CPU_SETTINGS = (
    "XLA_FLAGS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "PJRT_NPROC",
    "NPROC",
    "PW_ADDRESS",
)


def environment() -> dict[str, str]:
    """The environment of a new process, without settings that choose JAX's devices or a cluster."""
    kept = {name: value for name, value in os.environ.items() if name not in CPU_SETTINGS}
    return kept | {"PYTHONPATH": SEARCHED}


def free_address() -> str:
    """An address on this machine with a port that no process uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Peer:
    """A contender: one process of `python -m MODULE`, or several that measure together.

    Args:
        name: its name in results.
        module: a module whose main program ends in `serve`.
        arguments: for each process its arguments.
        ready_s: the time in which it must become ready, in seconds.
        freeze: stop its processes (SIGSTOP) between requests, because they are never idle.

    Raises:
        GaveUp: it is not installed, or did not become ready.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[Sequence[str]] = ((),),
        *,
        ready_s: float = 60.0,
        freeze: bool = False,
    ) -> None:
        self.name = name
        self._freeze = freeze
        self._gone = False
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *own],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=environment(),
                cwd=ROOT,
            )
            for own in arguments
        ]
        leaders = [str(process.pid) for process in self._processes]
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "bench.baselines.guard", *leaders],
            stdin=subprocess.PIPE,
            start_new_session=True,
            cwd=ROOT,
        )
        try:
            self.cases: tuple[str, ...] = tuple(self._answers(ready_s, "ready")[0])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def seconds(self, case: str, count: int) -> float:
        """How long the slowest process takes to do `case` `count` times.

        Raises GaveUp if a process fails or does not answer.
        """
        if self._gone:
            raise GaveUp(f"{self.name} is gone")
        self._signal(signal.SIGCONT)
        line = json.dumps({"case": case, "count": count}).encode() + b"\n"
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it does not answer either
                _pipe(process.stdin).write(line)
                _pipe(process.stdin).flush()
        slowest = max(float(answer) for answer in self._answers(ANSWER_S, "seconds"))
        self._signal(signal.SIGSTOP)
        return slowest

    def rate(self, case: str, count: int) -> float:
        """How often a second it does `case`, measured over `count` times."""
        return count / self.seconds(case, count)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [process.pid for process in self._processes]

    def busy_s(self) -> float:
        """Processor time of its processes so far."""
        return busy_s(self.pids)

    def timed(self, case: str) -> Callable[[int], float]:
        """`seconds` of one case, for `measure.sized`."""
        return lambda count: self.seconds(case, count)

    def close(self) -> None:
        """End its processes. Idempotent."""
        self._gone = True
        self._signal(signal.SIGCONT)
        for process in self._processes:
            with contextlib.suppress(OSError):
                _pipe(process.stdin).close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            _pipe(process.stdout).close()
        self._guard.communicate()  # it kills the processes that are left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._freeze:
            for pid in members({process.pid for process in self._processes}):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _answers(self, timeout_s: float, key: str) -> list[Any]:
        """Read one line from every process; if one does not answer, end all."""
        deadline_s = time.monotonic() + timeout_s
        answers = []
        for process in self._processes:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([_pipe(process.stdout)], [], [], left_s)[0]:
                self.close()
                raise GaveUp(f"{self.name} did not answer within {timeout_s:.0f} s")
            line = _pipe(process.stdout).readline()
            if not line:
                code = process.wait()
                self.close()
                raise GaveUp(f"{self.name} ended with {code}")
            answers.append(json.loads(line))
        for answer in answers:
            if "error" in answer:
                self._signal(signal.SIGSTOP)
                raise GaveUp(f"{self.name}: {answer['error']}")
        return [answer[key] for answer in answers]


def serve(prepare: Callable[[], Mapping[str, Callable[[int], object]]]) -> None:
    """Prepare the cases, then serve requests until standard input ends.

    A case does its work `count` times and returns when all of it is done. If it returns a float, that
    is its reading, in seconds; otherwise all of its time is. It runs once before its first request.
    """
    # Other prints to standard output must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        cases = prepare()
        for case in cases.values():
            case(3)
    except Exception as error:  # noqa: BLE001 - it becomes the contender's only line
        reply(error=f"{type(error).__name__}: {error}".splitlines()[0])
        return
    reply(ready=list(cases))
    for line in sys.stdin:
        asked = json.loads(line)
        case = cases[asked["case"]]
        try:
            case(max(1, asked["count"] // 10))  # a warm-up: the process was idle or stopped
            started = time.perf_counter()
            own_s = case(asked["count"])
            took_s = time.perf_counter() - started
            reply(seconds=own_s if isinstance(own_s, float) else took_s)
        except Exception as error:  # noqa: BLE001 - it becomes the contender's only line
            reply(error=f"{type(error).__name__}: {error}".splitlines()[0])


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
