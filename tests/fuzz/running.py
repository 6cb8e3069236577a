"""Gives a target its inputs, and measures what they cost."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
import traceback
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import mutation
from tests.fuzz.target import Run, Target

SEEDS = Path(__file__).parent / "seeds"

INPUT_S = 0.05
INPUT_BYTES = 64 << 20
"""The most time and memory that one input may take."""

_BATCH = 1000
_TRACED = 10
"""Of so many batches, the memory of one is measured."""


@dataclass
class Failure:
    """An input, and what is wrong with it."""

    data: bytes
    why: str
    where: str = ""
    """The last frames of its traceback: failures at one place are one."""

    @property
    def place(self) -> str:
        return self.where or self.why

    def save(self, target: Target) -> Path:
        """Write the input to the folder of the target's seeds."""
        folder = SEEDS / target.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(self.data).hexdigest()[:12]
        path.write_bytes(self.data)
        return path


@dataclass
class Report:
    """What happened in a run of a target."""

    target: str
    inputs: int = 0
    accepted: int = 0
    """Inputs that were valid, though changed."""
    seconds: float = 0.0
    """Processor time: other processes may run as well."""
    slowest_s: float = 0.0
    """Processor time of the slowest input."""
    largest_bytes: int = 0
    """The most memory that one of the measured inputs took."""
    failures: list[Failure] = field(default_factory=list)


def kept(target: Target) -> list[bytes]:
    """The inputs that have failed once."""
    return [path.read_bytes() for path in sorted((SEEDS / target.name).glob("*"))]


def fuzz(
    target: Target, inputs: int, seed: int = 0, *, measure: bool = False, most_failures: int = 1
) -> Report:
    """Run a target on its seeds, the kept inputs, and changed ones.

    Args:
        inputs: how many, at least its seeds and the kept ones.
        seed: decides all inputs.
        measure: measure memory as well, which takes longer.
        most_failures: stop after so many with different reasons.
    """
    seeds = target.seeds()
    rng = random.Random(f"{target.name} {seed}")
    changed = (target.mutate or mutation.of_bytes)(rng, seeds)
    report = Report(target.name)
    began_s = time.process_time()
    with target.open() as run:
        for data in seeds:
            run(data)  # valid: it raises nothing
        _batch(target, run, kept(target), report, measure)
        left = max(0, inputs - len(seeds) - report.inputs)
        report.inputs += len(seeds)
        for start in range(0, left, _BATCH):
            batch = [changed() for _ in range(min(_BATCH, left - start))]
            _batch(target, run, batch, report, measure and start // _BATCH % _TRACED == 0)
            if len({failure.place for failure in report.failures}) >= most_failures:
                break
    report.seconds = time.process_time() - began_s
    return report


def _batch(target: Target, run: Run, batch: list[bytes], report: Report, trace: bool) -> None:
    allowed, clock = target.allowed, time.perf_counter
    slowest_s, slowest = 0.0, b""
    if trace:
        tracemalloc.start()
    try:
        for data in batch:
            if trace:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
            began_s = clock()
            try:
                run(data)
                report.accepted += 1
            except allowed:
                pass
            except Exception as error:  # noqa: BLE001 - it is what a fuzzer looks for
                report.failures.append(_failure(data, error))
            took_s = clock() - began_s
            if took_s > slowest_s and not trace:
                slowest_s, slowest = took_s, data
            if trace:
                taken = tracemalloc.get_traced_memory()[1] - before
                if taken > report.largest_bytes:
                    report.largest_bytes = taken
                if taken > INPUT_BYTES:
                    words = f"takes more than {INPUT_BYTES >> 20} MiB"
                    report.failures.append(Failure(data, words))
    finally:
        if trace:
            tracemalloc.stop()
    report.inputs += len(batch)
    if slowest_s > max(report.slowest_s, INPUT_S / 10):
        # Other processes take the processor as well, so the time is measured again.
        slowest_s = min(_processor_s(target, run, slowest) for _ in range(3))
        if slowest_s > INPUT_S:
            report.failures.append(Failure(slowest, f"takes more than {INPUT_S} s"))
    report.slowest_s = max(report.slowest_s, slowest_s)


def _processor_s(target: Target, run: Run, data: bytes) -> float:
    began_s = time.thread_time()
    with contextlib.suppress(Exception):
        run(data)
    return time.thread_time() - began_s


def _failure(data: bytes, error: BaseException) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))
    where = f"{type(error).__name__} at {where}"
    data = getattr(error, "fuzz_input", data)
    return Failure(data, f"{where}: {str(error)[:200]}", where)
