"""Chunks over sockets, and records of shared memory, at a real bulk plane that goes on after each input."""

from __future__ import annotations

import asyncio
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from pw.core.landing import Landing
from pw.transport.bulk import chunks, shared
from pw.transport.bulk.plane import BulkPlane
from tests.fuzz.target import Run, Target
from tests.stages.daemons import until_true

_SMALL, _LARGE = 1000, 100_000
"""Bytes of a landing in a message, and of one in a block."""
_TRANSFERS = (b"TRANSFR1", b"TRANSFR2")
"""In the place of the numbers of two landings, of these sizes."""
_BLOCK = b"BLOCKNO2"
_WAIT_S = 60.0


class _Plane:
    """A bulk plane with two landings, made again when they are gone."""

    def __init__(self, channel: str, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.failed: list[object] = []
        self.loop.set_exception_handler(lambda loop, context: self.failed.append(context))
        folder = folder / channel
        folder.mkdir(mode=0o700)
        self.plane = BulkPlane(self.loop, channel=channel, folder=folder)
        self.channel = channel
        self.landings: dict[int, Landing] = {}
        self.land()

    def land(self) -> None:
        """Make the landings that are gone."""
        for size in (_SMALL, _LARGE):
            if size not in self.landings:
                delivered = partial(self.delivered, size)
                self.landings[size] = self.plane.land(size, delivered)

    def delivered(self, size: int, buffer: object) -> None:
        assert isinstance(buffer, np.ndarray)
        assert buffer.nbytes == size
        del self.landings[size]

    def turn(self) -> None:
        """Let the loop do what it has to do now."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        assert not self.failed, self.failed

    def take(self, data: bytes) -> None:
        """Take what a sender says on one connection, until it is closed."""
        for name, landing in zip(_TRANSFERS, self.landings.values(), strict=True):
            data = data.replace(name, landing.transfer.to_bytes(8, "little"))
        data = data.replace(_BLOCK, self.landings[_LARGE].block.to_bytes(8, "little"))
        landing = self.landings[_SMALL]
        is_shared = self.channel == "shared"
        place = landing.socket if is_shared else landing.endpoint.removeprefix("ipc://")
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(_WAIT_S)
            end.connect(shared.socket_name(place))
            try:
                end.sendall(data)
                end.shutdown(socket.SHUT_WR)
            except OSError:  # it has hung up
                pass
            self._until_closed(end)
        self.turn()
        self.land()

    def _until_closed(self, end: socket.socket) -> None:
        """Read until the receiver hangs up. Its loop accepts, and its bulk thread may take it from there."""
        end.setblocking(False)
        until_s = time.monotonic() + _WAIT_S
        while time.monotonic() < until_s:
            self.turn()
            try:
                if not end.recv(1 << 16):
                    return
            except BlockingIOError:
                select.select([end], [], [], 0.0002)
            except ConnectionError:
                return
        raise AssertionError("the receiver does not hang up")

    def check(self) -> None:
        """An honest sender still works."""
        other = BulkPlane(self.loop, channel=self.channel)
        try:
            for size in (_SMALL, _LARGE):
                results: list[np.ndarray] = []
                errors: list[Exception | None] = []
                landing = self.plane.land(size, results.append)
                value = np.arange(size, dtype=np.uint8)
                other.push(landing, [(0, value)], errors.append)
                self._wait(lambda errors=errors, results=results: errors and results)
                assert errors == [None]
                np.testing.assert_array_equal(results[0], value)
        finally:
            other.close()

    def _wait(self, ready: Callable[[], object]) -> None:
        self.loop.run_until_complete(until_true(ready))

    def close(self) -> None:
        self.plane.close()
        self.turn()
        self.loop.close()


@contextmanager
def _opened(channel: str) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        plane = _Plane(channel, Path(folder))
        try:
            yield plane.take
            plane.check()
        finally:
            plane.close()


def _number(name: bytes) -> int:
    return int.from_bytes(name, "little")


def chunk_seeds() -> list[bytes]:
    """Return what senders of chunks say."""
    small, large = map(_number, _TRANSFERS)
    whole = chunks.header(chunks.CHUNK, small, 0, _SMALL) + bytes(_SMALL)
    halves = b"".join(
        chunks.header(chunks.CHUNK, large, at, _LARGE // 4) + bytes(_LARGE // 4)
        for at in range(0, _LARGE // 2, _LARGE // 4)
    )
    return [
        b"",
        whole + chunks.header(chunks.FINISH, small, 0, _SMALL),
        whole,
        halves,
        chunks.header(chunks.FINISH, large, 0, _LARGE),
        chunks.header(chunks.CHUNK, 7, 0, 10) + bytes(10),
        chunks.header(chunks.CHUNK, small, 995, 5) + bytes(5),
    ]


def shared_seeds() -> list[bytes]:
    """Return what senders of shared memory say."""
    small, large = map(_number, _TRANSFERS)
    block = _number(_BLOCK)
    return [
        b"",
        shared.record(shared.INLINE, small, _SMALL) + bytes(_SMALL),
        shared.record(shared.WANT, block),
        shared.record(shared.WANT, block) + shared.record(shared.FINISH, large, block),
        shared.record(shared.FINISH, large, block),
        shared.record(shared.WANT, 77),
        shared.record(shared.SHARE, large, 1 << 17),
    ]


TARGETS = [
    Target("chunks", chunk_seeds, opened=partial(_opened, "tcp"), weight=0.6),
    Target("shared-memory", shared_seeds, opened=partial(_opened, "shared"), weight=0.6),
]
