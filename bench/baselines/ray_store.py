"""Ray's object store: an actor reads the array of another actor.

Either an actor returns the array, and Ray copies it into the store, or it is already in the store.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.baselines.peer import serve
from bench.baselines.ray_actors import running


class Host:
    """An actor that has an array, and reads arrays of others."""

    def __init__(self, size_bytes: int) -> None:
        self._array = np.ones(size_bytes, np.uint8)

    def make(self) -> Any:
        """Return the array; Ray copies it into the store."""
        return self._array

    def take(self, array: Any) -> int:
        """Read an array of the store; Ray maps it and does not copy it."""
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
