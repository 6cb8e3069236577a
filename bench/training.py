"""A training run for both sides of a comparison: its step, its batches, its loop.

A `Task` does not know where its step runs; a process of plain JAX gets its name. `Trainer` runs any
step function that returns futures, of `jax.jit` or `pw.jit`, as a user would: it keeps a few steps
in flight and reads the loss of the oldest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bench.models import Shape, lm_init, lm_loss, t5_init, t5_loss

STEPS_IN_FLIGHT = 4
SEED = 1


class Optimizer(Protocol):
    """A gradient transformation of optax."""

    def init(self, params: Any) -> Any:
        """The first state."""

    def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The updates of the parameters, and the next state."""


class Adam:
    """Adam (Kingma and Ba, 2015), for machines without optax."""

    def __init__(self, learning_rate: float = 1e-3, b1: float = 0.9, b2: float = 0.95) -> None:
        self._rate, self._b1, self._b2 = learning_rate, b1, b2

    def init(self, params: Any) -> Any:
        """Zero moments."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"step": jnp.int32(0), "mean": zeros, "square": zeros}

    def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """One step of Adam."""
        b1, b2, step = self._b1, self._b2, state["step"] + 1
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mean"], gradients)
        square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, state["square"], gradients)
        rate = self._rate * jnp.sqrt(1 - b2**step) / (1 - b1**step)
        updates = jax.tree.map(lambda m, s: -rate * m / (jnp.sqrt(s) + 1e-8), mean, square)
        return updates, {"step": step, "mean": mean, "square": square}


def adamw() -> Optimizer:
    """The optimizer of the decoder LMs."""
    import optax

    optimizer: Optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.01)
    )
    return optimizer


def adafactor() -> Optimizer:
    """The optimizer of T5."""
    import optax

    optimizer: Optimizer = optax.adafactor(1e-2)
    return optimizer


def tokens(step: int, rows: int, length: int, vocabulary: int) -> Any:
    """The batch of a step: random walks over the vocabulary, which a model can learn."""
    draw = np.random.default_rng((SEED, step))
    walk = np.cumsum(draw.integers(1, 4, (rows, length)), axis=1)
    return ((walk + draw.integers(0, vocabulary, (rows, 1))) % vocabulary).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Task:
    """A model, the rows of a batch, and an optimizer."""

    name: str
    model: str
    shape: Shape
    rows: int
    optimizer: Callable[[], Optimizer]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch, counted as in the paper: of pairs, sources and targets."""
        return self.rows * self.shape.context * (2 if self.model == "t5" else 1)

    def batch(self, step: int) -> Any:
        """The batch of a step, int32."""
        length = 2 * self.shape.context if self.model == "t5" else self.shape.context + 1
        return tokens(step, self.rows, length, self.shape.vocabulary)

    def initial_state(self, seed: Any) -> Any:
        """The first parameters and optimizer state; the caller compiles this function."""
        init = t5_init if self.model == "t5" else lm_init
        params = init(self.shape, seed)
        return params, self.optimizer().init(params)

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One training step: the next state and the loss; the caller compiles this function."""
        loss_of = partial(t5_loss if self.model == "t5" else lm_loss, self.shape)
        loss, gradients = jax.value_and_grad(loss_of)(state[0], batch)
        return apply(self.optimizer(), state, gradients), loss


def apply(optimizer: Optimizer, state: Any, gradients: Any) -> Any:
    """The state (parameters and optimizer state) after one update."""
    params, optimizer_state = state
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    return jax.tree.map(jnp.add, params, updates), optimizer_state


class Trainer:
    """Runs training steps, each from the state after the last one.

    Args:
        step: takes the state and a batch; returns the next state and the loss, as futures.
        state: the first state.
        batch: returns the batch of a step's number.
    """

    def __init__(
        self, step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Callable[[int], Any]
    ) -> None:
        self._step, self._state, self._batch = step, state, batch
        self._in_flight: deque[Any] = deque()
        self._begun = 0
        self.losses: list[float] = []

    def run(self, steps: int) -> float:
        """Train for some steps and read their losses; returns the time in seconds."""
        begun_s = time.perf_counter()
        for _ in range(steps):
            self.begin()
        self.finish()
        return time.perf_counter() - begun_s

    def begin(self) -> None:
        """Call the next step; if enough steps are in flight, read the loss of the oldest."""
        self._state, loss = self._step(self._state, self._batch(self._begun))
        self._begun += 1
        self._in_flight.append(loss)
        if len(self._in_flight) > STEPS_IN_FLIGHT:
            self._read()

    def finish(self) -> None:
        """Read the losses of all steps in flight."""
        while self._in_flight:
            self._read()

    def _read(self) -> None:
        self.losses.append(float(np.asarray(self._in_flight.popleft())))


def farthest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference between the losses of steps that both sides have run."""
    common = min(len(ours), len(theirs))
    left, right = np.asarray(ours[:common]), np.asarray(theirs[:common])
    return float(np.max(np.abs(left - right) / np.abs(right))) if common else float("nan")


def _lm(name: str, rows: int, shape: Shape, optimizer: Callable[[], Optimizer] = adamw) -> Task:
    return Task(name, "lm", shape, rows, optimizer)


def _t5(name: str, rows: int, shape: Shape) -> Task:
    return Task(name, "t5", shape, rows, adafactor)


TASKS = {
    task.name: task
    for task in (
        _lm("lm-tiny", 4, Shape(32, 2, 1, 16)),
        _lm("lm-small", 16, Shape(128, 4, 2, 64)),
        _lm("lm-medium", 16, Shape(256, 8, 3, 64)),
        _lm("lm-long", 32, Shape(128, 4, 8, 128, recompute=True)),
        _t5("t5-tiny", 4, Shape(32, 2, 1, 16)),
        _t5("t5-small", 16, Shape(128, 4, 1, 64)),
        _t5("t5-medium", 16, Shape(256, 8, 2, 64)),
        _lm("gpu-tiny", 4, Shape(32, 2, 2, 16), Adam),
        _lm(
            "gpu-base",
            16,
            Shape(768, 12, 12, 512, vocabulary=32_000, recompute=True, dtype="bfloat16"),
            Adam,
        ),
    )
}
"""All tasks, by name."""
