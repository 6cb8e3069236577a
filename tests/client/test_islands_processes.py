"""A training step over two islands of processes: the bytes that hosts send, and a host that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import runtime

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ISLANDS, HOSTS = 2, 2
WIDTH = 128
STEPS, KILLED_AFTER = 8, 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(islands=ISLANDS, hosts_per_island=HOSTS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mesh(cluster: pw.LocalCluster) -> pw.Mesh:
    slices = pw.make_virtual_device_set().add_slice(devices=ISLANDS * HOSTS, islands=ISLANDS)
    return pw.Mesh(np.reshape(slices.devices, (ISLANDS, HOSTS)), ("island", "data"))


def train(state: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ weights["in"]) @ weights["out"])

    found, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.5 * g, state, gradients), found


def rows(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(16, WIDTH)).astype(np.float32)


def initial() -> Any:
    draw = np.random.default_rng(99)
    return {n: draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) for n in ("in", "out")}


@pytest.mark.long
def test_a_host_killed_in_a_reduction_changes_no_bit(
    cluster: pw.LocalCluster, mesh: pw.Mesh
) -> None:
    step = pw.jit(train, mesh=mesh, in_shardings=(None, P(("island", "data"))), donate_argnums=0)

    def run(killed_after: int | None) -> tuple[Any, list[Any]]:
        state, losses = pw.put(initial(), sharding=pw.NamedSharding(mesh, P())), []
        for number in range(STEPS):
            state, loss = step(state, rows(number))
            losses.append(loss)
            if number == 1:
                pw.checkpoint(state).result(60)
            if number == killed_after:  # steps are in flight
                os.kill(cluster.hosts[-1].runtime_pid() or 0, signal.SIGKILL)
        return pw.get(state), pw.get(losses)

    first, losses = run(None)
    expected = initial()
    for number in range(STEPS):
        expected, loss = jax.jit(train)(expected, rows(number))
        assert abs(float(losses[number]) - float(loss)) < 1e-4
    again = run(KILLED_AFTER)
    for ours, theirs in zip(jax.tree.leaves((first, losses)), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_host_sends_no_more_than_a_reduction_needs(mesh: pw.Mesh) -> None:
    step = pw.jit(train, mesh=mesh, in_shardings=(None, P(("island", "data"))))
    state = pw.put(initial(), sharding=pw.NamedSharding(mesh, P()))
    x = pw.put(rows(0), sharding=pw.NamedSharding(mesh, P(("island", "data"))))
    pw.get(step(state, x)[1])
    # The bytes of earlier calls may be counted late.
    before, steps = sent(), 4
    for _ in range(5):
        time.sleep(0.1)
        before = sent()
    for _ in range(steps):
        state, loss = step(state, x)
    pw.block_until_ready((state, loss))
    most = max(bytes_ - before[host] for host, bytes_ in sent().items()) / steps
    size = 2 * WIDTH * WIDTH * 4
    bound = 2 * (ISLANDS - 1) / ISLANDS * size / HOSTS
    assert bound <= most <= 1.05 * bound


def test_checkpoints_on_disk(mesh: pw.Mesh, tmp_path: Path) -> None:
    value = rows(3)
    shardings = [
        pw.NamedSharding(mesh, spec) for spec in (P(), P(("island", "data")), P(None, "data"))
    ]
    tree = {str(at): pw.put(value, sharding=one) for at, one in enumerate(shardings)}
    pw.checkpoint(tree, path=tmp_path / "saved").result(60)
    for like in (tree, dict(zip(tree, reversed(shardings), strict=True))):
        for name, array in pw.restore(tmp_path / "saved", like).items():
            assert array.sharding == getattr(like[name], "sharding", like[name])
            np.testing.assert_array_equal(array, value)


def test_what_moves_for_a_checkpoint_lives_until_it_is_written(
    mesh: pw.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "RELEASES_KEPT", 0)  # each call deletes what has no handle
    split = pw.NamedSharding(mesh, P("island"))
    arrays = [pw.put(rows(step), sharding=split) for step in range(3)]
    pw.checkpoint(arrays, path=tmp_path / "split").result(60)
    for step, array in enumerate(pw.restore(tmp_path / "split", arrays)):
        np.testing.assert_array_equal(array, rows(step))


def sent() -> dict[str, int]:
    counters = pw.stats()
    return {name: counters[name]["bulk_sent_bytes"] for name in counters if "island" in name}
