"""The training loop: what a user writes.

States are donated to every step, steps are dispatched ahead of their losses, batches come from this
process. The one line that is there for the sake of failures is the checkpoint: the runtime repeats from
there what a lost host takes with it, and the loop never hears of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import pw
from examples.train_lm.corpus import Batch
from examples.train_lm.pipeline import Pipeline

STEPS_IN_FLIGHT = 4
STEPS_BETWEEN_CHECKPOINTS = 8


class Watcher(Protocol):
    """Who looks on; for the example's sake."""

    def dispatched(self, step: int) -> None:
        """This step will be run."""

    def checkpointed(self, step: int) -> None:
        """The state after this step is on its way to safety."""

    def finished(self, step: int, loss: float) -> None:
        """This step's loss is here."""


def train(
    pipeline: Pipeline,
    states: tuple[Any, Any],
    batches: Callable[[int], Batch],
    steps: int,
    watcher: Watcher,
) -> list[float]:
    """Trains from the given states and returns the loss of every step."""
    losses: list[float] = []
    in_flight: deque[Any] = deque()

    def read_oldest() -> None:
        losses.append(float(np.asarray(in_flight.popleft())))
        watcher.finished(len(losses) - 1, losses[-1])

    stage0, stage1 = pipeline.put_states(states)
    for step in range(steps):
        stage0, stage1, loss = pipeline.train_step(
            stage0, stage1, pipeline.put_batch(batches(step))
        )
        in_flight.append(loss)
        watcher.dispatched(step)
        if step % STEPS_BETWEEN_CHECKPOINTS == 0:
            pw.checkpoint((stage0, stage1))
            watcher.checkpointed(step)
        if len(in_flight) > STEPS_IN_FLIGHT:
            read_oldest()
    while in_flight:
        read_oldest()
    return losses
