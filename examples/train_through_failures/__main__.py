"""The command: one cluster with a spare host, the same training twice, without and with kills.

With two islands the model is a pipeline over them. With one island, both stages share its hosts.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console

import pw
from examples.train_lm.corpus import Batch, Corpus
from examples.train_lm.model import ModelConfig, OptimizerConfig, init_params
from examples.train_lm.pipeline import build_pipeline
from examples.train_through_failures.chaos import Chaos, Kill
from examples.train_through_failures.training import Watcher, train

MODEL = ModelConfig(width=64, heads=2, blocks=2, context=32)
MICRO_BATCHES = 2
ROWS = 8


def main(
    islands: Annotated[int, typer.Option(min=1, max=2, help="Islands of the cluster.")] = 2,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of each island.")] = 1,
    spares: Annotated[int, typer.Option(min=0, help="Hosts that can replace a lost host.")] = 1,
    steps: Annotated[int, typer.Option(min=4, help="Steps to train, each time.")] = 200,
    kills: Annotated[int, typer.Option(min=0, help="Hosts to kill.")] = 6,
    seed: Annotated[int, typer.Option(help="Decides the kills.")] = 0,
    log_level: Annotated[str, typer.Option(help="Log level of the cluster.")] = "error",
) -> None:
    """Trains a small language model while its hosts are killed, and compares the losses."""
    console = Console(soft_wrap=True, highlight=False)
    corpus = Corpus.standard_library()
    optimizer = OptimizerConfig()

    def batches(step: int) -> Batch:
        return corpus.training_batch(
            seed=0, step=step, micro_batches=MICRO_BATCHES, rows=ROWS, context=MODEL.context
        )

    params = init_params(MODEL, 0)
    with pw.LocalCluster(islands, hosts, spare_hosts=spares, log_level=log_level) as cluster:
        pipeline = build_pipeline(
            MODEL, optimizer, ("island-0", f"island-{islands - 1}"), hosts, MICRO_BATCHES
        )
        begun_s = time.monotonic()
        expected = train(pipeline, params, batches, steps, Watcher())
        took_s = time.monotonic() - begun_s
        console.print(
            f"without kills: {steps} steps in {took_s:.1f} s, final loss {expected[-1]!r}"
        )

        def report(kill: Kill) -> None:
            console.print(f"  {kill}")

        chaos = Chaos(cluster, islands * hosts, steps, kills, seed, report)
        begun_s = time.monotonic()
        try:
            losses = train(pipeline, params, batches, steps, chaos)
        finally:
            chaos.end()
        took_s = time.monotonic() - begun_s
        console.print(f"with kills: {steps} steps in {took_s:.1f} s, final loss {losses[-1]!r}")
    recoveries = [kill.recovery_s for kill in chaos.kills if kill.recovery_s is not None]
    longest_s = max(recoveries, default=0.0)
    alike = losses == expected
    console.print(
        f"{len(chaos.kills)} kills, the longest recovery {longest_s:.1f} s; all {steps} losses are "
        f"{'the same, bit for bit' if alike else 'NOT the same'}"
    )
    if not alike:
        sys.exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
