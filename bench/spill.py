"""Training whose weights do not fit beside the same with enough memory, and beside the copies alone.

Layers of 4 MiB are trained one after the other, several times, all launched ahead: so the next use of each is
known. (When nothing is launched, nothing can return ahead; the first copies of a round are not hidden.)
In one cluster the devices hold all of them, in the other a fifth, and arrays leave for host memory. Copies
alone are the bytes that a step has moved there and back, copied by JAX between the same memories here.

A computation has one thread of each cluster's CPU device, as copies need a core that computes nothing: on an
accelerator no copy takes time of the device.

- The bar is the part of the copies' time that is hidden: 1 − (spilled − enough) / copies.
- Values of both clusters are compared bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import pw
from bench.measure import Sample, alternate, seconds
from bench.report import Result
from pw.client.connection import current

BAR = 0.8
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
WIDTH = 1024
TIMES = 4
"""How often each layer is trained before a client waits."""
WHAT = "training that spills: beside enough memory, and beside the copies alone"


def run(quick: bool) -> Result:
    """Train in two clusters in turns, and copy."""
    layers, batch = (10, 16) if quick else (20, 512)
    result = Result("spill", WHAT)
    layer_bytes = 4 * WIDTH * WIDTH
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"XLA_FLAGS": ONE_THREAD}))
        stack.enter_context(pw.LocalCluster())
        enough = Training(layers, batch)
        stack.enter_context(
            pw.LocalCluster(device_memory=(layers // 5 + 2) * layer_bytes, spill="1GiB")
        )
        spilled = Training(layers, batch)
        if not all(
            np.array_equal(a, b) for a, b in zip(enough.values(), spilled.values(), strict=True)
        ):
            raise AssertionError("the values of both clusters differ")
        before = spilled.moved_bytes()
        spilled.step()
        moved = spilled.moved_bytes() - before
        cases: dict[str, Callable[[], float]] = {
            "enough memory": partial(_milliseconds, enough.step),
            "spilled": partial(_milliseconds, spilled.step),
            "copies alone": partial(_milliseconds, _Copies(moved, layer_bytes)),
        }
        samples = alternate(cases, rounds=1 if quick else 7, warm_up=1)
    for name, sample in samples.items():
        reference = samples["enough memory"] if name != "enough memory" else None
        result.add(name, {}, sample, "ms", "enough memory" if reference else "", reference)
    excess = samples["spilled"].minus(samples["enough memory"])
    shown = excess.over(samples["copies alone"]) if moved else Sample((0.0,))
    result.at_least(BAR, 1.0 - shown.median, "part of the copies' time that is hidden")
    result.notes.append(
        f"{layers} layers of 4 MiB; a step moves {moved / 2**20:.0f} MiB between the memories"
    )
    return result


class Training:
    """Layers that are trained one after the other, in the current cluster."""

    def __init__(self, layers: int, batch: int) -> None:
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
        whole = pw.NamedSharding(mesh, pw.PartitionSpec())
        random = np.random.default_rng(0)
        self._weights = [
            pw.put(random.standard_normal((WIDTH, WIDTH), np.float32) / 32, sharding=whole)
            for _ in range(layers)
        ]
        self._inputs = pw.put(random.standard_normal((batch, WIDTH), np.float32), sharding=whole)

        def loss(w: Any, x: Any) -> Any:
            return jax.numpy.square(jax.numpy.tanh(x @ w)).mean()

        def trained(w: Any, x: Any) -> Any:
            return w - 0.1 * jax.grad(loss)(w, x)

        self._trained = pw.jit(trained, mesh=mesh, donate_argnums=0)
        self._runtime = current.runtime()
        self.step()

    def step(self) -> None:
        """Train each layer some times."""
        for _ in range(TIMES):
            self._weights = [self._trained(w, self._inputs) for w in self._weights]
        pw.block_until_ready(self._weights)

    def values(self) -> list[Any]:
        """Return the weights."""
        return [np.asarray(w) for w in self._weights]

    def moved_bytes(self) -> int:
        """Return the bytes that hosts have moved between the memories so far."""
        hosts = self._runtime.stats().values()
        return sum(of.get("bytes_spilled", 0) + of.get("bytes_returned", 0) for of in hosts)


class _Copies:
    """As many bytes, copied between the memories of a device of this process, there and back."""

    def __init__(self, moved: int, layer_bytes: int) -> None:
        device = jax.devices()[0]
        self._there = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._back = SingleDeviceSharding(device)
        self._count = max(1, moved // (2 * layer_bytes))
        self._layer = jax.device_put(np.ones((WIDTH, WIDTH), np.float32), self._back)

    def __call__(self) -> None:
        for _ in range(self._count):
            there = jax.device_put(self._layer, self._there, may_alias=False)
            jax.device_put(there, self._back, may_alias=False).block_until_ready()


def _milliseconds(case: Callable[[], object]) -> float:
    return seconds(case) * 1e3
