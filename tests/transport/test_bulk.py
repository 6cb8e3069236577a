"""The bulk plane: what is pushed is what lands, on either channel, and nothing else ever does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import hashlib
import os
import resource
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgspec
import numpy as np
import pytest
import uvloop

from pw.core.errors import OutOfHostMemory, TransferFailed
from pw.core.landing import Landing
from pw.core.messages.roles import Role
from pw.transport.access.credentials import Credentials
from pw.transport.bulk import chunks, shared, shared_receiver, shared_sender
from pw.transport.bulk.blocks import BlockPool, size_class
from pw.transport.bulk.pieces import cut, packed
from pw.transport.bulk.plane import BulkPlane
from tests.stages.cluster import authority
from tests.stages.daemons import until_true
from tests.stages.programs import ROOT, start, without_address
from tests.stages.samples import long

WAIT_S = 60.0
CHANNELS = ["shared", "tcp", "tls"]
"""`tls` is the channel `tcp` with credentials."""
SIZES = [0, 1, 63, 64, shared.ON_SOCKET_BYTES, shared.ON_SOCKET_BYTES + 1]
SIZES += [(64 << 10) - 1, 64 << 10, (64 << 10) + 1, 5 << 20]

channels = pytest.mark.parametrize("channel", CHANNELS)


def on_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), WAIT_S))  # type: ignore[arg-type]


@functools.cache
def own_file(role: Role = Role.WORKER) -> Path:
    file = Path(tempfile.mkdtemp()) / "own.pem"
    file.touch(0o600)
    tenant = "research" if role is Role.CLIENT else ""
    file.write_bytes(authority().issue(role, "bulk", tenant))
    return file


def made(channel: str, role: Role = Role.WORKER, **options: Any) -> BulkPlane:
    if channel == "tls":
        options.setdefault("credentials", Credentials.read(own_file(role)))
    elif channel == "tcp":
        options.setdefault("insecure", True)
    channel = "tcp" if channel == "tls" else channel
    return BulkPlane(asyncio.get_running_loop(), channel=channel, **options)


@contextlib.asynccontextmanager
async def planes(channel: str, **options: Any) -> AsyncIterator[tuple[BulkPlane, BulkPlane]]:
    """A sender and a receiver."""
    sender, receiver = made(channel, **options), made(channel, **options)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def land(plane: BulkPlane, size_bytes: int) -> tuple[Landing, asyncio.Future[Any]]:
    arrival = asyncio.get_running_loop().create_future()
    return plane.land(size_bytes, arrival.set_result), arrival


def push(plane: BulkPlane, landing: Landing, *parts: tuple[int, Any]) -> asyncio.Future[Any]:
    outcome = asyncio.get_running_loop().create_future()
    plane.push(landing, parts, outcome.set_result)
    return outcome


async def moved(sender: BulkPlane, receiver: BulkPlane, array: np.ndarray[Any, Any]) -> Any:
    landing, arrival = land(receiver, array.nbytes)
    assert await push(sender, landing, (0, array)) is None
    return await arrival


def noise(size_bytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


# What arrives


@channels
@pytest.mark.parametrize("size_bytes", SIZES)
def test_round_trip(channel: str, size_bytes: int) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            source = noise(size_bytes)
            target = await moved(sender, receiver, source)
            assert target.dtype == np.uint8
            assert target.shape == (size_bytes,)
            assert size_bytes == 0 or target.ctypes.data % 64 == 0
            assert np.array_equal(target, source)
            assert sender.counters()["sent_bytes"] == size_bytes
            assert receiver.counters()["received_bytes"] == size_bytes

    on_loop(scenario)


@channels
@pytest.mark.parametrize(
    "source",
    [
        np.arange(600_000, dtype=np.float32).reshape(600, 1000).T,
        np.arange(600_000, dtype=np.float64).reshape(60, 100, 100)[::2, 5:, ::-3],
        np.asfortranarray(np.arange(1 << 19, dtype=np.int32).reshape(1, 2, -1)),
        np.arange(100_000, dtype=np.float32).astype(ml_dtypes.bfloat16)[::7],
        np.arange(100_000).astype(ml_dtypes.float8_e4m3fn).reshape(10, -1).T,
        np.arange(100_000).astype(ml_dtypes.int4),
        np.arange(100_000, dtype=np.complex128)[::-1],
        np.arange(50_000, dtype=">i8"),
        np.ones((3, 40_000), np.bool_)[:, ::2],
        np.array(3.5, np.float16),
        np.array(2.5).astype(ml_dtypes.bfloat16),
        np.empty((4, 0, 3)),
        np.broadcast_to(np.float32(7), (300, 300)),
    ],
    ids=lambda source: f"{source.dtype}-{'x'.join(map(str, source.shape))}",
)
def test_any_array_travels_in_row_major_order(channel: str, source: Any) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            assert (await moved(sender, receiver, source)).tobytes() == source.tobytes()

    on_loop(scenario)


@channels
def test_parts_go_to_their_offsets(channel: str) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            head, tail = noise(100_001, 1), noise(3_000_000, 2)[::2]
            landing, arrival = land(receiver, 2_000_000)
            await push(sender, landing, (300_000, tail), (64, head), (5, np.empty(0)))
            target = await arrival
            assert np.array_equal(target[64 : 64 + head.size], head)
            assert np.array_equal(target[300_000 : 300_000 + tail.size], tail)

    on_loop(scenario)


@channels
def test_many_transfers_at_once(channel: str) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            sources = [noise(size, size) for size in range(1, 3_000_000, 37_111)]
            landed = [land(receiver, source.size) for source in sources]
            outcomes = [
                push(sender, landing, (0, source))
                for (landing, _), source in zip(landed, sources, strict=True)
            ]
            assert set(await asyncio.gather(*outcomes)) == {None}
            for (_, arrival), source in zip(landed, sources, strict=True):
                assert np.array_equal(await arrival, source)

    on_loop(scenario)


def test_pieces_are_bounded_and_complete() -> None:
    source = np.arange(2 * 3 * 5 * 7, dtype=np.int16).reshape(2, 3, 5, 7).transpose(0, 3, 1, 2)
    target = np.zeros(source.nbytes, np.uint8)
    for offset, piece in cut([(0, source)], 16):
        assert piece.nbytes <= 16
        target[offset : offset + piece.nbytes] = packed(piece)
    assert target.tobytes() == source.tobytes()


def test_a_landing_travels_in_a_message() -> None:
    landing = Landing(2**63 - 1, 10, 3, "machine", "socket", "tcp://[::1]:1")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(landing), type=Landing) == landing


# Between two processes


CHILD = """
import asyncio, hashlib, sys, uvloop
from multiprocessing.connection import Connection
from pathlib import Path
from pw.transport.access.credentials import Credentials
from pw.transport.bulk.plane import BulkPlane

