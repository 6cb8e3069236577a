"""How long it takes to cut a decoder LM of many layers, beside XLA's compilation of it for one island.

Cutting is what `f.lower(...)` does beyond JAX's own tracing and lowering: XLA's partitioner divides the
function, and pw plans and writes the pieces. A process of its own, with as many devices as an island
has, lowers and compiles the same function in plain JAX. All times are processor time, which other load
on the machine hardly changes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pw
from bench.models import Shape
from bench.over_islands import BOTH
from bench.training import SEED, Task, adamw


class Taken(NamedTuple):
    """Seconds of one function in plain JAX."""

    lowering_s: float
    compiling_s: float


def task(layers: int) -> Task:
    """A decoder LM of so many layers, which are no scan; the sizes hardly matter to a compiler."""
    return Task(f"lm-{layers}", "lm", Shape(64, 4, layers, 32), 8, adamw)


def lower_s(layers: int, mesh: pw.Mesh) -> tuple[float, int]:
    """Return how long `f.lower` takes on a mesh over islands, in seconds, and how many modules it makes."""
    work = task(layers)
    step = pw.jit(
        lambda state, batch: work.step(state, batch),
        mesh=mesh,
        in_shardings=(P(), P(BOTH)),
        out_shardings=(P(), P()),
        donate_argnums=(0,),
    )
    described = _described(work)
    begun_s = time.process_time()
    lowered = step.lower(*described)
    took_s = time.process_time() - begun_s
    return took_s, lowered.as_text().count("module @")


@contextmanager
def plain_jax(devices: int) -> Iterator[Any]:
    """Give a function of the number of layers that returns `Taken`, from a process with so many devices."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _with_devices, (devices,)) as process:
        yield lambda layers: process.submit(_in_plain_jax, layers).result()


def _with_devices(devices: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def _in_plain_jax(layers: int) -> Taken:
    work = task(layers)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    state, batch = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = jax.jit(
        lambda state, batch: work.step(state, batch),
        in_shardings=(state, batch),
        out_shardings=(state, state),
        donate_argnums=0,
    )
    described = _described(work)
    begun_s = time.process_time()
    lowered = step.lower(*described)
    lowered_s = time.process_time()
    lowered.compile()
    return Taken(lowered_s - begun_s, time.process_time() - lowered_s)


def _described(work: Task) -> tuple[Any, Any]:
    state = jax.eval_shape(work.initial_state, SEED)
    batch = work.batch(0)
    return state, jax.ShapeDtypeStruct(batch.shape, batch.dtype)
