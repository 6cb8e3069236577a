"""Endpoints: what they mean, ranges of ports, IPv6, and what is told to others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import numpy as np
import pytest
import uvloop

from pw.core.errors import ConnectionFailed
from pw.core.messages import Ready
from pw.transport import endpoints
from pw.transport.bulk.plane import BulkPlane
from pw.transport.endpoints import (
    is_off_loopback,
    is_on_loopback,
    listen,
    own_address,
    parse,
    parse_bind,
    reachable_endpoint,
    unlisten,
)
from pw.transport.links import nearby
from tests.stages.cluster import make_cluster, numbers


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("endpoint", "family", "address"),
    [
        ("tcp://10.0.0.1:7777", socket.AF_INET, ("10.0.0.1", 7777)),
        ("tcp://host.example:1", socket.AF_INET, ("host.example", 1)),
        ("tcp://[::1]:7777", socket.AF_INET6, ("::1", 7777)),
        ("ipc:///tmp/x", socket.AF_UNIX, "/tmp/x"),
        ("ipc://@x", socket.AF_UNIX, "\0x"),
    ],
)
def test_endpoints(endpoint: str, family: int, address: object) -> None:
    assert parse(endpoint) == (family, address)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://h",
        "tcp://h:",
        "tcp://:1",
        "tcp://::1:7777",
        "tcp://h:70000",
        "tcp://h:7-3",
        "tcp://h:0-3",
        "tcp://h:1-2-3",
        "tcp://h:1-",
        "tcp://h:-1",
        "udp://h:1",
        "ipc://",
    ],
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConnectionFailed, match="is not an endpoint; it looks like"):
        parse_bind(endpoint)


def test_a_range_of_ports_is_for_listeners() -> None:
    assert parse_bind("tcp://*:7000-7100") == ((socket.AF_INET, ("*", 7000)), 7100)
    with pytest.raises(ConnectionFailed, match="only a listener can choose one"):
        parse("tcp://h:7000-7100")


def free_ports(count: int) -> int:
    """The first of so many ports that are free, one behind the other."""
    for first in range(20_000, 60_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no ports are free")


def test_listeners_share_a_range() -> None:
    first = free_ports(3)
    bind = f"tcp://127.0.0.1:{first}-{first + 2}"
    taken = [listen(bind) for _ in range(3)]
    try:
        assert [one.getsockname()[1] for one in taken] == [first, first + 1, first + 2]
        with pytest.raises(ConnectionFailed, match="stop what uses it"):
            listen(bind)
        unlisten(taken.pop(1))
        taken.append(listen(bind))
        assert taken[-1].getsockname()[1] == first + 1
    finally:
        for one in taken:
            unlisten(one)


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        ("host", "tcp://host:{}"),
        ("host:7000", "tcp://host:7000"),
        ("10.1.2.3", "tcp://10.1.2.3:{}"),
        ("::1", "tcp://[::1]:{}"),
        ("[::1]", "tcp://[::1]:{}"),
        ("[::1]:7000", "tcp://[::1]:7000"),
    ],
)
def test_what_a_listener_behind_a_port_mapping_advertises(advertise: str, told: str) -> None:
    for bind in ("tcp://127.0.0.1:0", "tcp://*:0"):
        listener = listen(bind)
        port = listener.getsockname()[1]
        assert reachable_endpoint(listener, advertise) == told.format(port)
        unlisten(listener)


def test_an_address_to_advertise_that_makes_no_sense() -> None:
    listener = listen("tcp://127.0.0.1:0")
    with pytest.raises(ConnectionFailed):
        reachable_endpoint(listener, "host:port")
    with pytest.raises(ConnectionFailed, match="is not HOST or HOST:PORT"):
        reachable_endpoint(listener, "tcp://127.0.0.1:1")
    unlisten(listener)


def test_the_loopback() -> None:
    for endpoint in ("tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1"):
        assert is_on_loopback(endpoint)
        assert not is_off_loopback(endpoint)
    for endpoint in ("tcp://10.0.0.1:1", "tcp://[fd00::1]:1"):
        assert is_off_loopback(endpoint)
    assert not is_on_loopback("ipc:///tmp/x")
    assert not is_off_loopback("ipc:///tmp/x")


def test_the_own_address_of_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "route_address", lambda where: "192.0.2.7")
    assert own_address("tcp://127.0.0.2:7000-7010", "tcp://10.0.0.1:1") == "127.0.0.2"
    assert own_address("tcp://localhost:0", "tcp://10.0.0.1:1") == "127.0.0.1"
    assert own_address("tcp://*:0", "tcp://10.0.0.1:1") == "192.0.2.7"
    assert own_address("ipc:///tmp/x", "ipc:///tmp/y") == "127.0.0.1"
    with pytest.raises(ConnectionFailed, match="no host of the name in"):
        own_address("tcp://nowhere.invalid:0", "tcp://10.0.0.1:1")


@ipv6
@pytest.mark.parametrize("where", ["tls", "tcp", "near"])
@pytest.mark.parametrize("bind", ["tcp://[::1]:0", "tcp://[::]:0"])
def test_links_and_chunks_over_ipv6(where: str, bind: str, tmp_path: Path) -> None:
    for cluster in make_cluster(where, tmp_path, uv=True):
        a = cluster.node("a", bind=bind, advertise="::1")
        b = cluster.node("b", listens=False)
        assert cluster.endpoint(a).startswith("tcp://[::1]:")
        assert (nearby.dial(parse(cluster.endpoint(a))) is not None) is (where != "tls")
        b.env.introduce("a", cluster.endpoint(a))
        b.env.send(a.env.address, Ready(0))
        cluster.until(lambda a=a: numbers(a) == [0])


@ipv6
def test_chunks_over_ipv6() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        how = {"channel": "tcp", "insecure": True}
        here, there = BulkPlane(loop, **how), BulkPlane(loop, bind_host="[::1]", **how)
        arrival, outcome = loop.create_future(), loop.create_future()
        landing = there.land(100_000, arrival.set_result)
        assert landing.endpoint.startswith("tcp://[::1]:")
        here.push(landing, [(0, np.ones(100_000, np.uint8))], outcome.set_result)
        assert await outcome is None
        assert (await arrival).sum() == 100_000
        here.close()
        there.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("where", ["tls", "tcp", "near"])
def test_a_node_is_reached_under_two_names(where: str, tmp_path: Path) -> None:
    for cluster in make_cluster(where, tmp_path, uv=True):
        a = cluster.node("a")
        port = cluster.endpoint(a).rpartition(":")[2]
        for number, name in enumerate(("localhost", "127.0.0.1")):
            other = cluster.node(f"b{number}", listens=False)
            other.env.introduce("a", f"tcp://{name}:{port}")
            other.env.send(a.env.address, Ready(number))
        cluster.until(lambda a=a: sorted(numbers(a)) == [0, 1])
