"""The command: the paper's program and a language model, on a cluster of two islands on this machine.

With PW_ADDRESS it runs on that cluster, which needs two islands with two devices each.

The loop keeps a few steps in flight and reads the loss of the oldest, so the islands never wait for
this process. The reference and the sampling run in this process with plain JAX, after the cluster
has stopped, because they would use the same cores.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import pw
from examples.train_lm import reference
from examples.train_lm.corpus import Batch, Corpus
from examples.train_lm.model import ModelConfig, OptimizerConfig, Params, count_params, init_params
from examples.train_lm.pipeline import build_pipeline, rows
from examples.train_lm.report import TrainingProgress

ISLANDS = 2
HOSTS_PER_ISLAND = 2
PATIENCE_S = 10.0
"""How long to wait for the islands of PW_ADDRESS."""
MICRO_BATCHES = 4
ROWS = 8
"""Rows of a micro-batch, divided among the hosts of an island."""
STEPS_IN_FLIGHT = 4
CHECKED_STEPS = 5
CHECK_TOLERANCE = 1e-4
LOSS_GOAL = 3.0
FINAL_STEPS = 10
"""The final loss is the mean over this many steps, since one loss is noisy."""
PROMPT = b"def "
QUICKSTART = Path(__file__).parent.parent / "quickstart.py"


@dataclass(frozen=True, slots=True)
class Trained:
    """The results of a training run, without its cluster."""

    losses: list[float]
    params: tuple[Params, Params]
    stats: Mapping[str, Any]

    def final_loss(self) -> float:
        """The mean loss of the last steps, in nats a byte."""
        return float(np.mean(self.losses[-FINAL_STEPS:]))


def train(
    pipeline: pw.Pipeline,
    params: tuple[Params, Params],
    batches: Callable[[int], Batch],
    progress: TrainingProgress,
    *,
    steps: int | None,
    deadline_s: float,
) -> tuple[list[float], tuple[Params, Params]]:
    """Trains for `steps` steps, or until time.monotonic() reaches `deadline_s`.

    Returns the loss of every step and the last parameters, which are on their islands.
    """
    losses: list[float] = []
    in_flight: deque[Any] = deque()

    def read_oldest() -> None:
        losses.append(float(np.asarray(in_flight.popleft())))
        progress.step_done(len(losses) - 1, losses[-1])

    state = pipeline.init(params)
    step = 0
    while step < steps if steps is not None else time.monotonic() < deadline_s:
        state, loss = pipeline(state, *rows(batches(step)))
        in_flight.append(loss)
        step += 1
        if len(in_flight) > STEPS_IN_FLIGHT:
            read_oldest()
    while in_flight:
        read_oldest()
    return losses, pipeline.params(state)


def islands_that_fit() -> tuple[str, str]:
    """The names of two islands with devices for a stage each. Raises SystemExit if there are none soon."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        status = pw.status()
        fits = [
            island.name
            for island in status.islands
            if island.state == "ready"
            and sum(host.devices for host in island.hosts) >= HOSTS_PER_ISLAND
        ]
        if len(fits) >= ISLANDS:
            return fits[0], fits[1]
        if time.monotonic() > until_s:
            sys.exit(
                f"the cluster at {status.address} has {len(fits)} islands with {HOSTS_PER_ISLAND} devices; "
                f"this needs {ISLANDS}: start more with pw-worker --devices {HOSTS_PER_ISLAND}, or unset "
                "PW_ADDRESS"
            )
        time.sleep(0.2)