async def serve(channel, own):
    loop, pipe = asyncio.get_running_loop(), Connection(0)
    how = {"shared": {}, "tcp": {"insecure": True}, "tls": {"credentials": Credentials.read(Path(own))}}
    plane = BulkPlane(loop, channel=channel.replace("tls", "tcp"), **how[channel])
    landings, arrivals = [], []
    for size in await loop.run_in_executor(None, pipe.recv):
        arrivals.append(loop.create_future())
        landings.append(plane.land(size, arrivals[-1].set_result))
    pipe.send(landings)
    for arrival in arrivals:
        pipe.send(hashlib.sha256(await arrival).hexdigest())
    await loop.run_in_executor(None, pipe.recv)
    plane.close()

uvloop.run(serve(*sys.argv[1:]))
"""
"""Lands what the test asks for; answers with landings, then with digests."""


@pytest.fixture
def child(channel: str) -> Iterator[tuple[Any, Connection]]:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = ["-c", CHILD, channel, str(own_file())]
        process = start(arguments, without_address(), ROOT, (theirs.fileno(), 1, 2))
    pipe = Connection(ours.detach())
    yield process, pipe
    pipe.close()
    process.kill()
    process.wait()


async def _say(pipe: Connection, question: object) -> Any:
    pipe.send(question)
    return await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


@pytest.mark.parametrize("channel", ["shared", long("tcp"), "tls"])
@pytest.mark.processes
def test_round_trips_between_processes(channel: str, child: tuple[Any, Connection]) -> None:
    _, pipe = child

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        plane = made(channel)
        sources = [noise(size, size) for size in SIZES]
        landings = await _say(pipe, SIZES)
        pairs = zip(landings, sources, strict=True)
        outcomes = [push(plane, landing, (0, source)) for landing, source in pairs]
        assert set(await asyncio.gather(*outcomes)) == {None}
        for source in sources:
            digest = await loop.run_in_executor(None, pipe.recv)
            assert digest == hashlib.sha256(source).hexdigest()
        pipe.send(None)
        plane.close()

    on_loop(scenario)


@pytest.mark.parametrize("channel", ["shared", long("tcp"), "tls"])
@pytest.mark.processes
def test_a_killed_receiver_fails_the_push(channel: str, child: tuple[Any, Connection]) -> None:
    process, pipe = child

    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            first, second, third = await _say(pipe, [5 << 20, 5 << 20, 5 << 20])
            assert await push(sender, first, (0, noise(5 << 20))) is None
            process.kill()
            process.wait()
            for landing in (second, third):
                assert isinstance(await push(sender, landing, (0, noise(5 << 20))), TransferFailed)
            assert (await moved(sender, receiver, noise(100_000))).size == 100_000

    on_loop(scenario)


# What must not arrive


@channels
@pytest.mark.parametrize("size_bytes", [1000, 200_000])
def test_a_cancelled_landing_is_never_delivered(channel: str, size_bytes: int) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            landing, arrival = land(receiver, size_bytes)
            receiver.cancel(landing.transfer)
            receiver.cancel(landing.transfer)
            outcome = await push(sender, landing, (0, noise(size_bytes)))
            # A small one leaves with its bytes, so its sender does not learn of the cancellation.
            assert isinstance(outcome, TransferFailed) or landing.block == 0
            assert (await moved(sender, receiver, noise(70_000))).size == 70_000
            assert not arrival.done()
            assert receiver.counters()["expected_transfers"] == 0

    on_loop(scenario)


def test_a_cancelled_block_is_not_reused_while_a_sender_has_it() -> None:
    async def scenario() -> None:
        async with planes("shared") as (sender, receiver):
            await moved(sender, receiver, noise(70_000))  # the sender has mapped the block
            landing, arrival = land(receiver, 70_000)
            outcome = push(sender, landing, (0, noise(70_000)))
            receiver.cancel(landing.transfer)
            await outcome
            other, _ = land(receiver, 70_000)
            assert other.block != landing.block
            assert not arrival.done()

    on_loop(scenario)


def test_a_landing_that_no_sender_uses_is_used_again() -> None:
    async def scenario() -> None:
        async with planes("shared") as (sender, receiver):
            landing, arrival = land(receiver, 70_000)
            receiver.cancel(landing.transfer, unused=True)
            other, _ = land(receiver, 70_000)
            assert other.block == landing.block
            assert isinstance(await push(sender, landing, (0, noise(70_000))), TransferFailed)
            assert (await moved(sender, receiver, noise(70_000))).size == 70_000
            assert not arrival.done()

    on_loop(scenario)


@channels
@pytest.mark.parametrize("size_bytes", [1000, 50_000])
def test_fewer_bytes_than_the_landing_has(channel: str, size_bytes: int) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            data = noise(size_bytes)
            landing, arrival = land(receiver, 20 << 20)
            assert await push(sender, landing, (0, data[:500]), (512, data[500:])) is None
            found = await arrival
            assert found.size == 20 << 20
            np.testing.assert_array_equal(found[:500], data[:500])
            np.testing.assert_array_equal(found[512 : 12 + size_bytes], data[500:])

    on_loop(scenario)


@channels
def test_a_landing_is_good_for_one_transfer(channel: str) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            landing, arrival = land(receiver, 70_000)
            assert await push(sender, landing, (0, noise(70_000, 1))) is None
            target = await arrival
            again = await push(sender, landing, (0, noise(70_000, 2)))
            assert isinstance(again, TransferFailed)
            assert np.array_equal(target, noise(70_000, 1))

    on_loop(scenario)


@channels
@pytest.mark.parametrize(
    ("offset", "part", "error"),
    [
        (-1, np.zeros(4), ValueError),
        (999, np.zeros(4), ValueError),
        (0, np.zeros(4, object), TypeError),
    ],
)
def test_parts_that_cannot_land(channel: str, offset: int, part: Any, error: type) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            landing, arrival = land(receiver, 1000)
            assert isinstance(await push(sender, landing, (offset, part)), error)
            assert not arrival.done()

    on_loop(scenario)


@channels
@pytest.mark.parametrize("size_bytes", [100, 100_000])
def test_no_receiver_at_all(channel: str, size_bytes: int) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            landing, _ = land(receiver, size_bytes)
            receiver.close()
            outcome = await push(sender, landing, (0, noise(size_bytes)))
            assert isinstance(outcome, TransferFailed)
            with pytest.raises(TransferFailed):
                receiver.land(1, print)

    on_loop(scenario)


def test_planes_without_a_common_channel() -> None:
    async def scenario() -> None:
        sender, receiver = made("tcp"), made("shared")
        landing, _ = land(receiver, 10)
        outcome = await push(sender, landing, (0, noise(10)))
        assert isinstance(outcome, TransferFailed)
        assert "PW_BULK" in str(outcome)
        sender.close()
        receiver.close()

    on_loop(scenario)


@channels
def test_closing_a_plane_fails_its_pushes(channel: str) -> None:
    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):
            outcomes = [
                push(sender, land(receiver, 5 << 20)[0], (0, noise(5 << 20))) for _ in range(20)
            ]
            sender.close()
            for outcome in await asyncio.gather(*outcomes):
                assert outcome is None or isinstance(outcome, TransferFailed)
            late = await push(sender, land(receiver, 5)[0], (0, noise(5)))
            assert isinstance(late, TransferFailed)

    on_loop(scenario)


# Garbage


def _unix_garbage(transfer: int, block: int) -> dict[str, bytes]:
    return {
        "noise": bytes(noise(1000)),
        "an unknown record": shared.record(99, 1),
        "a record for senders": shared.record(shared.BLOCK, 1, 1 << 20),
        "too long an inline transfer": shared.record(shared.INLINE, 1, 1 << 40),
        "pages without a descriptor": shared.record(shared.SHARE, transfer, 1 << 20),
        "inline bytes for a block": shared.record(shared.INLINE, transfer, 8) + b"12345678",
        "finishing what it never mapped": shared.record(shared.FINISH, transfer, block),
    }


@pytest.mark.parametrize("what", list(_unix_garbage(1, 1)))
def test_garbage_closes_its_own_unix_connection_only(what: str) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with planes("shared") as (sender, receiver):
            landing, arrival = land(receiver, 100_000)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.setblocking(False)
                stranger.connect(f"\0{landing.socket}")
                line = _unix_garbage(landing.transfer, landing.block)[what]
                await loop.sock_sendall(stranger, line)
                with contextlib.suppress(ConnectionResetError):  # some of it may be unread
                    assert await loop.sock_recv(stranger, 100) == b""
            assert receiver.counters()["rejected"] == 1
            assert not arrival.done()
            assert await push(sender, landing, (0, noise(100_000))) is None
            assert np.array_equal(await arrival, noise(100_000))

    on_loop(scenario)


def test_a_receiver_that_talks_garbage_fails_the_push() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with planes("shared") as (sender, receiver):
            landing, _ = land(receiver, 100_000)
            with socket.socket(socket.AF_UNIX) as impostor:
                impostor.setblocking(False)
                impostor.bind("\0pw-test-" + os.urandom(8).hex())
                impostor.listen()
                name = impostor.getsockname()[1:].decode()
                fields = {**msgspec.structs.asdict(landing), "socket": name}
                outcomes = []
                for answer in (
                    bytes(noise(100)),
                    shared.record(shared.BLOCK, landing.block, 1 << 17),  # no descriptor
                    b"",
                ):
                    outcomes.append(push(sender, Landing(**fields), (0, noise(100_000))))
                    connection, _ = await loop.sock_accept(impostor)
                    with connection:
                        await loop.sock_sendall(connection, answer)
                    assert isinstance(await outcomes[-1], TransferFailed)

    on_loop(scenario)


def _tcp_garbage(transfer: int) -> dict[str, bytes]:
    def head(kind: int, which: int, offset: int, length: int, magic: bytes = chunks.MAGIC) -> bytes:
        return struct.pack("<4sIQQQ", magic, kind, which, offset, length)

    return {
        "noise": bytes(noise(32)),
        "another protocol": head(chunks.CHUNK, transfer, 0, 8, b"pwc1") + b"12345678",
        "an unknown kind": head(77, transfer, 0, 8) + b"12345678",
        "a sender's own reply": head(chunks.ACK, transfer, 0, 0),
        "an unknown transfer": head(chunks.CHUNK, transfer ^ 1, 0, 8) + b"12345678",
        "an offset beyond the end": head(chunks.CHUNK, transfer, 1 << 40, 8) + b"12345678",
        "an offset that wraps": head(chunks.CHUNK, transfer, 2**64 - 8, 8) + b"12345678",
        "a tail beyond the end": head(chunks.CHUNK, transfer, 99_999, 8) + b"12345678",
        "too long a chunk": head(chunks.CHUNK, transfer, 0, chunks.CHUNK_BYTES + 1) + b"12345678",
        "an empty chunk": head(chunks.CHUNK, transfer, 0, 0),
        "a finish too early": head(chunks.FINISH, transfer, 0, 100_000),
    }


@contextlib.asynccontextmanager
async def stranger(landing: Landing) -> AsyncIterator[socket.socket]:
    """A connection of a program that talks to a receiver directly."""
    host, _, port = landing.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket() as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        yield connection


def chunk(transfer: int, payload: bytes, offset: int = 0) -> bytes:
    return chunks.header(chunks.CHUNK, transfer, offset, len(payload)) + payload


@pytest.mark.parametrize("what", list(_tcp_garbage(2)))
def test_garbage_chunks_are_counted_and_dropped(what: str) -> None:
    async def scenario() -> None:
        async with planes("tcp") as (sender, receiver):
            landing, arrival = land(receiver, 100_000)
            async with stranger(landing) as connection:
                line = _tcp_garbage(landing.transfer)[what]
                await asyncio.get_running_loop().sock_sendall(connection, line)
                await until_true(lambda: receiver.counters()["rejected"] == 1)
            assert not arrival.done()
            assert await push(sender, landing, (0, noise(100_000))) is None
            assert np.array_equal(await arrival, noise(100_000))

    on_loop(scenario)


def test_bytes_that_are_refused_do_not_end_a_connection() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with planes("tcp") as (_, receiver):
            gone, _ = land(receiver, 100_000)
            wanted, arrival = land(receiver, 100_000)
            receiver.cancel(gone.transfer)
            async with stranger(wanted) as connection:
                for transfer in (gone.transfer, wanted.transfer):
                    await loop.sock_sendall(connection, chunk(transfer, bytes(noise(100_000))))
                end = chunks.header(chunks.FINISH, wanted.transfer, 0, 100_000)
                await loop.sock_sendall(connection, end)
                assert np.array_equal(await arrival, noise(100_000))
                answers = b""
                while len(answers) < 64:
                    answers += await loop.sock_recv(connection, 100)
            assert answers == chunks.header(chunks.REFUSE, gone.transfer) + chunks.header(
                chunks.ACK, wanted.transfer
            )

    on_loop(scenario)


def test_a_transfer_belongs_to_the_connection_that_began_it() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with planes("tcp") as (sender, receiver):
            landing, arrival = land(receiver, 100_000)
            async with stranger(landing) as connection:
                await loop.sock_sendall(connection, chunk(landing.transfer, b"12345678"))
                await until_true(lambda: receiver.landed_bytes(landing.transfer) == 8)
                outcome = await push(sender, landing, (0, noise(100_000)))
                assert isinstance(outcome, TransferFailed)
            assert not arrival.done()

    on_loop(scenario)


def test_a_sender_that_dies_half_way_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with planes("tcp") as (sender, receiver):
            landing, arrival = land(receiver, 100_000)
            async with stranger(landing) as connection:
                line = chunk(landing.transfer, bytes(noise(100_000)))
                await loop.sock_sendall(connection, line[:50_000])
                await until_true(lambda: receiver.landed_bytes(landing.transfer) > 0)
            receiver.cancel(landing.transfer)
            assert (await moved(sender, receiver, noise(70_000))).size == 70_000
            assert not arrival.done()
            assert receiver.counters()["expected_transfers"] == 0
            gc.collect()
            await until_true(lambda: receiver.counters()["lent_blocks"] == 0)
            assert receiver.counters()["live_blocks"] == 1

    on_loop(scenario)


def test_a_landing_that_is_cancelled_half_way_is_refused() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with planes("tcp") as (_, receiver):
            landing, arrival = land(receiver, 100_000)
            async with stranger(landing) as connection:
                line = chunk(landing.transfer, bytes(noise(100_000)))
                await loop.sock_sendall(connection, line[:50_000])
                await until_true(lambda: receiver.landed_bytes(landing.transfer) > 0)
                receiver.cancel(landing.transfer)
                await loop.sock_sendall(connection, line[50_000:])
                answer = await loop.sock_recv(connection, 100)
            assert answer == chunks.header(chunks.REFUSE, landing.transfer)
            assert not arrival.done()

    on_loop(scenario)


class _Silent:
    """A receiver that takes what is sent to it and says only what it is told to."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        host, port = self.listener.getsockname()
        self.endpoint = f"tcp://{host}:{port}"

    def landing(self, transfer: int, size_bytes: int) -> Landing:
        return Landing(transfer, size_bytes, 0, "elsewhere", "", self.endpoint)

    async def accepted(self) -> socket.socket:
        connection, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        return connection


