"""Training and dispatch on one GPU: plain JAX, one worker, and two workers that share it.

`python -m bench gpu`, or `python bench/gpu.py` in a bare checkout on a machine where only pw's
dependencies can be imported (and JAX's plugin for the GPU). The decoder LM trains with an Adam of our own, in
bfloat16; dispatch is a scalar addition, each on the result of the one before, one client call each (*op by
op*) or 128 to a `pw.program` (*chained*). Two workers stand beside two processes of plain JAX, which share
the GPU in the same way; one client drives both.

No contender preallocates the GPU's memory, and each may use only a share of it. With
`--platform cpu` the same runs without a GPU, to see that it does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # The folder of a script comes first, where `concurrent` is not Python's own.
    sys.path.remove(str(ROOT / "bench"))
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# Child processes are to find this checkout.
_given = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([_given] if _given else [])])

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402

import pw  # noqa: E402
from bench import machine, report  # noqa: E402
from bench.baselines.one_process import DISPATCH, PlainJax  # noqa: E402
from bench.measure import alternate, seconds  # noqa: E402
from bench.report import Bar, Result, rows  # noqa: E402
from bench.train import on_pw  # noqa: E402
from bench.training import TASKS, Trainer, farthest  # noqa: E402

WHAT = "training and dispatch on a GPU, alone and shared by two workers"
CHAIN = 128
BOUND = 0.99
TOLERANCE = 1e-2
"""How far losses may be apart, relatively: bfloat16, and sums whose order is the GPU's choice."""
READING_S = 2.0
MEMORY_FRACTION = 0.15
"""Of the GPU, for each of the six processes that are on it at once."""
FIND_GPU = "import jax; print(jax.devices('cuda')[0].device_kind)"
FIND_S = 120.0


def run(quick: bool, platform: str = "cuda") -> Result:
    """Measure on the first GPU; without one, a result that says so."""
    result = Result("gpu", WHAT)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(MEMORY_FRACTION)
    if platform == "cuda":
        # A worker wants as many devices as it was told of.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[
            0
        ]
        kind = gpu_kind()
        if kind is None:
            result.notes.append("skipped: JAX finds no GPU here")
            return result
        result.notes.append(f"on one {kind}")
    jax.config.update("jax_platforms", "cpu")  # the GPU is the workers'
    with (
        pw.LocalCluster(islands=1, platform=platform),
        ExitStack() as second,
    ):
        one = meshes(1)
        second.enter_context(pw.LocalCluster(islands=2, platform=platform))
        both = {"one worker": one, "two workers": meshes(2)}
        dispatch(result, both, platform, quick)
        train(result, both, platform, quick)
    return result


