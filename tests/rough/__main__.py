"""``python -m tests.rough [--only CONDITION] [--seed N] [ARGUMENTS OF PYTEST]``: see `tests.rough`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence

import tests.rough
from tests.rough.conditions import Condition, conditions
from tests.stages.inherited import ROOT

PYTEST = (
    *("-m", "pytest", "-q", "--dist", "loadfile", "--no-loadscope-reorder"),
    "--max-worker-restart=0",
)
END_S = 60.0
"""How long a run may take to end after an interruption."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests under conditions. Returns 0 if they pass under each."""
    names = list(conditions(0))
    parser = argparse.ArgumentParser(
        prog="python -m tests.rough",
        description=tests.rough.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", action="append", choices=names, help="this condition")
    parser.add_argument("--seed", type=int, help="of what happens at random")
    parser.add_argument("--workers", default="2", help="processes that run tests (%(default)s)")
    options, rest = parser.parse_known_args(arguments)
    seed = int.from_bytes(os.urandom(3)) if options.seed is None else options.seed
    lines, failures = [], 0
    for name in options.only or names:
        again = ["python", "-m", tests.rough.__name__, "--only", name, "--seed", str(seed)]
        repeat = shlex.join([*again, "--workers", options.workers, *rest])
        print(f"{name}: {repeat}", flush=True)
        begun_s, before = time.monotonic(), _processor_s()
        code = run(conditions(seed)[name], seed, options.workers, rest)
        took = (
            f"{time.monotonic() - begun_s:.0f} s, {_processor_s() - before:.0f} s of processor time"
        )
        failures += bool(code)
        lines.append(f"{name}: {f'failed; again: {repeat}' if code else 'passed'} ({took})")
        print(lines[-1], flush=True)
    print(*(f"rough: {line}" for line in lines), sep="\n", flush=True)
    return int(failures > 0)


def run(condition: Condition, seed: int, workers: str, rest: Sequence[str]) -> int:
    """Run pytest under a condition. Returns its exit code."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in condition.without and not name.startswith("PYTEST_XDIST")
    }
    command = [sys.executable, *PYTEST, "-n", workers, *rest]
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(_Terminal()) if condition.at_terminal else None

        def at_start() -> None:
            if terminal is not None:
                terminal.take()
            condition.at_start()

        running = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables | condition.variables,
            stdin=None if terminal else subprocess.DEVNULL,
            preexec_fn=at_start,
            restore_signals=False,
            start_new_session=terminal is not None,
        )
        stack.callback(_end, running)
        stack.enter_context(condition.beside(running.pid, random.Random(seed)))
        return running.wait()


def _end(running: subprocess.Popen[bytes]) -> None:
    """Interrupt a run that goes on: it ends its own processes."""
    if running.poll() is None:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(END_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


class _Terminal:
    """A terminal of a run, and a thread that prints here what the run writes there."""

    def __enter__(self) -> _Terminal:
        self._ours, self._theirs = os.openpty()
        termios.tcsetwinsize(self._theirs, (24, 80))
        self._thread = threading.Thread(target=self._print)
        self._thread.start()
        return self

    def take(self) -> None:
        """Make it the terminal of this process, which has a new session."""
        fcntl.ioctl(self._theirs, termios.TIOCSCTTY, 0)
        for number in range(3):
            os.dup2(self._theirs, number)

    def _print(self) -> None:
        with contextlib.suppress(OSError):  # no process has it open any more
            while text := os.read(self._ours, 1 << 16):
                sys.stdout.write(text.decode(errors="replace"))
                sys.stdout.flush()

    def __exit__(self, *_: object) -> None:
        os.close(self._theirs)
        self._thread.join()
        os.close(self._ours)


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    # SIGTERM unwinds the stack like Ctrl-C, so that the run ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