def run_on_cluster(
    console: Console,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    params: tuple[Params, Params],
    batches: Callable[[int], Batch],
    *,
    steps: int | None,
    deadline_s: float,
) -> Trained:
    """Runs the quickstart and the training on a cluster, and fetches the results."""
    started_s = time.monotonic()
    cluster: Any = contextlib.nullcontext()
    if not os.environ.get("PW_ADDRESS"):
        cluster = pw.LocalCluster(ISLANDS, HOSTS_PER_ISLAND, devices_per_host=1)
    with cluster:
        islands = islands_that_fit()
        console.print(
            f"{' and '.join(islands)}, of {HOSTS_PER_ISLAND} devices each, are up "
            f"after {time.monotonic() - started_s:.1f} s"
        )
        console.print("\n[bold]The paper's program[/bold] (examples/quickstart.py)")
        runpy.run_path(str(QUICKSTART))

        console.print("\n[bold]A language model[/bold] over two islands, one step as scheduled:")
        pipeline = build_pipeline(model, optimizer, islands, HOSTS_PER_ISLAND, MICRO_BATCHES)
        console.print(str(pipeline.schedule), highlight=False, markup=False)
        console.print("  (F forward, B backward, U update; a group is an island)\n")
        with TrainingProgress(
            console,
            steps=steps,
            seconds=max(deadline_s - time.monotonic(), 1.0),
            step_tokens=MICRO_BATCHES * ROWS * model.context,
        ) as progress:
            losses, trained = train(
                pipeline, params, batches, progress, steps=steps, deadline_s=deadline_s
            )
        console.print(
            f"{len(losses)} steps, loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last, "
            f"{progress.tokens_per_s:,.0f} tokens/s"
        )
        return Trained(losses=losses, params=pw.get(trained), stats=pw.stats())


def largest_relative_difference(measured: list[float], expected: list[float]) -> float:
    """The largest difference between two lists of losses, relative to the expected ones."""
    return max(abs(m - e) / abs(e) for m, e in zip(measured, expected, strict=True))


def main(
    seconds: Annotated[
        float,
        typer.Option(
            help="Stop after so many seconds, counted from the start; ignored with --steps."
        ),
    ] = 55.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train for so many steps instead.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of parameters, batches and the sample.")] = 0,
) -> None:
    """Trains a byte-level language model on Python's own source text, over two islands."""
    deadline_s = time.monotonic() + seconds
    console = Console(soft_wrap=True)
    model, optimizer = ModelConfig(), OptimizerConfig()
    corpus = Corpus.standard_library()
    params = init_params(model, seed)

    def batches(step: int) -> Batch:
        return corpus.training_batch(
            seed=seed, step=step, micro_batches=MICRO_BATCHES, rows=ROWS, context=model.context
        )

    console.print(
        f"corpus: {len(corpus.training) / 1e6:.1f} MB of Python in {corpus.file_count} files; "
        f"model: {count_params(*params):,} parameters"
    )

    trained = run_on_cluster(
        console, model, optimizer, params, batches, steps=steps, deadline_s=deadline_s
    )

    final_loss = trained.final_loss()
    held_out = reference.held_out_loss(model, trained.params, corpus)
    console.print(f"held-out text: {held_out:.2f} nats/byte (a uniform guess: {np.log(256):.2f})")
    sample = reference.generate(model, trained.params, prompt=PROMPT, size_bytes=200, seed=seed)
    console.print(Panel(Text(sample.decode("utf-8", "replace")), title="a sample", width=90))

    checked = trained.losses[:CHECKED_STEPS]
    expected = reference.train(
        model, optimizer, params, [batches(step) for step in range(len(checked))]
    )
    difference = largest_relative_difference(checked, expected)
    agrees = difference < CHECK_TOLERANCE
    learned = final_loss < LOSS_GOAL
    console.print(
        f"check against plain JAX on one device: the first {len(checked)} losses differ by at most "
        f"{difference:.1e} (relative): {'ok' if agrees else f'FAILED, allowed {CHECK_TOLERANCE}'}"
    )
    console.print(
        f"final loss {final_loss:.2f} nats/byte, goal below {LOSS_GOAL}: "
        f"{'ok' if learned else 'FAILED'}"
    )
    controller = trained.stats["controller"]
    between_hosts = sum(
        counters["bulk_sent_bytes"]
        for node, counters in trained.stats.items()
        if node not in ("controller", "client")
    )
    console.print(
        f"pw.stats(): {between_hosts / 1e6:,.0f} MB sent by hosts on the bulk plane, "
        f"{controller['bulk_sent_bytes'] + controller['bulk_received_bytes']} bytes of them through "
        f"the controller, which launched {controller['launches']:,} gangs",
        highlight=False,
    )
    if not (agrees and learned):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
