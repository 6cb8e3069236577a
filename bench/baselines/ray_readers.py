"""Ray's object store: an object of the driver, and two actors that get it.

The driver's node and each reader's are nodes of one cluster on this machine, with an object store each. A
reader on a node of its own gets the bytes over the network; readers on the driver's node map its store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from bench.baselines.peer import serve
from bench.baselines.ray_actors import prepared

HOME, READERS = "home", ("first", "second")
STORE_BYTES = 512 << 20
APART, BESIDE = "put, read on two other nodes", "put, read where it lies"
READ = {way: way.removeprefix("put, ") for way in (APART, BESIDE)}
"""Cases that leave out the time of `ray.put`, which copies the value into the store, by those with it."""


class Reader:
    """An actor that gets objects."""

    def read(self, stored: list[Any]) -> float:
        """Get an object of the store, and return its last element."""
        import ray

        return float(ray.get(stored[0])[-1])


@contextlib.contextmanager
def nodes() -> Iterator[Any]:
    """Start a node for the driver and one for each reader, and connect the driver."""
    with prepared() as (folder, settings):
        os.environ["RAY_TMPDIR"] = (
            folder  # the cluster writes its address where Ray's files are by default
        )
        import ray
        from ray.cluster_utils import Cluster

        def options(name: str) -> dict[str, Any]:
            return {
                "num_cpus": 4,
                "resources": {name: 4.0},
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
            }

        cluster = Cluster()
        try:
            cluster.add_node(**options(HOME), _system_config=settings)
            for name in READERS:
                cluster.add_node(**options(name))
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield ray
        finally:
            ray.shutdown()
            cluster.shutdown()


def cases(ray: Any, size_bytes: int) -> Mapping[str, Callable[[int], float]]:
    """Objects that two readers get; a count is of objects."""
    value = np.ones(size_bytes // 4, np.float32)
    remote = ray.remote(num_cpus=0)(Reader)

    def case(readers: list[Any], counts_put: bool, count: int) -> float:
        took_s = 0.0
        for _ in range(count):
            put_s = time.perf_counter()
            stored = ray.put(value)
            read_s = time.perf_counter()
            ray.get([reader.read.remote([stored]) for reader in readers])
            took_s += time.perf_counter() - (put_s if counts_put else read_s)
        return took_s

    cases: dict[str, Callable[[int], float]] = {}
    for way, names in ((APART, READERS), (BESIDE, (HOME, HOME))):
        readers = [remote.options(resources={name: 1.0}).remote() for name in names]
        cases[way], cases[READ[way]] = partial(case, readers, True), partial(case, readers, False)
    return cases


def main() -> None:
    """The driver: BYTES."""
    with nodes() as ray:
        serve(lambda: cases(ray, int(sys.argv[1])))


if __name__ == "__main__":
    main()
