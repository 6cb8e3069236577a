"""Multi-controller JAX: processes in one `jax.distributed` group that run the same Python.

The function that sets up pw's workers sets them up too, so devices, thread pools and collectives
are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bench.baselines import steps
from bench.baselines.peer import Peer, free_address, serve
from pw.devices.jax import group


def start(hosts: int, busy: Sequence[int] = ()) -> Peer:
    """A group of `hosts` processes, with the cases of `bench.dispatch` or of `busy_cases`.

    Raises GaveUp if it cannot be formed.
    """
    group = [free_address(), str(hosts)]
    members = [[*group, str(rank), *map(str, busy)] for rank in range(hosts)]
    return Peer("JAX", "bench.baselines.jax_group", members)


def enter(address: str, hosts: int, rank: int) -> jax.sharding.Mesh:
    """Make this process a member of the group; returns the mesh, axis `steps.AXIS`."""
    group.prepare("cpu", 1)
    if hosts > 1:
        group.set_pool(1, hosts)
        jax.distributed.initialize(address, hosts, rank)
    return jax.sharding.Mesh(np.array(jax.devices()), (steps.AXIS,))


def compiled(step: Callable[[Any], Any], mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    """A step of one device's element, compiled for the whole mesh."""
    sharding = NamedSharding(mesh, P(steps.AXIS))
    whole = jax.shard_map(step, mesh=mesh, in_specs=P(steps.AXIS), out_specs=P(steps.AXIS))
    function = jax.jit(whole, in_shardings=sharding, out_shardings=sharding)
    return cast("Callable[[Any], Any]", function)


def zeros(mesh: jax.sharding.Mesh) -> jax.Array:
    """One zero on each device."""
    sharding = NamedSharding(mesh, P(steps.AXIS))
    return jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.zeros(mesh.size, np.float32)[index]
    )


class Member:
    """One process of the group as an actor: an element of the array, and steps that change it."""

    def __init__(self, address: str, hosts: int, rank: int) -> None:
        mesh = enter(address, hosts, rank)
        self._all_reduce = compiled(steps.all_reduce, mesh)
        self._local = compiled(steps.local, mesh)
        self._value: Any = zeros(mesh)

    def all_reduce(self, wait: bool) -> bool:
        """One step; returns when it is done, or with `wait=False` as soon as it is enqueued."""
        self._value = self._all_reduce(self._value)
        return self.done(wait)

    def local(self, wait: bool) -> bool:
        """One step without the collective."""
        self._value = self._local(self._value)
        return self.done(wait)

    def done(self, wait: bool = True) -> bool:
        """Return when all steps are done."""
        if wait:
            self._value.block_until_ready()
        return wait


def cases(mesh: jax.sharding.Mesh) -> Mapping[str, Callable[[int], object]]:
    """The cases of `bench.dispatch`; a count is of computations."""

    def case(step: Any, computations: int = 1, *, wait: bool = False) -> Callable[[int], object]:
        return steps.calls(step, zeros(mesh), computations, wait=wait)

    all_reduce = compiled(steps.all_reduce, mesh)
    local = compiled(steps.local, mesh)
    return {
        "op by op, blocking": case(all_reduce, wait=True),
        "op by op": case(all_reduce),
        "fused": case(compiled(steps.all_reduce_fused, mesh), steps.FUSED),
        "local, op by op, blocking": case(local, wait=True),
        "local, op by op": case(local),
    }


def busy_cases(
    mesh: jax.sharding.Mesh, busy: Sequence[str]
) -> Mapping[str, Callable[[int], object]]:
    """A case for each number of steps that a computation takes; see `bench.smallest`."""
    return {
        number: steps.calls(compiled(steps.busy_together(int(number)), mesh), zeros(mesh))
        for number in busy
    }


def main() -> None:
    """One process of the group: ADDRESS HOSTS RANK [STEPS...]."""
    address, hosts, rank, *busy = sys.argv[1:]

    def prepare() -> Mapping[str, Callable[[int], object]]:
        mesh = enter(address, int(hosts), int(rank))
        return busy_cases(mesh, busy) if busy else cases(mesh)

    serve(prepare)


if __name__ == "__main__":
    main()