async def _read(connection: socket.socket, size_bytes: int) -> bytearray:
    received = bytearray()
    while len(received) < size_bytes:
        more = await asyncio.get_running_loop().sock_recv(connection, size_bytes - len(received))
        assert more
        received += more
    return received


async def _transfers_until(connection: socket.socket, last: int) -> list[int]:
    """The transfers whose chunks come, one after the other, until one of them is finished."""
    order: list[int] = []
    while True:
        head = struct.unpack("<4sIQQQ", await _read(connection, 32))
        _, kind, transfer, _, length = head
        if kind == chunks.FINISH and transfer == last:
            return order
        if kind == chunks.CHUNK:
            order.append(transfer)
            await _read(connection, length)


def test_a_small_transfer_is_not_stuck_behind_large_ones() -> None:
    async def scenario() -> None:
        large = noise(16 * chunks.CHUNK_BYTES)
        async with planes("tcp") as (sender, _):
            receiver = _Silent()
            with receiver.listener:
                outcomes = [
                    push(sender, receiver.landing(n, large.size), (0, large)) for n in (1, 2)
                ]
                with await receiver.accepted() as connection:
                    await _read(connection, 32 + chunks.CHUNK_BYTES)
                    outcomes.append(push(sender, receiver.landing(3, 100), (0, noise(100))))
                    # What is under way in the sockets is before it, but not what is in no socket yet.
                    order = await _transfers_until(connection, 3)
                    assert order.count(1) + order.count(2) < 16
                for outcome in await asyncio.gather(*outcomes):
                    assert isinstance(outcome, TransferFailed)  # it hung up

    on_loop(scenario)


