"""Training whose weights do not fit beside the same with enough memory, and beside the copies alone.

Layers of 4 MiB are trained one after the other, several times, all launched ahead: so the next use of each is
known. (When nothing is launched, nothing can return ahead; the first copies of a round are not hidden.)
In one cluster the devices hold all of them, in the other a fifth, and arrays leave for host memory. Copies
alone are the bytes that a step has moved there and back, copied by JAX between the same memories here.

A computation has one thread of each cluster's CPU device, as copies need a core that computes nothing: on an
accelerator no copy takes time of the device.

- The bar is the part of the copies' time that is hidden: 1 − (spilled − enough) / copies.
- By hand, in plain JAX, one thread has layers back ahead of the computations, and another one takes them away:
  what hides there is what a machine can hide. (On CPU devices copies slow computations down: both use the same
  memory and caches.)
- Values of both clusters are compared bit for bit.
"""

from __future__ import annotations

import os
import queue
import threading
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
        by_hand = _ByHand(layers, batch, layers // 5)
        before = spilled.moved_bytes()
        spilled.step()
        moved = spilled.moved_bytes() - before
        cases: dict[str, Callable[[], float]] = {
            "enough memory": partial(_milliseconds, enough.step),
            "spilled": partial(_milliseconds, spilled.step),
            "copies alone": partial(_milliseconds, _Copies(moved, layer_bytes)),
            "by hand, enough memory": partial(_milliseconds, by_hand.step),
            "by hand, spilled": partial(_milliseconds, by_hand.spilled_step),
        }
        samples = alternate(cases, rounds=1 if quick else 7, warm_up=1)
    for name, sample in samples.items():
        beside = "by hand, enough memory" if name == "by hand, spilled" else "enough memory"
        reference = samples[beside] if name != beside else None
        result.add(name, {}, sample, "ms", beside if reference else "", reference)
    hidden = _hidden(samples, "") if moved else 1.0
    result.at_least(BAR, hidden, "part of the copies' time that is hidden")
    more = hidden - (_hidden(samples, "by hand, ") if moved else 1.0)
    result.at_least(-0.1, more, "part that is hidden, less that by hand in plain JAX")
    result.notes.append(
        f"{layers} layers of 4 MiB; a step moves {moved / 2**20:.0f} MiB between the memories"
    )
    return result


def trained(w: Any, x: Any) -> Any:
    """Train one layer."""

    def loss(w: Any) -> Any:
        return jax.numpy.square(jax.numpy.tanh(x @ w)).mean()

    return w - 0.1 * jax.grad(loss)(w)


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


def _hidden(samples: dict[str, Sample], whose: str) -> float:
    """Return the part of the copies' time that is hidden."""
    excess = samples[f"{whose}spilled"].minus(samples[f"{whose}enough memory"])
    return 1.0 - excess.over(samples["copies alone"]).median


class _ByHand:
    """The same layers in plain JAX, in this process; copies have threads of their own.

    Args:
        layers: number of layers.
        batch: rows of the inputs.
        room: layers that are on the device at once, when they spill.
    """

    def __init__(self, layers: int, batch: int, room: int) -> None:
        device = jax.devices()[0]
        self._there = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._back = SingleDeviceSharding(device)
        random = np.random.default_rng(0)
        weights = [random.standard_normal((WIDTH, WIDTH), np.float32) / 32 for _ in range(layers)]
        self._on_device = [jax.device_put(w, self._back) for w in weights]
        self._on_host = [jax.device_put(w, self._there) for w in weights]
        self._inputs = jax.device_put(random.standard_normal((batch, WIDTH), np.float32))
        self._trained = jax.jit(trained, donate_argnums=0)
        self._room = room

    def step(self) -> None:
        """Train each layer some times; all of them stay on the device."""
        for _ in range(TIMES):
            self._on_device = [self._trained(w, self._inputs) for w in self._on_device]
        jax.block_until_ready(self._on_device)

    def spilled_step(self) -> None:
        """Do the same with layers that are in host memory before and after their turn."""
        room = threading.Semaphore(self._room)
        here: queue.Queue[jax.Array] = queue.Queue()
        done: queue.Queue[jax.Array] = queue.Queue()
        ready: queue.Queue[jax.Array] = queue.Queue()
        for w in self._on_host:
            ready.put(w)
        count = TIMES * len(self._on_host)

        def bring() -> None:
            for _ in range(count):
                room.acquire()
                here.put(jax.device_put(ready.get(), self._back, may_alias=False))

        def take_away() -> None:
            for _ in range(count):
                result = done.get().block_until_ready()
                ready.put(jax.device_put(result, self._there, may_alias=False).block_until_ready())
                del result
                room.release()

        threads = [threading.Thread(target=work) for work in (bring, take_away)]
        for thread in threads:
            thread.start()
        for _ in range(count):
            done.put(self._trained(here.get(), self._inputs))
        for thread in threads:
            thread.join()
        self._on_host = [ready.get() for _ in self._on_host]


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
