"""The training loop, as a user would write it.

Every step donates its states, steps are dispatched ahead of their losses, and this process sends
the batches. Only the checkpoint is there because of failures: the runtime replays lost work from
it, and the loop does not notice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

import pw
from examples.train_lm.corpus import Batch
from examples.train_lm.model import Params
from examples.train_lm.pipeline import rows

STEPS_IN_FLIGHT = 4
STEPS_BETWEEN_CHECKPOINTS = 8


class Watcher:
    """Follows a training; this one does nothing."""

    def dispatched(self, step: int) -> None:
        """A step was enqueued."""

    def checkpointed(self, step: int) -> None:
        """A checkpoint of the state after a step was requested."""

    def finished(self, step: int, loss: float) -> None:
        """The loss of a step was read."""


def train(
    pipeline: pw.Pipeline,
    params: tuple[Params, Params],
    batches: Callable[[int], Batch],
    steps: int,
    watcher: Watcher,
) -> list[float]:
    """Trains from these parameters; returns the loss of every step."""
    losses: list[float] = []
    in_flight: deque[Any] = deque()

    def read_oldest() -> None:
        losses.append(float(np.asarray(in_flight.popleft())))
        watcher.finished(len(losses) - 1, losses[-1])

    state = pipeline.init(params)
    for step in range(steps):
        state, loss = pipeline(state, *rows(batches(step)))
        in_flight.append(loss)
        watcher.dispatched(step)
        if step % STEPS_BETWEEN_CHECKPOINTS == 0:
            pw.checkpoint(state)
            watcher.checkpointed(step)
        if len(in_flight) > STEPS_IN_FLIGHT:
            read_oldest()
    while in_flight:
        read_oldest()
    return losses