@pytest.mark.parametrize("answer", [bytes(32), chunks.header(chunks.CHUNK, 1), b""])
def test_a_tcp_receiver_that_talks_garbage_fails_the_push(answer: bytes) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with planes("tcp") as (sender, _):
            receiver = _Silent()
            with receiver.listener:
                outcome = push(sender, receiver.landing(1, 100_000), (0, noise(100_000)))
                with await receiver.accepted() as connection:
                    await loop.sock_sendall(connection, answer)
                assert isinstance(await outcome, TransferFailed)

    on_loop(scenario)


def test_a_refused_transfer_is_sent_no_further() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        large = noise(16 * chunks.CHUNK_BYTES)
        async with planes("tcp") as (sender, _):
            receiver = _Silent()
            with receiver.listener:
                refused = push(sender, receiver.landing(1, large.size), (0, large))
                with await receiver.accepted() as connection:
                    await loop.sock_sendall(connection, chunks.header(chunks.REFUSE, 1))
                    wanted = push(sender, receiver.landing(2, large.size), (0, large))
                    order = await _transfers_until(connection, 2)
                    assert order.count(1) < 16
                    assert order.count(2) == 16
                    await loop.sock_sendall(connection, chunks.header(chunks.ACK, 2))
                    assert isinstance(await refused, TransferFailed)
                    assert await wanted is None

    on_loop(scenario)


