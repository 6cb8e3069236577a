"""Buffers between two hosts: how fast, over what, from cold and warm pages, and who has to wait meanwhile.

The paper keeps buffers in device memory and moves them over the accelerators' own network or the datacentre's
(its §4.2 and figure 12); what it costs is not told there. Three levels are measured:

- the bulk plane (`pw.transport.bulk`) between two processes, request to delivered bytes, beside a memcpy in one
  process and a bare tcp socket between the same two processes;
- a `pw.Array` moved between two islands by `pw.put`, request to ready, beside Ray's object store between two
  actors where Ray is installed. The bars are about what has to be copied: what was computed, and in Ray
  an array that an actor returns. What lies in shared memory already, because it was put there or has come from
  elsewhere, is only mapped, by both, so it is measured for itself;
- a small call on a host that another client sends 64 MiB arrays to, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import uvloop

import pw
from bench.baselines.peer import Peer
from bench.clients import per_second
from bench.measure import GaveUp, Sample, alternate
from bench.report import Bar, Figure, Result, Row, Series, rows
from bench.sending_process import CHANNELS, request
from pw import LocalCluster
from pw.transport.bulk import BulkPlane

MIB = 1 << 20
SIZES = (1 << 10, 16 << 10, 256 << 10, 4 * MIB, 64 * MIB, 256 * MIB)
BAR_BYTES = 64 * MIB
MOVES = 8
"""Arrays that a reading is taken over."""


def run(quick: bool) -> Result:
    """Measure the bulk plane, then arrays between islands, then small calls meanwhile."""
    result = Result(
        "transfer", "buffers from host to host, and what else has to wait (paper: §4.2)"
    )
    sizes = (1 << 10, 4 * MIB) if quick else SIZES
    rounds = 1 if quick else 4
    with Ends(max(sizes)) as ends:
        _tell_planes(result, ends, sizes, rounds)
    _tell_arrays(result, 4 * MIB if quick else BAR_BYTES, rounds, 20 if quick else 300)
    result.notes += [
        "request to delivered: the receiver asks, gets all bytes into memory of its own, and lets go of them; "
        "one transfer at a time",
        "cold: every transfer gets pages that were never touched (a pool that keeps nothing), memcpy too",
        "all on one machine: 'tcp' is the loopback interface",
        "again: the array lies in shared memory already, so that it is not copied",
    ]
    return result


# --- the bulk plane -------------------------------------------------------------------------------------


class Ends:
    """The receiving end, here, of a process that sends (`bench.sending_process`)."""

    def __init__(self, largest_bytes: int) -> None:
        self._loop = uvloop.new_event_loop()
        self._warm = {channel: BulkPlane(self._loop, channel=channel) for channel in CHANNELS}
        self._cold = {
            channel: BulkPlane(self._loop, channel=channel, pool_bytes=0) for channel in CHANNELS
        }
        self._source = np.random.default_rng(0).integers(0, 256, largest_bytes, dtype=np.uint8)
        self._target = np.zeros(largest_bytes, np.uint8)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._sender = subprocess.Popen(
                [
                    *(sys.executable, "-m", "bench.sending_process"),
                    *(str(theirs.fileno()), str(largest_bytes)),
                ],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._control.sendall(request("tcp", *server.getsockname()))
            self._bare, _ = server.accept()

    def plane(self, channel: str, size: int, count: int, *, cold: bool = False) -> float:
        """Bytes per second of `count` transfers over the bulk plane."""
        plane = (self._cold if cold else self._warm)[channel]

        async def receive() -> None:
            for _ in range(count):
                arrival: asyncio.Future[Any] = self._loop.create_future()
                landing = plane.land(size, arrival.set_result)
                where = msgspec.to_builtins(landing)
                self._control.sendall(request("push", channel, size, where))
                await arrival

        return _bytes_per_s(size, count, lambda: self._loop.run_until_complete(receive()))

    def bare(self, size: int, count: int) -> float:
        """Bytes per second over a tcp socket, into memory that was written before."""

        def receive() -> None:
            for _ in range(count):
                self._control.sendall(request("send", size))
                missing = self._target[:size].data
                while missing:
                    missing = missing[self._bare.recv_into(missing) :]

        return _bytes_per_s(size, count, receive)

    def copy(self, size: int, count: int, *, cold: bool = False) -> float:
        """Bytes per second of copies in this process."""

        def copies() -> None:
            for _ in range(count):
                target = _untouched(size) if cold else self._target[:size]
                np.copyto(target, self._source[:size])

        return _bytes_per_s(size, count, copies)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *reason: object) -> None:
        self._control.close()
        self._bare.close()
        for plane in (*self._warm.values(), *self._cold.values()):
            plane.close()
        self._loop.close()
        try:
            self._sender.wait(3)
        except subprocess.TimeoutExpired:
            self._sender.kill()
            self._sender.wait()


def _untouched(size: int) -> np.ndarray[Any, Any]:
    """Memory straight from the kernel: what an allocator gives may have been used before."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _bytes_per_s(size: int, count: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return size * count / (time.perf_counter() - started)


