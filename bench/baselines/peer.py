"""Both ends of a contender that runs in processes of its own.

The benchmark starts it, waits until it is ready, and then asks it, round by round, to do one of its cases so
many times; it answers how long that took. In between it blocks in a read and leaves the processor to the
others. It ends when the pipe that it reads from does, so it does not outlive the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
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
# For modules: also where this process was told to look, as on a machine where nothing is installed.
SEARCHED = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# What pw keeps from its own daemons too; they choose these settings themselves.
CPU_SETTINGS = (
    "XLA_FLAGS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "PJRT_NPROC",
    "NPROC",
    "PW_ADDRESS",
)


class Peer:
    """A contender: one process of `python -m MODULE`, or several that measure together.

    Args:
        name: what it is called in results.
        module: a module whose main program ends in `serve`.
        arguments: for each process its arguments.
        ready_s: how long it may take to become ready, in seconds.
        freeze: stop its processes (SIGSTOP) whenever it is not asked for anything, because it cannot be idle.

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
        environment = {k: v for k, v in os.environ.items() if k not in CPU_SETTINGS}
        environment["PYTHONPATH"] = SEARCHED
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *own],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=environment,
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
        """How long the slowest of its processes takes to do `case` `count` times.

        Raises GaveUp if it fails or does not answer.
        """
        if self._gone:
            raise GaveUp(f"{self.name} is gone")
        self._signal(signal.SIGCONT)
        line = json.dumps({"case": case, "count": count}).encode() + b"\n"
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # then it will not answer either
                _pipe(process.stdin).write(line)
                _pipe(process.stdin).flush()
        slowest = max(float(answer) for answer in self._answers(ANSWER_S, "seconds"))
        self._signal(signal.SIGSTOP)
        return slowest

    def rate(self, case: str, count: int) -> float:
        """How often a second it does `case`, doing it `count` times."""
        return count / self.seconds(case, count)

    def busy_s(self) -> float:
        """Processor time that its processes have used so far."""
        return busy_s(process.pid for process in self._processes)

    def timed(self, case: str) -> Callable[[int], float]:
        """`seconds` of one case, as `measure.sized` takes it."""
        return lambda count: self.seconds(case, count)

    def close(self) -> None:
        """End it. Idempotent."""
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
        self._guard.communicate()  # it ends what they have left behind

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
        """What every process has to say. Without an answer from each, none can be asked again."""
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
    """The other end: prepare the cases, then serve requests until they end.

    A case does its work `count` times and returns when all of it is done; it is run once before it is timed.
    """
    # Whatever else prints to standard output must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        cases = prepare()
        for case in cases.values():
            case(3)
    except Exception as error:  # noqa: BLE001 - it becomes the contender's only line
        say(error=f"{type(error).__name__}: {error}".splitlines()[0])
        return
    say(ready=list(cases))
    for line in sys.stdin:
        asked = json.loads(line)
        case = cases[asked["case"]]
        try:
            case(max(1, asked["count"] // 10))  # it has been idle, or frozen
            started = time.perf_counter()
            case(asked["count"])
            say(seconds=time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001 - it becomes the contender's only line
            say(error=f"{type(error).__name__}: {error}".splitlines()[0])


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