# Memory


def test_a_block_is_reused_only_when_nobody_aliases_it() -> None:
    async def scenario() -> None:
        async with planes("shared") as (sender, receiver):
            values = np.arange(50_000, dtype=np.float32)
            buffer = await moved(sender, receiver, values)
            address = buffer.ctypes.data
            device = jax.devices("cpu")[0]
            array = jax.device_put(buffer.view(np.float32)[:].reshape(500, 100), device)
            assert array.unsafe_buffer_pointer() == address
            del buffer
            gc.collect()
            assert receiver.counters()["lent_blocks"] == 1
            other = await moved(sender, receiver, values + 1)
            assert other.ctypes.data != address
            assert np.array_equal(np.asarray(array).ravel(), values)
            array.block_until_ready()
            del array, other
            gc.collect()
            await until_true(lambda: receiver.counters()["lent_blocks"] == 0)
            both = [await moved(sender, receiver, values) for _ in range(2)]
            assert address in {buffer.ctypes.data for buffer in both}
            assert receiver.counters()["live_blocks"] == 2

    on_loop(scenario)


@contextlib.asynccontextmanager
async def three_planes() -> AsyncIterator[tuple[BulkPlane, BulkPlane, BulkPlane]]:
    async with planes("shared") as (first, second), planes("shared") as (third, _):
        yield first, second, third


