"""`pw.moe` on processes: a host is killed in the middle of training steps, and no bit changes."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import numpy as np
import pytest

import pw

pytestmark = pytest.mark.processes

ROWS, WIDTH, EXPERTS, STEPS = 64, 8, 4, 8


@pytest.mark.long
def test_a_host_killed_in_training_steps_changes_no_bit() -> None:
    draw = np.random.default_rng(0).standard_normal
    x = draw((ROWS, WIDTH)).astype(np.float32)
    gate = draw((WIDTH, EXPERTS)).astype(np.float32)
    weights = draw((EXPERTS, WIDTH, WIDTH)).astype(np.float32)
    with pw.LocalCluster(islands=3) as cluster:
        slices = pw.make_virtual_device_set()
        near, *far = (slices.add_slice(1, island=f"island-{at}") for at in range(3))
        layer = pw.moe(lambda w, rows: jax.numpy.tanh(rows @ w), devices=far)
        # in every other step the last two experts get no rows
        router = pw.jit(
            lambda gate, x, step: x @ gate - jax.numpy.array([0, 0, 99, 99]) * (step % 2),
            devices=near,
        )
        error = pw.jit(lambda x, y, balance: ((x + y) ** 2).mean() + balance, devices=near)
        learn = [
            pw.jit(
                lambda tree, found: jax.tree.map(lambda w, g: w - 0.1 * g, tree, found), devices=one
            )
            for one in (near, *far)
        ]

        def loss(params: Any, x: Any, number: Any) -> Any:
            y, balance = layer(params[1:], x, router(params[0], x, number))
            return error(x, y, balance)

        @pw.program
        def step(params: Any, x: Any, number: Any) -> Any:
            value, found = pw.value_and_grad(loss)(params, x, number)
            new = [one(*its) for one, *its in zip(learn, params, found, strict=True)]
            return new, value

        def train(killed: int | None) -> list[Any]:
            params, seen = [pw.put(gate, near), *layer.put(weights)], []
            for number in range(STEPS):
                params, value = step(params, x, np.float32(number))
                seen.append(value)
                if number == STEPS // 2 and killed is not None:  # steps are in flight
                    os.kill(cluster.hosts[killed].runtime_pid() or 0, signal.SIGKILL)
            return pw.get([*seen, *params])

        before = train(None)
        assert before[STEPS - 1] < before[1]
        for killed in (0, 2):  # the rows' host, then one of experts
            for ours, theirs in zip(train(killed), before, strict=True):
                np.testing.assert_array_equal(ours, theirs)
