"""Rows that count, between islands of processes: a host is killed in the middle of an exchange."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw

pytestmark = pytest.mark.processes

CELLS, CAPACITY, WIDTH = 4, 64, 128
STEPS, KILLED_AFTER = 10, 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(islands=2, hosts_per_island=2) as cluster:
        yield cluster


def scattered(x: Any, seed: Any) -> pw.Ragged:
    """Rows for each cell, of which a number counts that the seed decides: none, some or all."""
    counts = (jnp.arange(CELLS, dtype=jnp.int32) * 37 + seed * 29) % (CAPACITY + 1)
    counts = jnp.where((jnp.arange(CELLS) + seed) % 4 == 0, 0, counts)
    rows = jnp.arange(CELLS * CAPACITY * WIDTH, dtype=jnp.float32)
    return pw.Ragged(rows.reshape(CELLS, CAPACITY, WIDTH) + x, counts)


def gathered(state: Any, rows: pw.Ragged) -> Any:
    return state * 0.5 + rows.rows.sum((0, 1)) / 1e3, rows.rows[:, 0, 0]


@pytest.mark.long
def test_a_host_killed_in_an_exchange_changes_no_bit(cluster: pw.LocalCluster) -> None:
    virtual = pw.make_virtual_device_set()
    first, second = (pw.Mesh(virtual.add_slice(devices=2).devices, ("x",)) for _ in range(2))
    split = pw.NamedSharding(first, P("x"))
    scatter = pw.jit(
        scattered, mesh=first, out_shardings=pw.Ragged(split, pw.NamedSharding(first, P()))
    )
    gather = pw.jit(gathered, mesh=second, in_shardings=(None, P("x")))

    @pw.program
    def step(state: Any, seed: Any) -> Any:
        return gather(state, scatter(state[0], seed))

    def run(killed: int | None) -> list[Any]:
        state, seen = pw.put(np.zeros(WIDTH, np.float32), second.devices), []
        for number in range(STEPS):
            state, found = step(state, np.int32(number))
            seen.append((state, found))
            if number == KILLED_AFTER and killed is not None:  # steps are in flight
                os.kill(cluster.hosts[killed].runtime_pid() or 0, signal.SIGKILL)
        return [pw.get(one) for one in seen]

    expected, state = [], np.zeros(WIDTH, np.float32)
    for number in range(STEPS):
        ragged = scattered(state[0], number)
        rows = np.where(np.asarray(ragged.mask())[..., None], ragged.rows, 0)
        state = np.asarray(state * np.float32(0.5) + rows.sum((0, 1)) / np.float32(1e3))
        expected.append((state, rows[:, 0, 0]))
    before = run(None)
    for (ours, found), (theirs, wanted) in zip(before, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
    for killed in (0, 3):  # a sender, then a receiver
        for ours, theirs in zip(run(killed), before, strict=True):
            np.testing.assert_array_equal(ours[0], theirs[0])
            np.testing.assert_array_equal(ours[1], theirs[1])
