"""A host whose process is stopped for a part of the time is named."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from bench.stragglers import stopped
from tests.stages.daemons import until

pytestmark = pytest.mark.processes

BOUND_S = 60.0
STOPPED = 0.3
WIDTH = 96


def test_a_host_that_is_stopped_again_and_again_is_named() -> None:
    with pw.LocalCluster(hosts_per_island=2) as cluster:
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))

        def part(y: Any) -> Any:
            return jnp.tanh(y @ y) + jax.lax.pmean(y, "x")

        step = pw.jit(lambda x: jax.shard_map(part, in_specs=P("x"), out_specs=P("x"))(x))
        ones = np.ones((2 * WIDTH, WIDTH), np.float32)
        x = pw.put(ones, sharding=pw.NamedSharding(mesh, P("x")))

        def named() -> list[str]:
            """Compute on both hosts for a while, and return the slow ones."""
            nonlocal x
            for _ in range(20):
                x = step(x)
            x.block_until_ready()
            return [host.name for host in pw.status().hosts if host.slow is not None]

        named()
        victim = next(host for host in cluster.hosts if host.name == "island-0-host-1")
        pid = victim.runtime_pid()
        assert pid is not None
        with stopped(pid, STOPPED):
            until(lambda: named() == [victim.name], "the slow host alone is named", BOUND_S)
            (slow,) = [host.slow for host in pw.status().hosts if host.slow is not None]
            assert slow.factor > 1.1
            assert slow.island == "island-0"
            words = f"host {victim.name} of island island-0 is"
            assert words in repr(pw.status())
            until(lambda: bool(named()) and words in pw.why(), "why says it", BOUND_S)
        until(lambda: not named(), "it is as fast as the other one again", BOUND_S)