LARGE = shared.SHARE_BYTES


async def no_lent_blocks(plane: BulkPlane) -> None:
    gc.collect()
    await until_true(lambda: plane.counters()["lent_blocks"] == 0)


def test_what_lies_in_a_block_is_shared_and_not_copied() -> None:
    async def scenario() -> None:
        async with three_planes() as (first, second, third):
            source = noise(LARGE)
            landed = await moved(first, second, source)
            array = jax.device_put(landed, jax.devices("cpu")[0])
            shared_array = await moved(second, third, np.asarray(array))
            assert second.counters()["shared_bytes"] == LARGE
            assert np.array_equal(shared_array, source)
            assert shared_array.ctypes.data % 64 == 0
            assert not shared_array.flags.writeable
            del landed, array
            # This process reads it no more, but the other one does.
            other = await moved(first, second, noise(LARGE, 1))
            assert np.array_equal(shared_array, source)
            assert second.counters()["live_blocks"] == 2
            del shared_array, other
            await no_lent_blocks(third)
            await until_true(lambda: second.counters()["pooled_bytes"] == 2 * LARGE)
            assert second.counters()["live_blocks"] == 2

    on_loop(scenario)


def test_shared_pages_outlive_the_plane_that_shared_them() -> None:
    async def scenario() -> None:
        async with three_planes() as (first, second, third):
            source = noise(LARGE)
            landed = await moved(first, second, source)
            shared_array = await moved(second, third, landed)
            second.close()
            del landed
            gc.collect()
            assert np.array_equal(shared_array, source)

    on_loop(scenario)


def test_pages_that_never_come_back_are_not_used_again() -> None:
    async def scenario() -> None:
        async with three_planes() as (first, second, third):
            source = noise(LARGE)
            landed = await moved(first, second, source)
            shared_array = await moved(second, third, landed)
            third.close()
            del landed
            gc.collect()
            await until_true(lambda: second.counters()["live_blocks"] == 0)
            await moved(first, second, noise(LARGE, 1))
            assert np.array_equal(shared_array, source)

    on_loop(scenario)


def test_a_forked_process_goes_on_reading_what_was_lent() -> None:
    """As `multiprocessing` does with what `pw.get` has returned, where it forks."""
    pool = BlockPool(1 << 30, lambda number: None)
    array = pool.lend(pool.lease(LARGE, 1), LARGE)
    array[:] = 1
    read, write = os.pipe()
    child = os.fork()
    if not child:
        is_unchanged = False
        try:
            os.close(write)
            os.read(read, 1)
            is_unchanged = bool((array == 1).all())
        finally:
            os._exit(0 if is_unchanged else 1)
    del array
    pool.reclaim()
    assert pool.live_blocks == 0
    later = pool.lease(LARGE, 2)
    later.bytes[:] = 2
    os.write(write, b"!")
    os.close(read)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.restore(later)
    assert pool.lease(LARGE, 3) is later  # it was made after the fork
    pool.close()


