"""Ray's object store: an array that another actor reads, from request to there.

Either one actor has made it, so that it has to be copied into the store first, or it lies there already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.baselines.peer import serve
from bench.baselines.ray_actors import running


class Host:
    """An actor that has an array, and takes those of others."""

    def __init__(self, size_bytes: int) -> None:
        self._array = np.ones(size_bytes, np.uint8)

    def make(self) -> Any:
        """The array, which goes into the store."""
        return self._array

    def take(self, array: Any) -> int:
        """Have an array of the store, which is mapped and not copied."""
        return int(array[-1])


def cases(ray: Any, size_bytes: int) -> Mapping[str, Callable[[int], object]]:
    """Moving an array; a count is of arrays."""
    remote = ray.remote(num_cpus=0)(Host)
    sender, receiver = remote.remote(size_bytes), remote.remote(size_bytes)
    stored = sender.make.remote()

    def move_computed(count: int) -> None:
        for _ in range(count):
            ray.get(receiver.take.remote(sender.make.remote()))

    def move_again(count: int) -> None:
        for _ in range(count):
            ray.get(receiver.take.remote(stored))

    return {"move computed": move_computed, "move again": move_again}


def main() -> None:
    """The driver: BYTES."""
    with running() as ray:
        serve(lambda: cases(ray, int(sys.argv[1])))


if __name__ == "__main__":
    main()
