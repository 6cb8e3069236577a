"""A host is killed in the middle of a pipeline's steps: the losses stay the same, bit for bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pw
from pw.client.connection import current
from tests.stages.daemons import until

pytestmark = pytest.mark.processes

WIDTH, ROWS, STEPS = 64, 64, 10
SLOW = 100
"""So many multiplications make a step last long enough to be hit."""


def slow(params: Any, x: Any) -> Any:
    def body(x: Any, _: None) -> tuple[Any, None]:
        return jnp.tanh(x @ params), None

    return jax.lax.scan(body, x, length=SLOW)[0]


def loss(params: Any, x: Any, targets: Any) -> Any:
    return jnp.mean((slow(params, x) - targets) ** 2)


def runtime_of(island: str) -> int:
    """The process id of the runtime of an island's only host, while the island is ready."""
    for each in current.runtime().ask.status(20.0).islands:
        if each.name == island and each.state == "ready":
            return int(each.hosts[0].pid)
    return 0


@pytest.mark.long
def test_a_host_killed_in_the_middle_of_a_step_changes_no_bit() -> None:
    draw = np.random.default_rng(0)
    params = [draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.2 for _ in range(4)]
    rows = [draw.standard_normal((2, ROWS, WIDTH)).astype(np.float32) for _ in range(STEPS)]
    with pw.LocalCluster(islands=2, hosts_per_island=1, devices_per_host=2):
        slices = [
            pw.make_virtual_device_set().add_slice(devices=1, island=f"island-{stage % 2}")
            for stage in range(4)
        ]
        pipe = pw.pipeline(
            [slow, slow, slow, loss],
            meshes=[pw.Mesh(part.devices, ("data",)) for part in slices],
            microbatches=4,
            schedule="zero-bubble",
            optimizer=optax.adam(1e-3),
        )

        def train(kill: bool) -> list[float]:
            state = pipe.init(params)
            pw.checkpoint(state)
            losses: list[Any] = []
            before = 0
            for x, targets in rows:
                if kill and len(losses) == 2:
                    float(losses[1])
                    before = runtime_of("island-1")
                    os.kill(before, signal.SIGSTOP)  # the later steps stay in flight
                state, found = pipe(state, x, targets)
                losses.append(found)
            if kill:
                assert not losses[-1].is_ready()
                os.kill(before, signal.SIGKILL)
                until(lambda: runtime_of("island-1") not in (0, before), "the island again")
            return [float(found) for found in losses]

        expected = train(kill=False)
        assert train(kill=True) == expected
        assert len(set(expected)) == STEPS