def test_shared_pages_are_not_used_again_once_their_reader_has_forked() -> None:
    async def scenario() -> None:
        async with three_planes() as (first, second, third):
            landed = await moved(first, second, noise(LARGE))
            shared_array = await moved(second, third, landed)
            del landed
            await no_lent_blocks(second)
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            del shared_array
            await no_lent_blocks(third)
            await until_true(lambda: second.counters()["live_blocks"] == 0 or _is_idle(second))
            assert not _is_idle(second)

    on_loop(scenario)


def _is_idle(plane: BulkPlane) -> bool:
    return plane.counters()["pooled_bytes"] > 0


def test_shared_pages_for_a_cancelled_landing_come_back() -> None:
    async def scenario() -> None:
        async with three_planes() as (first, second, third):
            landed = await moved(first, second, noise(LARGE))
            landing, arrival = land(third, LARGE)
            third.cancel(landing.transfer)
            assert await push(second, landing, (0, landed)) is None
            await until_true(lambda: third.counters()["late_transfers"] == 1)
            del landed
            gc.collect()
            await until_true(lambda: second.counters()["pooled_bytes"] == LARGE)
            assert not arrival.done()

    on_loop(scenario)


def test_one_block_is_shared_with_many() -> None:
    async def scenario() -> None:
        async with three_planes() as (first, second, third):
            source = noise(LARGE)
            landed = await moved(first, second, source)
            arrays = [await moved(second, third, landed) for _ in range(5)]
            assert all(np.array_equal(array, source) for array in arrays)
            await moved(second, third, landed[: LARGE // 2])  # a part of it is copied
            assert second.counters()["shared_bytes"] == 5 * LARGE
            del landed
            while arrays:
                gc.collect()
                assert second.counters()["pooled_bytes"] == 0
                arrays.pop()
            await no_lent_blocks(third)
            await until_true(lambda: second.counters()["pooled_bytes"] == LARGE)

    on_loop(scenario)


@channels
def test_idle_memory_is_bounded(channel: str) -> None:
    async def scenario() -> None:
        async with planes(channel, pool_bytes=1 << 20) as (sender, receiver):
            held = [await moved(sender, receiver, noise(300_000)) for _ in range(6)]
            assert receiver.counters()["live_blocks"] == 6
            held.clear()
            gc.collect()
            # The loop itself holds the last future until the callback it runs has returned.
            await until_true(lambda: receiver.counters()["lent_blocks"] == 0)
            counters = receiver.counters()
            assert counters["pooled_bytes"] == 1 << 20
            assert counters["live_blocks"] == 2
            assert (await moved(sender, receiver, noise(3_000_000))).size == 3_000_000
            gc.collect()
            assert receiver.counters()["pooled_bytes"] <= 1 << 20

    on_loop(scenario)


def test_the_longest_idle_block_is_dropped_first() -> None:
    dropped: list[int] = []
    pool = BlockPool(3 << 16, dropped.append)
    leases = [pool.lease(1 << 16, number) for number in range(1, 5)]
    arrays = [pool.lend(block, 10) for block in leases]
    while arrays:
        del arrays[0]
    pool.reclaim()
    assert dropped == [1]
    assert pool.lease(1, 9).number == 4  # the most recently used, so the warmest
    pool.close()


# Descriptors


def _no_descriptors(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_where_no_descriptors_are_left_bytes_come_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _no_descriptors)

    async def scenario() -> None:
        async with planes("auto") as (sender, receiver):
            source = noise(1 << 20)
            target = await moved(sender, receiver, source)
            assert np.array_equal(target, source)
            assert target.ctypes.data % 64 == 0
            assert receiver.counters()["live_blocks"] == 0
            assert np.array_equal(await moved(sender, receiver, source[:10]), source[:10])

    on_loop(scenario)


def test_without_tcp_too_few_descriptors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _no_descriptors)

    async def scenario() -> None:
        async with planes("shared") as (_, receiver):
            with pytest.raises(OutOfHostMemory, match="Too many open files"):
                land(receiver, 1 << 20)

    on_loop(scenario)


def test_blocks_leave_descriptors_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8, 8))

    async def scenario() -> None:
        async with planes("auto") as (sender, receiver):
            sources = [noise(100_000, seed) for seed in range(6)]
            held = [await moved(sender, receiver, source) for source in sources]
            assert all(map(np.array_equal, held, sources))
            assert receiver.counters()["live_blocks"] == 4
            held.clear()
            await no_lent_blocks(receiver)
            again = [await moved(sender, receiver, source) for source in sources]
            assert receiver.counters()["live_blocks"] == 4, "those are used again"
            probe = receiver.land(100_000, lambda _: None)
            assert probe.block <= 4, "blocks are numbered as they are made"
            again.clear()
            await no_lent_blocks(receiver)
            larger = [await moved(sender, receiver, noise(1 << 20)) for _ in range(4)]
            assert receiver.counters()["lent_blocks"] == len(larger), "what is idle makes room"

    on_loop(scenario)


