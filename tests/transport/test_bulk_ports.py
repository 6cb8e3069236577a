"""The bulk plane at the port of a node's links: who gets in, clients that listen nowhere, strangers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from pw.core.errors import TransferFailed
from pw.core.landing import Landing
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.bulk import chunk_receiver, chunks
from pw.transport.bulk.plane import BulkPlane
from pw.transport.endpoints import parse
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from tests.stages.cluster import authority
from tests.stages.daemons import until_true

WAIT_S = 60.0
SIZES = [0, 1, 70_000, 9 << 20]
WAYS = ["tls", "near", "plain", "ipc"]
"""Tcp with credentials, tcp without any, tcp with --insecure, a unix socket."""

ways = pytest.mark.parametrize("way", WAYS)


def on_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), WAIT_S))  # type: ignore[arg-type]


def issue(folder: Path, role: Role, of: Authority | None = None, **how: Any) -> Credentials:
    file = folder / f"{role}-{len(list(folder.iterdir()))}.pem"
    file.touch(0o600)
    tenant = "research" if role is Role.CLIENT else ""
    file.write_bytes((of or authority()).issue(role, file.stem, tenant))
    return Credentials.read(file, **how)


def secured(way: str, folder: Path, role: Role) -> dict[str, Any]:
    if way == "tls":
        return {"credentials": issue(folder, role)}
    return {"insecure": way == "plain"}


@contextlib.asynccontextmanager
async def host(
    way: str, folder: Path, strangers: Mapping[str, float] = {}, **security: Any
) -> AsyncIterator[tuple[BulkPlane, str]]:
    """A plane at the port of a node with bounds for strangers, and its endpoint."""
    loop = asyncio.get_running_loop()
    security = security or secured(way, folder, Role.WORKER)
    bind = f"ipc://{folder}/host-{time.monotonic_ns()}" if way == "ipc" else "tcp://127.0.0.1:0"
    network = StreamNetwork(loop, "a0", 1, bind=bind, **security)
    node = Node("a0", loop, network)
    plane = BulkPlane(loop, channel="tcp", endpoint=network.endpoint, **security)
    network.take_chunks = plane.adopt
    vars(network.strangers).update(strangers)
    try:
        yield plane, network.endpoint
    finally:
        plane.close()
        node.close()


@contextlib.contextmanager
def client(way: str, folder: Path, **security: Any) -> Any:
    """A plane that listens nowhere."""
    security = security or secured(way, folder, Role.CLIENT)
    plane = BulkPlane(asyncio.get_running_loop(), channel="tcp", endpoint="", **security)
    try:
        yield plane
    finally:
        plane.close()


def land(plane: BulkPlane, size: int, sender: str = "") -> tuple[Landing, asyncio.Future[Any]]:
    arrival = asyncio.get_running_loop().create_future()
    return plane.land(size, arrival.set_result, sender), arrival


def push(plane: BulkPlane, landing: Landing, array: Any) -> asyncio.Future[Any]:
    outcome = asyncio.get_running_loop().create_future()
    plane.push(landing, [(0, array)], outcome.set_result)
    return outcome


def noise(size: int) -> Any:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


# --- one port, and clients that listen nowhere -----------------------------------------------------------


@ways
def test_hosts_push_to_the_port_of_links(way: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(way, tmp_path) as (there, endpoint), host(way, tmp_path) as (here, _):
            for size in SIZES:
                landing, arrival = land(there, size)
                assert landing.endpoint == endpoint
                assert await push(here, landing, noise(size)) is None
                assert np.array_equal(await arrival, noise(size))

    on_loop(scenario)


@ways
def test_a_client_that_cannot_listen_uploads_and_fetches(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_listening(*_: object) -> None:
        raise OSError("a client must not listen")

    async def scenario() -> None:
        async with host(way, tmp_path) as (there, endpoint):
            monkeypatch.setattr(socket.socket, "listen", no_listening)
            with client(way, tmp_path) as here:
                for size in SIZES:
                    landing, arrival = land(here, size, endpoint)
                    assert landing.endpoint == ""
                    assert await push(there, landing, noise(size)) is None
                    assert np.array_equal(await arrival, noise(size))
                    landing, arrival = land(there, size)
                    assert await push(here, landing, noise(size)) is None
                    assert np.array_equal(await arrival, noise(size))

    on_loop(scenario)


@ways
def test_the_client_dials_again_after_its_connection_broke(way: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(way, tmp_path) as (there, endpoint):
            with client(way, tmp_path) as here:
                for _ in range(3):
                    landing, arrival = land(here, 70_000, endpoint)
                    assert await push(there, landing, noise(70_000)) is None
                    await arrival
                    (dialled,) = here.thread.receiver.dialled.values()
                    dialled.socket.shutdown(socket.SHUT_RDWR)
                    await until_true(lambda: not here.thread.receiver.dialled)
                    await until_true(lambda: not there.thread.by_chunks.receivers)

    on_loop(scenario)


def test_a_push_to_a_client_that_does_not_dial_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host("tls", tmp_path) as (there, _):
            there.thread.by_chunks.awaited_s = 0.1
            landing = Landing(1, 10, 0, "elsewhere", "", "", "0" * 31 + "1")
            outcome = await push(there, landing, noise(10))
            assert isinstance(outcome, TransferFailed)
            assert "has not dialled this host within 0.1 s" in str(outcome)

    on_loop(scenario)


def test_no_other_client_takes_the_place_of_a_plane(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host("tls", tmp_path) as (there, endpoint):
            with client("tls", tmp_path) as good, client("tls", tmp_path) as thief:
                landing, arrival = land(good, 70_000, endpoint)
                assert await push(there, landing, noise(70_000)) is None
                await arrival
                thief.thread.receiver.plane = landing.plane
                thief.thread.dial(endpoint)
                await until_true(lambda: there.counters()["rejected"])
                landing, arrival = land(good, 70_000, endpoint)
                assert await push(there, landing, noise(70_000)) is None
                await arrival

    on_loop(scenario)


# --- who gets in ------------------------------------------------------------------------------------------


def logged(event: str, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether there is an audit line of an event."""
    lines = [record.message for record in caplog.records if record.name == "pw.audit"]
    return any(line.startswith(event) for line in lines)