def gpu_kind() -> str | None:
    """What the first GPU is called; None if JAX finds none. This process does not touch it."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    found = subprocess.run(
        [sys.executable, "-c", FIND_GPU],
        env=environment,
        capture_output=True,
        text=True,
        timeout=FIND_S,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else None


def meshes(islands: int) -> list[pw.Mesh]:
    """One device of each island of the cluster that this process was connected to last."""
    device_set = pw.make_virtual_device_set()
    return [
        pw.Mesh(device_set.add_slice(devices=1, island=f"island-{at}").devices, ("data",))
        for at in range(islands)
    ]


def dispatch(result: Result, workers: dict[str, list[pw.Mesh]], platform: str, quick: bool) -> None:
    """Scalar additions a second, those of all workers together."""
    with (
        PlainJax(DISPATCH, 1, platform) as alone,
        PlainJax(DISPATCH, 1, platform, processes=2) as beside,
    ):
        cases = {
            "JAX": _steady(partial(alone.seconds, "op by op"), quick, 1),
            "JAX, two processes": _steady(partial(beside.seconds, "op by op"), quick, 2),
        }
        for name, on in workers.items():
            cases[f"op by op, {name}"] = _steady(_op_by_op(on), quick, len(on))
            cases[f"chained, {name}"] = _steady(_chained(on), quick, len(on))
        samples = alternate(cases, rounds=1 if quick else 5)
    result.rows += rows(samples, unit="computations/s", params={"what": "dispatch"}, baseline="JAX")


def _op_by_op(on: list[pw.Mesh]) -> Callable[[int], float]:
    adds = [pw.jit(lambda x: x + 1, mesh=mesh) for mesh in on]
    return _counting(on, adds, 1)


def _chained(on: list[pw.Mesh]) -> Callable[[int], float]:
    def chain(mesh: pw.Mesh) -> Callable[[Any], Any]:
        add = pw.jit(lambda x: x + 1, mesh=mesh)

        def adds(x: Any) -> Any:
            for _ in range(CHAIN):
                x = add(x)
            return x

        chained: Callable[[Any], Any] = pw.program(adds)
        return chained

    return _counting(on, [chain(mesh) for mesh in on], CHAIN)


def _counting(
    on: list[pw.Mesh], functions: Sequence[Callable[[Any], Any]], each: int
) -> Callable[[int], float]:
    """How long it takes to count to `count` on each mesh, with functions that add `each`; in seconds."""
    zeros = [pw.put(np.float32(0), sharding=pw.NamedSharding(mesh, P())) for mesh in on]

    def case(count: int) -> float:
        calls = -(-count // each)

        def work() -> None:
            values = zeros
            for _ in range(calls):
                values = [add(value) for add, value in zip(functions, values, strict=True)]
            assert [float(np.asarray(value)) for value in values] == [calls * each] * len(on)

        return seconds(work) * count / (calls * each)

    return case


def _steady(case: Callable[[int], float], quick: bool, times: int) -> Callable[[], float]:
    """A case with a count that takes about as long as a reading should; gives `times` its rate."""
    case(CHAIN)
    count = CHAIN if quick else max(CHAIN, round(READING_S * 4096 / case(4096)))
    return lambda: times * count / case(count)


def train(result: Result, workers: dict[str, list[pw.Mesh]], platform: str, quick: bool) -> None:
    """Tokens a second of the decoder LM, those of all workers together."""
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
    ):
        trained = {name: [on_pw(task, mesh) for mesh in on] for name, on in workers.items()}
        step_s = alone.seconds(task.name, 5) / 5
        steps = 5 if quick else max(8, round(READING_S / step_s))
        samples = alternate(
            {
                "JAX": partial(theirs, alone, 1),
                "JAX, two processes": partial(theirs, beside, 2),
                **{name: partial(ours, name) for name in trained},
            },
            rounds=1 if quick else 5,
        )
        losses = alone.losses()[0]
    params: dict[str, object] = {"what": f"train {task.name}"}
    result.rows += rows(samples, unit="tokens/s", params=params, baseline="JAX")
    for name, plain_name in (("one worker", "JAX"), ("two workers", "JAX, two processes")):
        ratio = samples[name].over(samples[plain_name]).median
        result.bars.append(Bar(f"train {task.name}: {name} / {plain_name}", ratio, BOUND))
    apart = max(
        farthest(trainer.losses, losses) for trainers in trained.values() for trainer in trainers
    )
    text = "greatest relative difference of a loss from the one of plain JAX"
    result.bars.append(Bar(text, apart, TOLERANCE, at_least=False))
    result.notes.append(
        f"{task.name}: {step_s * 1e3:.1f} ms a step in plain JAX; losses differ by up to {apart:.1e}"
    )


def main() -> None:
    """Run it alone, print the result and write gpu.json."""
    parser = argparse.ArgumentParser(description="Measure pw beside plain JAX on a GPU.")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    described = machine.describe() | {"load_before": machine.load()}
    result = run(options.quick, options.platform)
    described |= {"load_after": machine.load(), "quick": options.quick}
    report.show(result, Console(width=None if sys.stdout.isatty() else 160))
    report.write(result, described, options.out)


if __name__ == "__main__":
    main()
