"""One script in two ways: with `pw.jit`, and as plain JAX on the gateway; contenders of `bench.gateway`.

Each way has a cluster of one device that the script starts beside itself, or the one at an address.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw
import pw.jax
from bench.baselines.peer import Peer, serve
from bench.baselines.steps import calls, local
from bench.placement import new_mesh

JIT, GATEWAY = "pw.jit", "gateway"
DISPATCH, CHAIN, BLOCKING, THERE_AND_BACK = "dispatch", "chain", "blocking", "put and get"
PUT, READ = "put", "read"
FILL, DROP = "fill", "drop"
LARGE_BYTES = 64 << 20
BURST = 64
"""Calls one after the other, before the client waits for them: fewer than a client has credits."""
ARRAYS_EACH, ARRAY_SIZE = 10, 4096
"""Arrays for each executable, and the elements of one."""

Case = Callable[[int], object]


def start(way: str, address: str = "") -> Peer:
    """Start the script. Raises GaveUp if it does not become ready."""
    return Peer(way, "bench.baselines.two_ways", [[way, address]])


def dispatched(function: Callable[[Any], Any], x: Any) -> Case:
    """A case of calls whose time is that of the calls alone, without that of their results."""

    def case(count: int) -> float:
        took_s = 0.0
        for first in range(0, count, BURST):
            begun_s = time.perf_counter()
            for _ in range(min(BURST, count - first)):
                y = function(x)
            took_s += time.perf_counter() - begun_s
            y.block_until_ready()
        return took_s

    return case


def there_and_back(put: Callable[[Any], Any]) -> Case:
    """A case that puts a large array on the device and reads it again."""
    value = np.arange(LARGE_BYTES // 4, dtype=np.float32)

    def case(count: int) -> None:
        for _ in range(count):
            back = np.asarray(put(value))
            assert back[-1] == value[-1]

    return case


def one_way(
    add: Callable[[Any], Any], put: Callable[[Any], Any], size_bytes: int
) -> dict[str, Callable[[int], float]]:
    """The cases that put an array on the device, and read one that was computed; a count is of arrays."""
    value = np.arange(size_bytes // 4, dtype=np.float32)
    there: list[Any] = []

    def putting(count: int) -> float:
        took_s = 0.0
        for _ in range(count):
            begun_s = time.perf_counter()
            put(value).block_until_ready()
            took_s += time.perf_counter() - begun_s
        return took_s

    def reading(count: int) -> float:
        took_s = 0.0
        there[:] = there or [put(value)]
        for _ in range(count):
            x = add(there[0]).block_until_ready()
            begun_s = time.perf_counter()
            back = np.asarray(x)
            took_s += time.perf_counter() - begun_s
            assert back[1] == value[1] + 1
        return took_s

    return {PUT: putting, READ: reading}


def in_common(add: Callable[[Any], Any], zero: Any, put: Callable[[Any], Any]) -> dict[str, Case]:
    """The cases of both ways; a count is of calls."""
    return {
        DISPATCH: dispatched(add, zero),
        CHAIN: calls(add, zero),
        BLOCKING: calls(add, zero, wait=True),
        THERE_AND_BACK: there_and_back(put),
    }


def many() -> dict[str, Case]:
    """Cases that make more executables and arrays, and delete all; a count is of executables."""
    held: list[Any] = []

    def fill(count: int) -> None:
        arrays = [
            jax.device_put(np.full(ARRAY_SIZE, at, np.float32)) for at in range(ARRAYS_EACH * count)
        ]
        functions = [jax.jit(lambda x, at=at: x * (at + 0.5)) for at in range(count)]
        results = [function(arrays[0]) for function in functions]
        jax.block_until_ready((arrays, results))
        held.append((arrays, functions, results))

    def drop(_: int) -> None:
        held.clear()
        jax.clear_caches()
        gc.collect()

    return {FILL: fill, DROP: drop}


def main() -> None:
    """WAY ADDRESS: serve until standard input ends."""
    way, address = sys.argv[1:]

    def prepare() -> Mapping[str, Case]:
        if way == JIT:
            os.environ["PW_EMBEDDED_DEVICES"] = "1"
            mesh = new_mesh()
            sharding = pw.NamedSharding(mesh, pw.PartitionSpec())

            def put(value: Any) -> Any:
                return pw.put(value, sharding=sharding)

            return in_common(pw.jit(local, mesh=mesh), put(np.float32(0)), put)
        pw.jax.connect(address or None, devices=1)
        if address:
            return many()
        return in_common(jax.jit(local), jax.device_put(jnp.float32(0)), jax.device_put)

    serve(prepare)


if __name__ == "__main__":
    main()
