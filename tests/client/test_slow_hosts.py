"""A host whose process is stopped for a part of the time is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from bench.stragglers import stopped
from tests.stages.daemons import Program, start_module, until

pytestmark = pytest.mark.processes

BOUND_S = 60.0
STOPPED = 0.3
WIDTH = 96


def step_of(mesh: pw.Mesh) -> tuple[Any, Any]:
    """Return a function with a collective, and its first argument."""

    def part(y: Any) -> Any:
        return jnp.tanh(y @ y) + jax.lax.pmean(y, "x")

    step = pw.jit(lambda x: jax.shard_map(part, in_specs=P("x"), out_specs=P("x"))(x), mesh=mesh)
    ones = np.ones((2 * WIDTH, WIDTH), np.float32)
    return step, pw.put(ones, sharding=pw.NamedSharding(mesh, P("x")))


def test_a_host_that_is_stopped_again_and_again_is_named() -> None:
    with pw.LocalCluster(hosts_per_island=2) as cluster:
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
        step, x = step_of(mesh)

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


@pytest.mark.long
def test_a_spare_replaces_a_slow_host(tmp_path: Path) -> None:
    options = ("--bind", "tcp://127.0.0.1:0", "--replace-stragglers", 1.2)
    controller = start_module("pw.cli.controller", *options, folder=tmp_path)
    workers: dict[str, Program] = {}
    try:
        controller.until_says("listens at")
        (address,) = re.findall(r"listens at (\S+)", controller.out)
        where = ("--controller", address, "--island", "i", "--island-hosts", 2)
        for name in "ab":
            worker = start_module("pw.cli.worker", *where, "--name", name, folder=tmp_path)
            workers[name] = worker
        workers["a"].until_says("joined", BOUND_S)
        spare = ("--controller", address, "--island", "i", "--name", "c", "--spare")
        workers["c"] = start_module("pw.cli.worker", *spare, folder=tmp_path)
        pw.connect(address)
        step, x = step_of(
            pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
        )

        def is_replaced() -> bool:
            nonlocal x
            for _ in range(20):
                x = step(x)
            x.block_until_ready()
            return "host is replaced" in controller.err

        is_replaced()
        (slow,) = (host for host in pw.status().hosts if host.name == "a")
        with stopped(slow.pid, STOPPED):
            until(is_replaced, "the spare is to take its place", BOUND_S)
        assert workers["a"].end(BOUND_S) == 0
        is_replaced()
        assert {host.name for host in pw.status().hosts} == {"b", "c"}
    finally:
        pw.disconnect()
        for program in (*workers.values(), controller):
            program.kill()
