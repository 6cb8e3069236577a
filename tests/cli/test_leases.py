"""Clients launch on hosts themselves, others come, hosts and clients die: `tests.kills`, step by step."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pw
from tests.kills import Client
from tests.stages.daemons import send, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

BOUND_S = 110.0
"""For one event: all processes of the test share the processors with other tests."""


@pytest.fixture
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(hosts_per_island=2) as cluster:
        yield cluster


def until_more(client: Client, what: str, more: int = 100) -> None:
    """Wait until it has made so many more `steps`, or `leased` launches; a failure says what it has done."""
    wanted = getattr(client, what) + more

    def made() -> bool:
        client.look()
        return bool(getattr(client, what) >= wanted)

    try:
        until(made, what, BOUND_S)
    except AssertionError as late:
        said = client.program.out[-500:] + client.program.err[-2000:]
        raise AssertionError(f"{client.steps} steps, {client.leased} leased: {said}") from late


@pytest.mark.timeout(6 * BOUND_S)
def test_a_lease_ends_and_comes_back_with_others_and_losses(
    cluster: pw.LocalCluster, tmp_path: Path
) -> None:
    clients = []

    def join(devices: int) -> Client:
        clients.append(Client(tmp_path, cluster.address, len(clients), devices))
        return clients[-1]

    try:
        one = join(2)
        until_more(one, "leased")

        two = join(1)  # another client wants one of the hosts
        until_more(two, "steps")
        until_more(one, "steps")

        two.program.kill()
        until_more(one, "leased")

        runtime = cluster.hosts[1].runtime_pid()
        assert runtime is not None
        send(runtime, signal.SIGKILL)  # a host of the lease
        until_more(one, "steps")

        one.program.kill()  # the client, in the middle of its launches
        until_more(join(2), "steps")
    finally:
        for client in clients:
            client.program.kill()


@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
def test_values_that_come_with_leased_launches_are_those_of_their_runs(
    cluster: pw.LocalCluster, donate: tuple[int, ...]
) -> None:
    """A result that all hosts have, and one that each host has a part of."""
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
    whole, split = pw.PartitionSpec(), pw.PartitionSpec("x")
    step = pw.jit(
        lambda x, parts: (x + 1, parts * 2 % 1000),
        mesh=mesh,
        in_shardings=(whole, split),
        out_shardings=(whole, split),
        donate_argnums=donate,
    )
    at = [pw.NamedSharding(mesh, spec) for spec in (whole, split)]
    x, parts = (pw.put(np.ones(2, np.int32), sharding=one) for one in at)
    calls, wanted = 0, 1
    until_s = time.monotonic() + BOUND_S
    while pw.stats()["client"].get("leased_launches", 0) < 60:
        assert time.monotonic() < until_s, pw.stats()
        for _ in range(20):
            x, parts = step(x, parts)
            calls, wanted = calls + 1, wanted * 2 % 1000
            np.testing.assert_array_equal(np.asarray(x), calls + 1)
            if calls % 3 == 0:
                np.testing.assert_array_equal(np.asarray(parts), wanted)


def test_a_program_over_two_islands_is_not_leased() -> None:
    """Each island has a part that needs nothing of the other, so a lease of one would launch a half."""
    with pw.LocalCluster(islands=2):
        east, west = (pw.make_virtual_device_set().add_slice(devices=1) for _ in range(2))
        add, double = pw.jit(lambda x: x + 1, devices=east), pw.jit(lambda x: x * 2, devices=west)

        @pw.program
        def both(x: int, y: int) -> tuple[pw.Array, pw.Array]:
            return add(x), double(y)

        for value in range(40):
            assert [int(one) for one in both(value, value)] == [value + 1, value * 2]
