"""Runs one test file in processes of its own, restarting after a crash or a hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.jax_suite.child import REASON_CHARACTERS, Order

CHILD = Path(__file__).with_name("child.py")
COLLECTION_LIMIT_S = 600.0
"""Importing a file and collecting its tests; nothing is known to hang here."""
POLL_S = 0.1
ENDED_WELL = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended: passed, failed or skipped, and why."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class FileRun:
    """The outcomes of one file's tests, and what went wrong beside them."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    broken: str = ""
    """What went wrong beside the tests: the file does not import, the runner gave up, a bad exit."""
    seconds: float = 0.0
    processes: int = 0


@dataclass(slots=True)
class Attempt:
    """What one process wrote."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    collected: list[str] | None = None
    running: str = ""
    since: float = field(default_factory=lambda: time.monotonic())
    broken: str = ""
    finished: bool = False

    def take(self, line: str) -> None:
        event = json.loads(line)
        self.since = time.monotonic()
        match event.pop("event"):
            case "collected":
                self.collected = event["tests"]
            case "start":
                self.running = event["test"]
            case "end":
                self.running = ""
                test = event.pop("test")
                self.outcomes[test] = Outcome(**event)
            case "broken":
                self.broken = event["reason"]
            case "finished":
                self.finished = True


def run_file(
    order: Order,
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    most_processes: int,
    say: Callable[[str], None],
) -> FileRun:
    """Run the tests of an order until each has an outcome, or `most_processes` have ended early."""
    run = FileRun()
    began = time.monotonic()
    log.unlink(missing_ok=True)
    while run.processes < most_processes:
        run.processes += 1
        left = replace(order, without=[*order.without, *run.outcomes])
        attempt, how = attempt_file(left, environment, log, limit_s)
        run.outcomes |= attempt.outcomes
        if attempt.running:
            how = how or "the process ended with exit status 0"
            run.outcomes[attempt.running] = Outcome("failed", how)
            say(f"{attempt.running}: {how}")
        elif attempt.collected is None or attempt.broken:
            run.broken = attempt.broken or f"no tests collected; {how}"
            break
        elif attempt.finished:
            if how:
                run.broken = f"after the last test: {how}"
            break
        else:
            say(f"between two tests: {how}")
    else:
        run.broken = f"gave up after {most_processes} processes that crashed or hung"
    run.seconds = round(time.monotonic() - began, 1)
    return run


def attempt_file(
    order: Order, environment: Mapping[str, str], log: Path, limit_s: float
) -> tuple[Attempt, str]:
    """Run one process to its end; returns what it wrote, and how it ended."""
    with TemporaryDirectory(prefix="jax-suite-") as folder, log.open("ab") as output:
        events, instructions = Path(folder, "events"), Path(folder, "order.json")
        events.touch()
        instructions.write_text(json.dumps(asdict(replace(order, events=str(events)))))
        began_at = output.tell()
        process = subprocess.Popen(
            [sys.executable, str(CHILD), str(instructions)],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            attempt, hung = watch(process, events, limit_s)
        finally:
            end(process)
        text = log.read_bytes()[began_at:].decode(errors="replace")
        if hung:
            return attempt, f"hang: no end after {limit_s:g} s{last_frame(text)}"
        return attempt, ending(process.returncode, text)


def watch(process: subprocess.Popen[bytes], events: Path, limit_s: float) -> tuple[Attempt, bool]:
    """Follow a process's events to its end; returns True if a test, or the exit, took too long."""
    attempt, begun = Attempt(), ""
    with events.open() as written:
        while True:
            ended = process.poll() is not None
            *lines, begun = (begun + written.read()).split("\n")
            for line in lines:
                attempt.take(line)
            if ended:
                return attempt, False
            late_s = time.monotonic() - attempt.since
            if late_s > (COLLECTION_LIMIT_S if attempt.collected is None else limit_s):
                break
            time.sleep(POLL_S)
    process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks of all threads
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    return attempt, True


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(code: int, output: str) -> str:
    """How a process ended, with its last words."""
    if code >= 0:
        return "" if code in ENDED_WELL else f"the process ended with exit status {code}"
    words = re.findall(
        r"^(?:F\d{4} .*|.*Check failed.*|Fatal Python error.*|terminate called.*)$", output, re.M
    )
    return f"crash: {signal.Signals(-code).name} {words[0] if words else ''}"[:REASON_CHARACTERS]


def last_frame(output: str) -> str:
    """Where the main thread was when the process was aborted: ` in array.py:631 _value`."""
    stack = re.search(r"Current thread .*\n  File \"(.*)\", line (\d+) in (.*)", output)
    return f" in {Path(stack[1]).name}:{stack[2]} {stack[3]}" if stack else ""
