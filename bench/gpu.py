"""Training, calls and transfers on one GPU: plain JAX, one worker, two workers that share it, and more.

It says first which parts it has and how long each may take, in all less than five minutes, and prints each
part as it ends. A part that takes longer is left out. `--part put` measures one of them.

Run it with `python -m bench gpu`, or with `python bench/gpu.py` in a bare checkout, where only pw's
dependencies and JAX's GPU plugin are installed. The decoder LM trains in bfloat16 with
`training.Adam`. Dispatch is a scalar addition to the result of the last one, with one client call
each (*op by op*) or 128 to a `pw.program` (*chained*). Two workers are compared with two processes
of plain JAX, which share the GPU in the same way; one client uses both workers. *Blocking* calls
wait for every result. The session without a cluster (*embedded*) and plain JAX through the gateway
(*gateway*) call too, and the gateway trains.

*Group* has one process form a group of its own with JAX's plugin, add, and leave, and another one form
the next: what an island of several hosts does, as far as one GPU allows.

No contender preallocates the GPU's memory, and each may use only a part of it. With
`--platform cpu` the benchmark runs without a GPU, as a check of itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Python searches the folder of a script first, and its `concurrent` hides Python's own.
    sys.path.remove(str(ROOT / "bench"))
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# Child processes search this checkout too.
_given = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([_given] if _given else [])])

import asyncio  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402

import pw  # noqa: E402
from bench.__main__ import console, run_and_write  # noqa: E402
from bench.baselines import group_of_one, two_ways  # noqa: E402
from bench.baselines.one_process import DISPATCH, GATEWAY, ONE_WAY, PlainJax  # noqa: E402
from bench.baselines.peer import environment  # noqa: E402
from bench.baselines.steps import local  # noqa: E402
from bench.baselines.two_ways import BLOCKING, CHAIN, THERE_AND_BACK  # noqa: E402
from bench.measure import GaveUp, Sample, alternate, seconds, sized, timed  # noqa: E402
from bench.placement import chain, new_mesh, put  # noqa: E402
from bench.report import RESULTS, Result, show  # noqa: E402
from bench.train import on_pw  # noqa: E402
from bench.training import TASKS, Trainer, farthest  # noqa: E402
from pw.devices.jax.coordination_service import CoordinationServices  # noqa: E402

WHAT = "training, calls and transfers on a GPU, alone and shared by two workers"
CHAINED = 128
BOUND = 0.99
TOLERANCE = 1e-2
"""The largest relative difference of losses: bfloat16, and the GPU chooses the order of sums."""
READING_S = 1.0
ROUNDS = 3
SIZE_BYTES = 256 << 20
"""The array that is put and read."""
MEMORY_FRACTION = 0.15
"""The part of the GPU for each of the processes that use it at once, of which there are six."""
FIND_GPU = "import jax; print(jax.devices('cuda')[0].device_kind)"
FIND_S = 120.0


class Workers:
    """The clusters that parts use, each started when it is used first."""

    def __init__(self, platform: str, gpu: str, clusters: ExitStack) -> None:
        self._platform, self._gpu, self._clusters = platform, gpu, clusters
        self._start = cache(self._started)

    def _started(self, islands: int) -> tuple[str, list[pw.Mesh]]:
        # A cluster gives each worker GPUs of its own: here all have the same.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([self._gpu] * islands)
        try:
            local = pw.LocalCluster(islands=islands, platform=self._platform)
        finally:
            os.environ["CUDA_VISIBLE_DEVICES"] = self._gpu
        cluster = self._clusters.enter_context(local)
        return cluster.address, [new_mesh(island=f"island-{at}") for at in range(islands)]

    @property
    def address(self) -> str:
        """The address of the cluster of one worker."""
        return self._start(1)[0]

    @property
    def mesh(self) -> pw.Mesh:
        """The mesh of the only worker of a cluster."""
        return self._start(1)[1][0]

    @cached_property
    def both(self) -> dict[str, list[pw.Mesh]]:
        """The meshes of one worker, and of two that share the GPU."""
        return {"one worker": self._start(1)[1], "two workers": self._start(2)[1]}


def run(quick: bool, platform: str = "cuda", part: str = "") -> Result:
    """Measure on the first GPU, one part or all; without a GPU, the result has a note and no rows."""
    result = Result(f"gpu-{part}" if part else "gpu", WHAT)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(MEMORY_FRACTION)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # a worker has one device, and must see no other
    if platform == "cuda":
        kind = gpu_kind()
        if kind is None:
            result.notes.append("skipped: JAX finds no GPU here")
            return result
        result.notes.append(f"on one {kind}")
    jax.config.update("jax_platforms", "cpu")  # only the workers use the GPU
    parts = {part: Part(PARTS[part].measure, ALONE_S)} if part else PARTS
    limits = ", ".join(f"{name} {own.limit_s} s" for name, own in parts.items())
    console.print(f"at most {sum(own.limit_s for own in parts.values())} s: {limits}")
    with ExitStack() as clusters:
        workers = Workers(platform, gpu, clusters)
        for name, (measure, limit_s) in parts.items():
            one = Result(f"gpu, {name}", WHAT)
            begun_s = time.monotonic()
            try:
                with bounded(limit_s):
                    measure(one, workers, platform, quick)
            except GaveUp as error:
                one.notes.append(f"{name} was left out: {error}")
            one.notes.append(f"{name} took {time.monotonic() - begun_s:.0f} s")
            if not part:
                show(one, console)
            result.rows += one.rows
            result.bars += one.bars
            result.notes += one.notes
    return result


@contextmanager
def bounded(limit_s: int) -> Iterator[None]:
    """Raise GaveUp in the block when the time is over."""

    def end(*_: object) -> None:
        raise GaveUp(f"not within {limit_s} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def gpu_kind() -> str | None:
    """The name of the first GPU; None if JAX finds none. A child process looks for it."""
    found = subprocess.run(
        [sys.executable, "-c", FIND_GPU],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=FIND_S,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else None


def move(what: str, result: Result, workers: Workers, platform: str, quick: bool) -> None:
    """Add rows: arrays a second that are put, or read after a computation."""
    size_bytes = 4 << 20 if quick else SIZE_BYTES
    mesh = workers.mesh
    ours = two_ways.one_way(pw.jit(local, mesh=mesh), partial(put, mesh=mesh), size_bytes)[what]
    with PlainJax(f"{ONE_WAY}{size_bytes}", 1, platform) as plain:
        cases = {"JAX": plain.timed(what), "one worker": ours}
        samples = _samples(cases, quick)
    unit = f"times {size_bytes >> 20} MiB/s"
    result.compare(samples, unit=unit, params={"what": what}, baseline="JAX")


def group(result: Result, _: Workers, platform: str, quick: bool) -> None:
    """Add rows: seconds until a new process has formed a group of its own and added; then the next one."""
    loop = asyncio.new_event_loop()
    services = CoordinationServices(loop)
    try:
        for epoch, name in ((1, "formed"), (2, "left, and formed again")):
            answer: asyncio.Future[tuple[str | None, str | None]] = loop.create_future()
            services.start("bench", epoch, 1, lambda *done, of=answer: of.set_result(done))
            address, error = loop.run_until_complete(asyncio.wait_for(answer, FIND_S))
            if address is None:
                raise GaveUp(str(error))
            begun_s = time.perf_counter()
            with group_of_one.start(address, epoch, platform) as member:
                took_s = time.perf_counter() - begun_s
                member.seconds(group_of_one.SUM, 1)
            result.add(name, {"what": "group"}, Sample((took_s,)), "s")
    finally:
        services.close()
        loop.close()


def _samples(cases: dict[str, Callable[[int], float]], quick: bool) -> dict[str, Sample]:
    reading_s = 0.05 if quick else READING_S
    readings = {name: sized(case, reading_s=reading_s) for name, case in cases.items()}
    return alternate(readings, rounds=1 if quick else ROUNDS)


def dispatch(result: Result, workers: Workers, platform: str, quick: bool) -> None:
    """Add rows: scalar additions a second of all workers together."""
    with (
        PlainJax(DISPATCH, 1, platform) as alone,
        PlainJax(DISPATCH, 1, platform, processes=2) as beside,
    ):

        def case(timed: Callable[[int], float], workers: int, at_once: int) -> Any:
            rate = sized(timed, reading_s=0.05 if quick else READING_S, multiple_of=at_once)
            return lambda: workers * rate()

        cases = {
            "JAX": case(alone.timed(CHAIN), 1, 1),
            "JAX, two processes": case(beside.timed(CHAIN), 2, 1),
        }
        for name, on in workers.both.items():
            for way, at_once in (("op by op", 1), ("chained", CHAINED)):
                cases[f"{way}, {name}"] = case(timed(_counting(on, at_once)), len(on), at_once)
        samples = alternate(cases, rounds=1 if quick else ROUNDS)
    params = {"what": "dispatch"}
    result.compare(samples, unit="computations/s", params=params, baseline="JAX")


def waiting(result: Result, workers: Workers, platform: str, quick: bool) -> None:
    """Add rows: calls that wait for every result, and transfers there and back, a second."""
    mesh = workers.mesh
    add, zero = pw.jit(local, mesh=mesh), put(np.float32(0), mesh)
    ours = two_ways.in_common(add, zero, partial(put, mesh=mesh))
    with (
        PlainJax(DISPATCH, 1, platform) as plain,
        PlainJax(DISPATCH, 1, GATEWAY, address=workers.address) as gateway,
        two_ways.start(two_ways.JIT) as embedded,
    ):
        for what, unit in ((BLOCKING, "calls/s"), (THERE_AND_BACK, "times 64 MiB/s")):
            contenders = {
                "JAX": plain.timed(what),
                "one worker": timed(ours[what]),
                "embedded": embedded.timed(what),
                "gateway, one worker": gateway.timed(what),
            }
            samples = _samples(contenders, quick)
            result.compare(samples, unit=unit, params={"what": what}, baseline="JAX")


def _counting(on: list[pw.Mesh], at_once: int) -> Callable[[int], None]:
    """Work that counts to `count` on each mesh, with `at_once` additions a call."""
    adds = [pw.jit(local, mesh=mesh) for mesh in on]
    functions = adds if at_once == 1 else [chain([add] * at_once) for add in adds]
    zeros = [put(np.float32(0), mesh) for mesh in on]

    def work(count: int) -> None:
        calls = -(-count // at_once)
        values = zeros
        for _ in range(calls):
            values = [add(value) for add, value in zip(functions, values, strict=True)]
        assert [float(np.asarray(value)) for value in values] == [calls * at_once] * len(on)

    return work


def train(result: Result, workers: Workers, platform: str, quick: bool) -> None:
    """Add rows: tokens a second of the decoder LM on all workers together."""
    task = TASKS["gpu-tiny" if quick or platform == "cpu" else "gpu-base"]

    def together(trainers: list[Trainer]) -> None:
        for _ in range(steps):
            for trainer in trainers:
                trainer.begin()
        for trainer in trainers:
            trainer.finish()

    def ours(name: str) -> float:
        took_s = seconds(lambda: together(trained[name]))
        return len(trained[name]) * steps * task.tokens_per_step / took_s

    def theirs(plain: PlainJax, processes: int) -> float:
        return processes * steps * task.tokens_per_step / plain.seconds(task.name, steps)

    with (
        PlainJax(task.name, 1, platform) as alone,
        PlainJax(task.name, 1, platform, processes=2) as beside,
        PlainJax(task.name, 1, GATEWAY, address=workers.address) as gateway,
    ):
        trained = {name: [on_pw(task, mesh) for mesh in on] for name, on in workers.both.items()}
        step_s = alone.seconds(task.name, 5) / 5
        steps = 5 if quick else max(8, round(READING_S / step_s))
        samples = alternate(
            {
                "JAX": partial(theirs, alone, 1),
                "JAX, two processes": partial(theirs, beside, 2),
                **{name: partial(ours, name) for name in trained},
                "gateway, one worker": partial(theirs, gateway, 1),
            },
            rounds=1 if quick else ROUNDS,
        )
        losses = alone.losses()[0]
    params = {"what": f"train {task.name}"}
    result.compare(samples, unit="tokens/s", params=params, baseline="JAX")
    for name, plain_name in (("one worker", "JAX"), ("two workers", "JAX, two processes")):
        ratio = samples[name].over(samples[plain_name]).median
        result.at_least(BOUND, ratio, f"train {task.name}: {name} / {plain_name}")
    apart = max(
        farthest(trainer.losses, losses) for trainers in trained.values() for trainer in trainers
    )
    text = "largest relative difference of a loss from that of plain JAX"
    result.at_most(TOLERANCE, apart, text)
    result.notes.append(
        f"{task.name}: {step_s * 1e3:.1f} ms a step in plain JAX; losses differ by {apart:.1e}"
    )


class Part(NamedTuple):
    """A part of the benchmark."""

    measure: Callable[[Result, Workers, str, bool], None]
    limit_s: int


PARTS = {
    "group": Part(group, 30),
    two_ways.PUT: Part(partial(move, two_ways.PUT), 35),
    two_ways.READ: Part(partial(move, two_ways.READ), 25),
    "waiting": Part(waiting, 60),
    "dispatch": Part(dispatch, 50),
    "train": Part(train, 95),
}
"""In this order; the limits are seconds, with the start of what a part is the first to use."""
ALONE_S = 120
"""The limit of a part that is measured alone, and starts all that it uses."""


def main() -> None:
    """Run it alone, print the result and write gpu.json, or gpu-PART.json."""
    parser = argparse.ArgumentParser(description="Measure pw beside plain JAX on a GPU.")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=PARTS, default="", help="by default all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    measured = partial(run, platform=options.platform, part=options.part)
    run_and_write(measured, quick=options.quick, out=options.out)


if __name__ == "__main__":
    main()
