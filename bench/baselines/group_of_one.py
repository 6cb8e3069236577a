"""One process in a group of its own (`jax.distributed`), with the platform's plugin: a part of `bench.gpu`.

Islands of one host form no group, so this is the nearest to an island of several hosts that one GPU allows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bench.baselines.peer import Peer, serve
from pw.devices.jax import group

SUM = "sum"
READY_S = 60.0


def start(address: str, epoch: int, platform: str) -> Peer:
    """Have a new process form the group of an epoch, and add. Raises GaveUp if it cannot."""
    arguments = [[address, str(epoch), platform]]
    return Peer("group", "bench.baselines.group_of_one", arguments, ready_s=READY_S)


def main() -> None:
    """ADDRESS EPOCH PLATFORM: serve until standard input ends."""
    address, epoch, platform = sys.argv[1:]

    def prepare() -> Mapping[str, Callable[[int], object]]:
        group.prepare(platform, 1)
        group.enter(address, 0, 1, int(epoch), platform=platform)
        device = jax.devices()[0]
        assert (device.process_index, jax.process_count()) == (0, 1)
        mesh = Mesh(np.array([device]), ("x",))
        add = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "x") + x, mesh=mesh, in_specs=P("x"), out_specs=P("x")
            )
        )

        def case(count: int) -> None:
            for _ in range(count):
                assert np.asarray(add(np.ones(1, np.float32))).item() == 2.0

        return {SUM: case}

    serve(prepare)


if __name__ == "__main__":
    main()
