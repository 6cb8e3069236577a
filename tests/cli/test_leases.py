"""Clients launch on hosts themselves, others come, hosts and clients die: `tests.kills`, step by step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pw
from tests.kills import Client
from tests.stages.daemons import send, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]


@pytest.fixture
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(hosts_per_island=2) as cluster:
        yield cluster


def until_leased(client: Client, more: int = 200) -> None:
    """Wait until it has made so many more launches itself."""
    before = client.leased

    def leased() -> bool:
        client.look()
        return client.leased >= before + more

    waited_for(client, leased, "launches under a lease")


def until_steps(client: Client, more: int = 200) -> None:
    """Wait until it has made so many more steps."""
    before = client.steps

    def made() -> bool:
        client.look()
        return client.steps >= before + more

    waited_for(client, made, "steps")


def waited_for(client: Client, condition: Callable[[], bool], what: str) -> None:
    """Wait; a failure says what the client has done and said."""
    try:
        until(condition, what, 60.0)
    except AssertionError as late:
        said = client.program.out[-500:] + client.program.err[-2000:]
        raise AssertionError(f"{client.steps} steps, {client.leased} leased: {said}") from late


def test_a_lease_ends_and_comes_back_with_others_and_losses(
    cluster: pw.LocalCluster, tmp_path: Path
) -> None:
    clients = []

    def join(devices: int) -> Client:
        clients.append(Client(tmp_path, cluster.address, len(clients), devices))
        return clients[-1]

    try:
        one = join(2)
        until_leased(one)

        two = join(1)  # another client wants one of the hosts
        until_steps(two)
        until_steps(one)

        two.program.kill()
        until_leased(one)

        runtime = cluster.hosts[1].runtime_pid()
        assert runtime is not None
        send(runtime, signal.SIGKILL)  # a host of the lease
        until_steps(one)

        one.program.kill()  # the client, in the middle of its launches
        until_steps(join(2))
    finally:
        for client in clients:
            client.program.kill()


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
