"""Trains on two islands, goes on with one when the other is lost for good, and grows again when it is back.

Run it: `python -m examples.elastic`. It starts a cluster of two islands, kills the host of one in the midst of
the training, and starts it again. Then it trains once more without losses, is told when to use which islands,
and compares the losses bit for bit.

A loss that the cluster repairs in time is a pause, which the loop does not notice. Only then an island is given
up: what waited for it raises `pw.IslandLost` or `pw.ArrayLost`. The loop goes back to its last checkpoint, of
which each island has all parameters: one `pw.put` moves them to a mesh of the islands that are left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw

STEPS, ROWS, WIDTH = 60, 64, 32
STEPS_BETWEEN_CHECKPOINTS = 4
KILL_AT, RESTART_AT = 10, 20
"""Steps before which a host is killed, and started again."""
PATIENCE_S = 2.0
"""Seconds that a step waits for a lost island."""
BATCH = P(("island", "data"))
"""Rows are split over all devices, of however many islands."""


class Islands:
    """The islands that a training may use: those that are ready, or were lost and may return in time."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._names: set[str] = set()
        self._events = pw.on_island_event(self._heard)
        self.wait_for(count)

    def _heard(self, event: pw.IslandEvent) -> None:
        """Take an event; called in a thread of its own."""
        print(f"  {event.island} {event.what.replace('_', ' ')}, epoch {event.epoch}")
        with self._changed:
            if event.is_ready:
                self._names.add(event.island)
            elif event.what == "given_up":
                self._names.discard(event.island)
            self._changed.notify_all()

    def wait_for(self, count: int) -> tuple[str, ...]:
        """Wait until there are so many, and return their names."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._names) == count, 60.0)
            return tuple(sorted(self._names))

    def now(self) -> tuple[str, ...]:
        """Return their names."""
        with self._changed:
            return tuple(sorted(self._names))

    def close(self) -> None:
        """Hear no more events."""
        self._events.close()


def initial() -> Any:
    """The first parameters: three layers."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [np.asarray(jax.random.normal(key, (WIDTH, WIDTH)) / np.sqrt(WIDTH)) for key in keys]


def batch(step: int) -> tuple[Any, Any]:
    """The rows of a step, and what the model shall make of them."""
    x = np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return x, np.roll(x, 1, axis=1)


def train(params: Any, x: Any, y: Any) -> Any:
    """One step of gradient descent; nothing in it says how many islands there are."""

    def loss(params: Any) -> Any:
        hidden = x
        for weights in params[:-1]:
            hidden = jnp.tanh(hidden @ weights)
        return jnp.mean((hidden @ params[-1] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients), value


class Trainer:
    """Parameters, and the islands on which they are trained."""

    def __init__(self, slices: dict[str, Any]) -> None:
        self._slices = slices
        self.params = initial()
        self.islands: tuple[str, ...] = ()

    def use(self, islands: tuple[str, ...], params: Any = None) -> None:
        """Train on these islands from now on; the parameters, or `params` in their place, move there."""
        devices = np.array([self._slices[island].devices for island in islands])
        mesh = pw.Mesh(devices, ("island", "data"))
        moved = self.params if params is None else params
        self.params = pw.put(moved, pw.NamedSharding(mesh, P()))
        self._step = pw.jit(train, mesh=mesh, in_shardings=(None, BATCH, BATCH))
        self.islands = islands

    def step(self, number: int) -> float:
        """Train one step, and return its loss."""
        self.params, loss = self._step(self.params, *batch(number))
        return float(loss)


def elastic(
    slices: dict[str, Any], islands: Islands, before: Callable[[int], None]
) -> tuple[list[float], dict[int, tuple[str, ...]]]:
    """Train on the islands that there are; return the losses, and the islands from which step on."""
    trainer, losses, plan = Trainer(slices), [], {}
    saved, saved_at = trainer.params, 0
    while len(losses) < STEPS:
        step = len(losses)
        before(step)
        try:
            if is_change := trainer.islands != islands.now():
                trainer.use(islands.now())
                plan[step] = trainer.islands
                print(f"step {step}: trains on {', '.join(trainer.islands)}")
            if is_change or step % STEPS_BETWEEN_CHECKPOINTS == 0:
                pw.checkpoint(trainer.params).result()
                saved, saved_at = trainer.params, step
            losses.append(trainer.step(step))
        except (pw.IslandLost, pw.ArrayLost):
            left = islands.wait_for(len(trainer.islands) - 1)
            trainer.use(left, saved)
            plan = {at: names for at, names in plan.items() if at < saved_at}
            plan[saved_at] = left
            del losses[saved_at:]
            print(f"step {step} failed; from {saved_at} on: trains on {', '.join(left)}")
    return losses, plan


def told(slices: dict[str, Any], plan: dict[int, tuple[str, ...]]) -> list[float]:
    """Train without losses on the islands of a plan; return the losses."""
    trainer, losses = Trainer(slices), []
    for step in range(STEPS):
        if step in plan:
            trainer.use(plan[step])
        losses.append(trainer.step(step))
    return losses


def main() -> None:
    """Train through a loss, then without one, and compare."""
    with (
        pw.LocalCluster(2, devices_per_host=2, connect=False) as cluster,
        pw.connect(cluster.address, recovery_timeout=PATIENCE_S),
    ):
        islands = Islands(2)
        devices = pw.make_virtual_device_set()
        slices = {name: devices.add_slice(devices=2, island=name) for name in islands.now()}
        host = cluster.hosts[-1]

        def before(step: int) -> None:
            if step == KILL_AT and host.exit_code() is None:
                host.kill()
            if step == RESTART_AT:
                host.restart()
            if step == (RESTART_AT + STEPS) // 2:  # this training is over before an island begins
                islands.wait_for(2)

        losses, plan = elastic(slices, islands, before)
        islands.close()
        expected = told(slices, plan)
    counts = [len(names) for names in plan.values()]
    alike = losses == expected
    print(
        f"loss {losses[0]:.4f}, then {losses[-1]:.4f}, on {counts} islands; all {STEPS} losses are"
    )
    print("the same, bit for bit" if alike else "NOT the same")
    if not alike or counts != [2, 1, 2]:
        sys.exit(1)


if __name__ == "__main__":
    main()