@contextlib.contextmanager
def exhausted() -> Iterator[None]:
    """This process has as many descriptors as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    more: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        with contextlib.suppress(OSError):
            while True:
                more.append(os.dup(0))
        yield
    finally:
        for descriptor in more:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pages_whose_descriptor_is_lost_are_copied() -> None:
    async def scenario() -> None:
        async with three_planes() as (first, second, third):
            landed = await moved(first, second, noise(LARGE))
            await moved(second, third, noise(LARGE, 1))
            await no_lent_blocks(third)  # so the second has mapped what the third lies in next
            with exhausted():
                copied = await moved(second, third, landed)
            assert np.array_equal(copied, landed)
            assert second.counters()["lent_blocks"] == 1
            del landed
            await until_true(lambda: _is_idle(second))
            assert third.counters()["rejected"] == 0
            assert third.counters()["lent_blocks"] == 1

    on_loop(scenario)


def test_a_receiver_without_descriptors_accepts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_receiver, "NO_DESCRIPTORS_S", 0.05)

    async def scenario() -> None:
        asked: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, report: asked.append(report))
        async with planes("shared") as (sender, receiver):
            landing, _ = land(receiver, 100_000)
            with socket.socket(socket.AF_UNIX) as stranger:
                with exhausted():
                    stranger.connect(f"\0{landing.socket}")
                    await until_true(lambda: receiver.counters()["rejected"] > 0)
            source = noise(1000)
            assert np.array_equal(await moved(sender, receiver, source), source)
        assert asked == []

    on_loop(scenario)


def test_idle_blocks_give_up_their_descriptors_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    pool = BlockPool(1 << 30, dropped.append)
    leases = [pool.lease(1 << 16, number) for number in range(1, 4)]
    for block in leases[:2]:
        pool.restore(block)
    real = os.memfd_create
    monkeypatch.setattr(
        os, "memfd_create", lambda *how: (_no_descriptors if pool.pooled_bytes else real)(*how)
    )
    pool.lease(1 << 20, 4)
    assert dropped == [1, 2]
    assert pool.live_blocks == 2
    pool.close()


@pytest.mark.parametrize(
    ("size_bytes", "capacity_bytes"),
    [(1, 1 << 16), (1 << 16, 1 << 16), ((1 << 16) + 1, 1 << 17), (5 << 20, 8 << 20)],
)
def test_size_classes(size_bytes: int, capacity_bytes: int) -> None:
    assert size_class(size_bytes) == capacity_bytes


def test_no_child_of_a_sender_inherits_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: list[bool] = []
    real = shared_sender.map_received

    def look(descriptor: int, capacity_bytes: int) -> Any:
        inherited.append(os.get_inheritable(descriptor))
        return real(descriptor, capacity_bytes)

    monkeypatch.setattr(shared_sender, "map_received", look)

    async def scenario() -> None:
        async with planes("shared") as (sender, receiver):
            await moved(sender, receiver, noise(shared.ON_SOCKET_BYTES + 1))

    on_loop(scenario)
    assert inherited == [False]


@pytest.mark.parametrize("channel", [*CHANNELS, "auto"])
def test_nothing_is_left_open(channel: str) -> None:
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def scenario() -> None:
        async with planes(channel) as (sender, receiver):  # what libraries open once and keep
            await moved(sender, receiver, noise(10))
        before = open_descriptors()
        async with planes(channel) as (sender, receiver):
            kept = [await moved(sender, receiver, noise(size)) for size in SIZES]
            cancelled, _ = land(receiver, 1 << 20)
            receiver.cancel(cancelled.transfer)
            land(receiver, 1 << 20)
        sender.close()
        assert open_descriptors() == before
        for array, size in zip(kept, SIZES, strict=True):
            assert np.array_equal(array, noise(size))  # delivered arrays outlive the plane

    on_loop(scenario)


def test_a_failing_receiver_callback_reaches_nobody_else() -> None:
    async def scenario() -> None:
        reports: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, report: reports.append(report))
        async with planes("shared") as (sender, receiver):

            def fail(_: object) -> None:
                raise RuntimeError("no room")

            assert await push(sender, receiver.land(70_000, fail), (0, noise(70_000))) is None
            await until_true(lambda: bool(reports))
            assert (await moved(sender, receiver, noise(70_000))).size == 70_000

    on_loop(scenario)


@pytest.mark.parametrize("options", [{"channel": "pigeon"}, {"bind_host": "0.0.0.0"}])
def test_arguments_that_make_no_sense(options: dict[str, str]) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError):
            BulkPlane(asyncio.get_running_loop(), **options)

    on_loop(scenario)