def _tell_planes(result: Result, ends: Ends, sizes: tuple[int, ...], rounds: int) -> None:
    series: Series = {}
    for size in sizes:
        count = max(2, min(100, 64 * MIB // size))
        warm: dict[str, Callable[[], float]] = {
            "memcpy": lambda size=size, count=count: ends.copy(size, count),  # type: ignore[misc]
            "bare tcp socket": lambda size=size, count=count: ends.bare(size, count),  # type: ignore[misc]
        }
        cold: dict[str, Callable[[], float]] = {
            "memcpy": lambda size=size, count=count: ends.copy(size, count, cold=True),  # type: ignore[misc]
        }
        for channel in CHANNELS:
            warm[f"bulk plane, {channel}"] = lambda size=size, count=count, channel=channel: (
                ends.plane(  # type: ignore[misc]
                    channel, size, count
                )
            )
            if size > 64 << 10:
                cold[f"bulk plane, {channel}"] = lambda size=size, count=count, channel=channel: (
                    ends.plane(  # type: ignore[misc]
                        channel, size, count, cold=True
                    )
                )
        for pages, cases in (("warm", warm), ("cold", cold)):
            if len(cases) == 1:
                continue
            samples = _in_gb(alternate(cases, rounds=rounds))
            params: dict[str, object] = {"size": _human(size), "pages": pages}
            result.rows += rows(samples, unit="GB/s", params=params, baseline="memcpy")
            for name, sample in samples.items():
                series.setdefault(f"{name}, {pages}", []).append((size, sample.median))
            if size == BAR_BYTES and pages == "warm":
                shared = samples["bulk plane, shared"].over(samples["memcpy"])
                tcp = samples["bulk plane, tcp"].over(samples["bare tcp socket"])
                result.bars += [
                    Bar("64 MiB on one machine over a warm memcpy, bulk plane", shared.median, 0.8),
                    Bar("64 MiB over tcp over a bare socket, bulk plane", tcp.median, 0.9),
                ]
    result.figures.append(
        Figure("between two processes", "bytes", "GB/s", series, log_x=True, log_y=True)
    )


def _in_gb(samples: dict[str, Sample]) -> dict[str, Sample]:
    return {name: Sample(tuple(v / 1e9 for v in sample.values)) for name, sample in samples.items()}


def _human(size: int) -> str:
    for unit, factor in (("MiB", MIB), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


# --- arrays between islands -------------------------------------------------------------------------------


def _tell_arrays(result: Result, size: int, rounds: int, calls: int) -> None:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def copy() -> None:
        for _ in range(MOVES):
            np.copyto(target, source)

    cases: dict[str, Callable[[], float]] = {
        "memcpy": lambda: _bytes_per_s(size, MOVES, copy),
    }

    def add(name: str, peer: Peer, *, again: bool = True) -> None:
        cases[name] = lambda: size * per_second(peer, "move computed", MOVES)
        if again:
            cases[f"{name}, again"] = lambda: size * per_second(peer, "move again", MOVES)

    with ExitStack() as stack:
        movers = {}
        for channel in CHANNELS:
            with _environment("PW_BULK", channel):
                cluster = stack.enter_context(LocalCluster(islands=2, connect=False))
                mover = stack.enter_context(
                    Peer(channel, "bench.clients", [["move", cluster.address, str(size)]])
                )
            movers[cluster.address] = mover
            add(f"pw.put, {channel}", mover, again=channel == "shared")
        try:
            store = Peer(
                "Ray", "bench.baselines.ray_store", [[str(size)]], ready_s=120, freeze=True
            )
            ray = stack.enter_context(store)
            add("Ray's store", ray)
        except GaveUp as error:
            result.notes.append(f"without Ray's store: {error}")
        samples = _in_gb(alternate(cases, rounds=rounds, warm_up=2))
        params: dict[str, object] = {"size": _human(size), "pages": "warm"}
        result.rows += rows(samples, unit="GB/s", params=params, baseline="memcpy")
        moved = samples["pw.put, shared"]
        text = "an array moved between islands over"
        result.bars.append(Bar(f"{text} a warm memcpy", moved.over(samples["memcpy"]).median, 0.8))
        if "Ray's store" in samples:
            over_ray = moved.over(samples["Ray's store"]).median
            result.bars.append(Bar(f"{text} Ray's warm store", over_ray, 1.5))
        for address, mover in movers.items():
            _tell_meanwhile(result, address, mover, rounds, calls)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


# --- small calls meanwhile --------------------------------------------------------------------------------


def _tell_meanwhile(result: Result, address: str, mover: Peer, rounds: int, calls: int) -> None:
    """A small call on the host that receives, and has no other work."""
    pw.connect(address)
    try:
        devices = pw.make_virtual_device_set().add_slice(devices=1, island="island-1").devices
        small = pw.jit(lambda x: x + 1, mesh=pw.Mesh(devices, ("data",)))
        small(0.0).block_until_ready()
        quiet, busy = [], []
        for _ in range(rounds):
            quiet.append(_latencies_ms(small, calls))
            with _moving(mover):
                busy.append(_latencies_ms(small, calls))
    finally:
        pw.disconnect()
    for text, of in (("median", statistics.median), ("99th percentile", _p99)):
        alone = Sample(tuple(of(readings) for readings in quiet))
        beside = Sample(tuple(of(readings) for readings in busy))
        name = f"small call, {text}"
        params: dict[str, object] = {"over": mover.name}
        result.rows.append(Row(name, params, alone, "ms"))
        result.rows.append(
            Row(f"{name}, meanwhile", params, beside, "ms", name, beside.over(alone))
        )
        delays = [b - a for a, b in zip(alone.values, beside.values, strict=True)]
        words = f"ms that a small call waits for 64 MiB transfers over {mover.name}, {text}"
        result.bars.append(Bar(words, Sample(tuple(delays)).median, 2.0, at_least=False))


@contextlib.contextmanager
def _moving(mover: Peer) -> Iterator[None]:
    """Have another process move arrays one after the other until the block ends."""
    over = threading.Event()

    def move() -> None:
        while not over.is_set():
            mover.seconds("move computed", MOVES)

    with ThreadPoolExecutor(1) as background:
        moving = background.submit(move)
        try:
            yield
        finally:
            over.set()
        moving.result()


def _latencies_ms(call: Callable[[float], Any], count: int) -> list[float]:
    readings: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        call(0.0).block_until_ready()
        readings.append((time.perf_counter() - started) * 1e3)
    return readings


def _p99(readings: list[float]) -> float:
    return sorted(readings)[int(0.99 * (len(readings) - 1))]