def _refusals(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """The host's security, the sender's, and what the sender is told."""
    own = issue(folder, Role.WORKER)
    stolen = issue(folder, Role.WORKER)
    (folder / "crl.pem").write_bytes(authority().revoke(stolen.own.serial))
    wary = issue(folder, Role.WORKER, revoked=folder / "crl.pem")
    other = issue(folder, Role.WORKER, of=Authority.create())
    domain = issue(folder, Role.WORKER)
    return {
        "another cluster": ({"credentials": own}, {"credentials": other}, "of another cluster"),
        "revoked": ({"credentials": wary}, {"credentials": stolen}, "is revoked (serial"),
        "no credentials": ({"credentials": own}, {"insecure": True}, "lost"),
        "nothing": ({"credentials": own}, {"insecure": False}, "give it --credentials"),
        "no TLS there": ({"insecure": True}, {"credentials": domain}, "it does not use TLS"),
        "closed": ({"insecure": False}, {"credentials": domain}, "has no credentials"),
        "a client's": (
            {"credentials": issue(folder, Role.CLIENT)},
            {"credentials": domain},
            "not of a worker",
        ),
    }


@pytest.mark.parametrize(
    "what",
    [
        "another cluster",
        "revoked",
        "no credentials",
        "nothing",
        "no TLS there",
        "closed",
        "a client's",
    ],
)
def test_a_sender_is_refused(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pw.audit")
    listener, sender, words = _refusals(tmp_path)[what]

    async def scenario() -> None:
        async with host("tls", tmp_path, **listener) as (there, _):
            with client("tls", tmp_path, **sender) as here:
                landing, arrival = land(there, 70_000)
                outcome = await push(here, landing, noise(70_000))
                assert isinstance(outcome, TransferFailed)
                assert words in str(outcome)
                assert not arrival.done()
                assert there.landed_bytes(landing.transfer) == 0
                if what in ("another cluster", "revoked", "no credentials"):
                    # The sender may know before the host does.
                    await until_true(lambda: logged("refused ", caplog))

    on_loop(scenario)


@pytest.mark.parametrize("who", ["the sender", "the receiver"])
def test_connections_end_when_a_certificate_is_revoked(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pw.transport.bulk.thread.EXPIRE_MS", 1)
    caplog.set_level(logging.INFO, "pw.audit")
    crl = tmp_path / "crl.pem"
    other = issue(tmp_path, Role.WORKER)
    crl.write_bytes(authority().revoke(issue(tmp_path, Role.WORKER).own.serial))
    wary = issue(tmp_path, Role.WORKER, revoked=crl, look_s=0.0)
    first, second = (wary, other) if who == "the sender" else (other, wary)

    async def scenario() -> None:
        async with (
            host("tls", tmp_path, credentials=first) as (there, _),
            host("tls", tmp_path, credentials=second) as (here, _),
        ):
            assert await push(here, land(there, 70_000)[0], noise(70_000)) is None
            crl.write_bytes(authority().revoke(other.own.serial) + b"\n")
            while not isinstance(
                await push(here, land(there, 1000)[0], noise(1000)), TransferFailed
            ):
                pass  # revocations are looked for between two transfers, when there is time
            await until_true(lambda: logged("revoked ", caplog))

    on_loop(scenario)


def test_a_plane_without_credentials_opens_no_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        plane = BulkPlane(asyncio.get_running_loop(), channel="tcp")
        landing, _ = land(plane, 10)
        assert landing.endpoint.startswith("ipc://@")
        plane.close()

    on_loop(scenario)


# --- strangers and slow senders ---------------------------------------------------------------------------


def dialled(endpoint: str) -> socket.socket:
    place = parse(endpoint)
    connection = socket.socket(place.family)
    connection.connect(place.address)
    connection.setblocking(False)
    return connection


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("said", [b"", b"p", b"pwc4", b"\x16\x03", b"GET /"])
def test_strangers_are_dropped(said: bytes, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host("tls", tmp_path, {"handshake_s": 0.3}) as (_, endpoint):
            connection = dialled(endpoint)
            connection.send(said)
            await until_true(lambda: ended(connection))
            connection.close()

    on_loop(scenario)


def test_the_handshake_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host("tls", tmp_path) as (_, endpoint):
            connection = dialled(endpoint)
            connection.setblocking(True)
            # A record of a handshake that goes on and on.
            record = b"\x16\x03\x01\x40\x00" + b"\x01\x00\xff\xff" + bytes((1 << 14) - 4)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(connection.sendall, 64 * record)
            connection.setblocking(False)
            await until_true(lambda: ended(connection))
            connection.close()

    on_loop(scenario)


def test_a_sender_that_brings_a_byte_now_and_then_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_receiver, "SILENCE_S", 0.5)

    async def scenario() -> None:
        async with host("plain", tmp_path) as (there, endpoint):
            landing, arrival = land(there, 1 << 20)
            connection = dialled(endpoint)
            head = chunks.header(chunks.CHUNK, landing.transfer, 0, 1 << 20)
            connection.send(head)

            def is_over() -> bool:
                with contextlib.suppress(OSError):
                    connection.send(b"x")
                return ended(connection)

            await until_true(is_over)
            connection.close()
            assert not arrival.done()
            assert there.counters()["rejected"] == 1

    on_loop(scenario)


def test_replies_that_are_not_read_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host("plain", tmp_path) as (there, endpoint):
            there.thread.receiver.unread_reply_bytes = 1 << 16
            connection = dialled(endpoint)
            connection.setblocking(True)
            connection.settimeout(WAIT_S)
            ask = chunks.header(chunks.FINISH, 7) * 4096

            def flood() -> None:
                for _ in range(1000):
                    connection.sendall(ask)

            with pytest.raises(ConnectionError):
                await asyncio.to_thread(flood)
            connection.close()
            assert not there.thread.receiver.callers

    on_loop(scenario)


@pytest.mark.parametrize("bound", ["of an address", "in all"])
def test_hundreds_of_slow_strangers_keep_no_good_sender_out(bound: str, tmp_path: Path) -> None:
    bounds = {"most": 64, "most_of_address": 32 if bound == "of an address" else 500}

    async def scenario() -> None:
        async with (
            host("tls", tmp_path, bounds) as (there, endpoint),
            host("tls", tmp_path) as (here, _),
        ):
            slow = []
            for number in range(400):
                connection = dialled(endpoint)
                connection.send((b"", b"\x16")[number % 2])
                slow.append(connection)
                if number % 20 == 0:
                    await asyncio.sleep(0)
            assert await push(here, land(there, 9 << 20)[0], noise(9 << 20)) is None
            await until_true(lambda: sum(not ended(connection) for connection in slow) <= 64)
            for connection in slow:
                connection.close()

    on_loop(scenario)
