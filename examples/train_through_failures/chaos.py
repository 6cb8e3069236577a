"""Kills hosts of a local cluster at random, and measures how long each recovery takes.

A kill is SIGKILL to the runtime of a host, like a crash, or also to its supervisor, like a machine
that loses its power. A killed supervisor never comes back, so this happens only while there is a
spare host. A seed decides the host and the time of each kill. Some kills wait for the next
checkpoint, and some hit a cluster that still recovers from the last kill.

A recovery lasts from the kill until the loss of a step arrives that was dispatched after the kill.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pw
from examples.train_through_failures.training import Watcher

LONGEST_DELAY_S = 0.4


@dataclass(slots=True)
class Kill:
    """One kill and its recovery."""

    what: str
    when: str
    step: int
    """The next step to be dispatched."""
    at_s: float
    recovery_s: float | None = None

    def __str__(self) -> str:
        outcome = "" if self.recovery_s is None else f": recovered in {self.recovery_s:.1f} s"
        return f"{self.what} killed {self.when}, before step {self.step}{outcome}"


class Chaos(Watcher):
    """A thread that kills hosts while `train` runs; as a watcher it follows the steps.

    Args:
        cluster: the cluster of the hosts.
        needed: the number of hosts with a place in an island; the others are spares.
        steps: the steps of the training.
        kills: the number of kills, spread over the steps.
        seed: decides all kills.
        report: called with every kill, and again after its recovery.
    """

    def __init__(
        self,
        cluster: pw.LocalCluster,
        needed: int,
        steps: int,
        kills: int,
        seed: int,
        report: Callable[[Kill], None],
    ) -> None:
        self._hosts = {host.name: host for host in cluster.hosts}
        self._needed = needed
        self._draw = random.Random(seed)
        self._report = report
        self._changed = threading.Condition()
        self._next_step = 0
        self._checkpoints = 0
        self._over = False
        self._recovering: list[Kill] = []
        self.kills: list[Kill] = []
        stretch = 0.8 * steps / max(kills, 1)
        self._plan = [1 + int(stretch * (at + self._draw.random())) for at in range(kills)]
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._thread.start()

    # --- calls of the training loop --------------------------------------------------------------

    def dispatched(self, step: int) -> None:
        with self._changed:
            self._next_step = step + 1
            self._changed.notify_all()

    def checkpointed(self, step: int) -> None:
        with self._changed:
            self._checkpoints += 1
            self._changed.notify_all()

    def finished(self, step: int, loss: float) -> None:
        now_s = time.monotonic()
        with self._changed:
            for kill in [kill for kill in self._recovering if step >= kill.step]:
                kill.recovery_s = now_s - kill.at_s
                self._recovering.remove(kill)
                self._report(kill)
            self._changed.notify_all()

    def end(self) -> None:
        """Stop; hosts that have not recovered by now are not needed any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        for index, step in enumerate(self._plan):
            when = self._draw.choice(["at random", "after a checkpoint", "during a recovery"])
            if when != "during a recovery" or not index:
                self._until(lambda: not self._recovering)
                self._until(lambda: self._next_step >= step)  # noqa: B023  (called at once)
            if when == "after a checkpoint":
                before = self._checkpoints
                self._until(lambda: self._checkpoints > before)  # noqa: B023
            time.sleep(self._draw.uniform(0, LONGEST_DELAY_S))
            if self._over:
                return
            self._kill(when)

    def _until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or condition())

    def _kill(self, when: str) -> None:
        islands = pw.status().islands
        members = [host.name for island in islands for host in island.hosts]
        name = self._draw.choice(
            [name for name in members if name in self._hosts] or [*self._hosts]
        )
        host = self._hosts[name]
        spare = len(self._hosts) - self._needed
        with self._changed:
            kill = Kill(f"runtime of {name}", when, self._next_step, time.monotonic())
            if spare > 0 and self._draw.random() < 0.5:
                kill.what = f"machine of {name}"
                del self._hosts[name]
                host.kill()
            elif (process := host.runtime_pid()) is not None:
                os.kill(process, signal.SIGKILL)
            self.kills.append(kill)
            self._report(kill)
            self._recovering.append(kill)
