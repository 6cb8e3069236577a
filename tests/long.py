"""`make long`: the tests that are marked `long`, then rounds of seeds, inputs and kills until the time is over.

Each round has new seeds. It ends at the first failure, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.stages.programs import ROOT
from tests.stages.samples import MORE_EXAMPLES

SEEDS, INPUTS = 100, 2_000_000
"""Seeds of each profile of the simulator, and inputs of the fuzzer, in a round."""
KILLS = (
    *("tests/cli/test_survival.py", "tests/cli/test_secure_survival.py", "tests/cli/test_gangs.py"),
    *("tests/pipelines/test_pipeline_failures.py", "tests/gateway/test_gateway_deaths.py"),
    "tests/sched/test_controller_restart.py",
)
EXAMPLES = ("tests/core", "tests/sched", "tests/transport", "tests/devices/test_lanes.py")
"""Where most tests of hypothesis are."""
EXAMPLES_TIMES = 40
CORES = os.cpu_count() or 1


def commands(first_round: int) -> Iterator[list[str]]:
    """Yield arguments of interpreters, for ever."""
    tests = ["-m", "pytest", "-q", "-n", str(CORES), "--dist", "loadfile", "--durations=15"]
    yield [*tests, "-m", "long"]
    number = first_round
    while True:
        seeds = f"{number * SEEDS}:{(number + 1) * SEEDS}"
        simulator = ["-m", "pw.cli.main", "sim", "--profile", "all", "--seeds", seeds]
        yield [*simulator, "--jobs", str(CORES)]
        yield ["-m", "tests.fuzz", "--inputs", str(INPUTS), "--seed", str(number)]
        yield [*tests, *EXAMPLES]
        yield [*tests, "-m", "processes", *KILLS]
        number += 1


def main() -> int:
    """Run commands, one after the other. Returns the exit code of the first that fails, or 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.long")
    parser.add_argument("--hours", type=float, default=24.0, help="after which it ends")
    parser.add_argument("--round", type=int, default=1, help="the first one; it decides all seeds")
    options = parser.parse_args()
    end_s = time.monotonic() + 3600 * options.hours
    environment = os.environ | {MORE_EXAMPLES: str(EXAMPLES_TIMES)}
    for arguments in commands(options.round):
        command = [sys.executable, *arguments]
        left_s = max(1.0, end_s - time.monotonic())
        print(f"$ {shlex.join(command)}  # {left_s / 3600:.1f} h left", flush=True)
        running = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            code = running.wait(left_s)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # it ends its own processes
            running.wait()
            break
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
