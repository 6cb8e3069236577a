"""`make long`: tests that are marked `long`, libraries, other releases of JAX, then rounds.

A round has new seeds of the simulator, inputs, kills and a rough condition, which its number decides; the
first number is chosen at random. It ends when the time is over or at the first failure, and prints each
command, which repeats it. `--seeds-only` runs seeds of the simulator and nothing else, as `.ci/run` does.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.other_jax import releases
from tests.rough.conditions import conditions
from tests.stages.inherited import ROOT
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
ROUNDS = range(10**6, 10**8)
"""Numbers of first rounds. Their seeds are larger than all that `tests/sim/seeds` keeps."""
MOST_SEEDS = 10**6
"""Seeds of each profile that no time limit reaches."""
LATE_S = 300.0
"""How much later than its limit the simulator may end."""


def simulator(first_seed: int, seeds: int, *more: str) -> list[str]:
    """Return the arguments of an interpreter that runs seeds of all profiles."""
    chosen = ["--profile", "all", "--seeds", f"{first_seed}:{first_seed + seeds}"]
    return ["-m", "pw.cli.main", "sim", *chosen, "--jobs", str(CORES), *more]


def commands(first_round: int) -> Iterator[list[str]]:
    """Yield arguments of interpreters, for ever."""
    tests = ["-m", "pytest", "-q", "-n", str(CORES), "--dist", "loadfile"]
    tests += ["--max-worker-restart=0", "--durations=15"]
    yield [*tests, "-m", "long"]
    yield ["-m", "tests.libraries"]
    yield from (["-m", "tests.other_jax", release] for release in releases())
    number, rough = first_round, list(conditions(0))
    while True:
        yield simulator(number * SEEDS, SEEDS)
        yield ["-m", "tests.fuzz", "--inputs", str(INPUTS), "--seed", str(number)]
        yield [*tests, *EXAMPLES]
        yield [*tests, "-m", "processes", *KILLS]
        condition = rough[number % len(rough)]
        yield ["-m", "tests.rough", "--only", condition, "--seed", str(number)]
        number += 1


def main() -> int:
    """Run commands, one after the other. Returns the exit code of the first that fails, or 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.long")
    parser.add_argument("--hours", type=float, default=24.0, help="after which it ends")
    parser.add_argument("--minutes", type=float, default=0.0, help="the same, instead of --hours")
    parser.add_argument("--round", type=int, help="the first one; it decides all seeds")
    parser.add_argument("--seeds-only", action="store_true", help="run the simulator only")
    options = parser.parse_args()
    limit_s = 60 * options.minutes or 3600 * options.hours
    number = random.SystemRandom().choice(ROUNDS) if options.round is None else options.round
    print(f"the first round is {number}: --round {number} runs the same", flush=True)
    if options.seeds_only:
        limited = simulator(number * SEEDS, MOST_SEEDS, "--minutes", f"{limit_s / 60:g}")
        code = run(limited, limit_s + LATE_S)
        return 1 if code is None else code
    end_s = time.monotonic() + limit_s
    for arguments in commands(number):
        code = run(arguments, max(1.0, end_s - time.monotonic()))
        if code is None:
            return 0
        if code:
            return code
    return 0


def run(arguments: list[str], left_s: float) -> int | None:
    """Run an interpreter. Returns its exit code; None if the time is over, which interrupts it."""
    command = [sys.executable, *arguments]
    print(f"$ {shlex.join(command)}  # {left_s / 3600:.1f} h left", flush=True)
    environment = os.environ | {MORE_EXAMPLES: str(EXAMPLES_TIMES)}
    running = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        code = running.wait(left_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGINT)  # it ends its own processes
            running.wait()
    if code:
        print(f"failed ({code}); again: {shlex.join(command)}", flush=True)
    return code


if __name__ == "__main__":
    # SIGTERM unwinds the stack like Ctrl-C, so that the command that runs ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
