"""Multi-controller JAX: so many processes in one `jax.distributed` group, each running the same Python.

They are set up by the function that sets up pw's workers, so that devices, thread pools and collectives are
the same.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bench.baselines import steps
from bench.baselines.peer import Peer, serve
from pw.devices.jax import group


def start(hosts: int, devices_per_host: int = 1) -> Peer:
    """A group of `hosts` processes, ready to measure.

    Raises GaveUp if it could not be formed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return Peer(
        "JAX",
        "bench.baselines.jax_group",
        [[address, str(hosts), str(rank), str(devices_per_host)] for rank in range(hosts)],
    )


def enter(address: str, hosts: int, rank: int, devices_per_host: int = 1) -> jax.sharding.Mesh:
    """Make this process a member of the group; returns the mesh over all its devices, axis `steps.AXIS`."""
    group.prepare("cpu", devices_per_host)
    if hosts > 1:
        jax.distributed.initialize(address, hosts, rank)
    return jax.sharding.Mesh(np.array(jax.devices()), (steps.AXIS,))


def compiled(step: Callable[[Any], Any], mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    """A step of one device's element, compiled for the whole mesh."""
    sharding = NamedSharding(mesh, P(steps.AXIS))
    whole = jax.shard_map(step, mesh=mesh, in_specs=P(steps.AXIS), out_specs=P(steps.AXIS))
    function = jax.jit(whole, in_shardings=sharding, out_shardings=sharding)
    return cast("Callable[[Any], Any]", function)


def zeros(mesh: jax.sharding.Mesh) -> jax.Array:
    """One zero a device."""
    sharding = NamedSharding(mesh, P(steps.AXIS))
    return jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.zeros(mesh.size, np.float32)[index]
    )


def cases(mesh: jax.sharding.Mesh) -> Mapping[str, Callable[[int], object]]:
    """The cases of `bench.dispatch`; a count is of computations."""

    def blocking(step: Callable[[Any], Any], computations: int = 1) -> Callable[[int], object]:
        state = [zeros(mesh)]

        def case(count: int) -> None:
            x = state.pop()
            for _ in range(-(-count // computations)):
                x = step(x)
                x.block_until_ready()
            state.append(x)

        return case

    def pipelined(step: Callable[[Any], Any], computations: int = 1) -> Callable[[int], object]:
        state = [zeros(mesh)]

        def case(count: int) -> None:
            x = state.pop()
            for _ in range(-(-count // computations)):
                x = step(x)
            state.append(x.block_until_ready())

        return case

    all_reduce = compiled(steps.all_reduce, mesh)
    local = compiled(steps.local, mesh)
    return {
        "op by op, blocking": blocking(all_reduce),
        "op by op": pipelined(all_reduce),
        "fused": pipelined(compiled(steps.all_reduce_fused, mesh), steps.FUSED),
        "local, op by op, blocking": blocking(local),
        "local, op by op": pipelined(local),
    }


def main() -> None:
    """One process of the group: ADDRESS HOSTS RANK DEVICES."""
    address, hosts, rank, devices = sys.argv[1:]
    serve(lambda: cases(enter(address, int(hosts), int(rank), int(devices))))


if __name__ == "__main__":
    main()
