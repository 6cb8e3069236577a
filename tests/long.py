"""`make long`: tests that are marked `long`, libraries, other releases of JAX, then rounds.

A round has new seeds of the simulator, inputs, kills and a rough condition, which its number decides; the
first number is chosen at random. It ends when the time is over or at the first failure, and prints each
command, which repeats it. `--seeds 20` runs so many seeds of each profile and nothing else, as `.ci/run` does.
The source of `pw` decides their numbers: a change has seeds that no other has had, the same on all machines.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from pw.testing.sim import PROFILES
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


def simulator(number: int, seeds: int, profile: str = "all") -> list[str]:
    """Return the arguments of an interpreter that runs seeds of one profile, or of all."""
    first_seed = number * SEEDS
    chosen = ["--profile", profile, "--seeds", f"{first_seed}:{first_seed + seeds}"]
    return ["-m", "pw.cli.main", "sim", *chosen, "--jobs", str(CORES)]


def round_of_source() -> int:
    """Return the number of a round that depends on the source of the package, and on nothing else."""
    source = hashlib.sha256()
    for file in sorted((ROOT / "pw").rglob("*.py")):
        source.update(file.read_bytes())
    return random.Random(source.digest()).choice(ROUNDS)


def commands(first_round: int) -> Iterator[list[str]]:
    """Yield arguments of interpreters, for ever."""
    tests = ["-m", "pytest", "-q", "-n", str(CORES), "--dist", "loadfile"]
    tests += ["--max-worker-restart=0", "--durations=15"]
    yield [*tests, "-m", "long"]
    yield ["-m", "tests.libraries"]
    yield from (["-m", "tests.other_jax", release] for release in releases())
    number, rough = first_round, list(conditions(0))
    while True:
        yield simulator(number, SEEDS)
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
    parser.add_argument("--round", type=int, help="the first one; it decides all seeds")
    parser.add_argument("--seeds", type=int, help="run so many seeds of each profile, and no more")
    options = parser.parse_args()
    number, limit_s = options.round, 3600 * options.hours
    if options.seeds:
        number = round_of_source() if number is None else number
        for name in PROFILES:
            code = run(simulator(number, options.seeds, name), limit_s)
            if code != 0:
                return code or 1
        return 0
    number = random.SystemRandom().choice(ROUNDS) if number is None else number
    print(f"the first round is {number}: --round {number} runs the same", flush=True)
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
