"""Bytes between two hosts: how fast, over which channel, and which delay for other work.

The paper keeps buffers in device memory and moves them over the accelerators' own network or the
datacentre's (its §4.2 and figure 12), without figures. Four levels are measured:

- the bulk plane (`pw.transport.bulk.plane`) between two processes, from request to delivered bytes,
  beside a memcpy in one process and a bare tcp socket between the same two processes;
- `pw.put` of a `pw.Array` from one island to another, from request to ready, and an edge of a program
  between them, whose second computation reads one number of the array; beside Ray's object
  store between two actors if Ray is installed. The bars are about arrays that must be copied:
  results of computations, and in Ray arrays that an actor returns. Arrays that are already in
  shared memory are only mapped, by both systems; their rows are called *again*;
- an edge between two computations of one island, by the way that the planner has chosen, beside
  transfers alone and beside XLA alone;
- a small call on a host that receives 64 MiB arrays of another client, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import uvloop
from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P

import pw
from bench.baselines.peer import Peer
from bench.baselines.steps import local
from bench.measure import GaveUp, Sample, alternate, percentile, seconds
from bench.placement import new_mesh
from bench.report import Figure, Result, Series
from bench.sending_process import CHANNELS, request
from pw import LocalCluster
from pw.transport.bulk.plane import BulkPlane

MIB = 1 << 20
SIZES = (1 << 10, 16 << 10, 256 << 10, 4 * MIB, 64 * MIB, 256 * MIB)
BAR_BYTES = 64 * MIB
BESIDE_MS = 1.0
"""The longest that a small call may wait for transfers."""
MOVES = 8
"""The number of arrays in a reading."""


def run(quick: bool) -> Result:
    """Measure the bulk plane, then arrays between islands, then small calls beside them."""
    result = Result(
        "transfer", "bytes from host to host, and the delay of other work (paper: §4.2)"
    )
    sizes = (1 << 10, 4 * MIB) if quick else SIZES
    rounds = 1 if quick else 4
    with Ends(max(sizes)) as ends:
        _planes(result, ends, sizes, rounds)
    _arrays(result, 4 * MIB if quick else BAR_BYTES, rounds, 20 if quick else 300)
    _edges(result, MIB if quick else 16 * MIB, 2 if quick else 8)
    result.notes += [
        "from request to delivered: the receiver asks, gets all bytes into its own memory, and "
        "frees them; one transfer at a time",
        "cold: every transfer, and every memcpy, gets new pages (a pool that keeps no memory)",
        "all on one machine: 'tcp' is the loopback interface",
        "edges: two hosts of one island, from the call to the ready result of the second computation",
        "again: the array is in shared memory already, so it is not copied",
    ]
    return result


# --- the bulk plane ------------------------------------------------------------------------------


class Ends:
    """The receiver, in this process, of the bytes of `bench.sending_process`."""

    def __init__(self, largest_bytes: int) -> None:
        self._loop = uvloop.new_event_loop()
        self._warm = {
            channel: BulkPlane(self._loop, channel=channel, insecure=True) for channel in CHANNELS
        }
        self._cold = {
            channel: BulkPlane(self._loop, channel=channel, pool_bytes=0, insecure=True)
            for channel in CHANNELS
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
        """GB/s of `count` transfers over the bulk plane."""
        plane = (self._cold if cold else self._warm)[channel]

        async def receive() -> None:
            for _ in range(count):
                arrival: asyncio.Future[Any] = self._loop.create_future()
                landing = plane.land(size, arrival.set_result)
                where = msgspec.to_builtins(landing)
                self._control.sendall(request("push", channel, size, where))
                await arrival

        return _gb_per_s(size, count, lambda: self._loop.run_until_complete(receive()))

    def bare(self, size: int, count: int) -> float:
        """GB/s over a tcp socket, into memory that was written before."""

        def receive() -> None:
            for _ in range(count):
                self._control.sendall(request("send", size))
                missing = self._target[:size].data
                while missing:
                    missing = missing[self._bare.recv_into(missing) :]

        return _gb_per_s(size, count, receive)

    def copy(self, size: int, count: int, *, cold: bool = False) -> float:
        """GB/s of copies in this process."""

        def copies() -> None:
            for _ in range(count):
                target = _untouched(size) if cold else self._target[:size]
                np.copyto(target, self._source[:size])

        return _gb_per_s(size, count, copies)

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
    """New memory of the kernel: an allocator could return used memory."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _gb_per_s(size: int, count: int, work: Callable[[], object]) -> float:
    return size * count / seconds(work) / 1e9


def _planes(result: Result, ends: Ends, sizes: tuple[int, ...], rounds: int) -> None:
    series: Series = {}
    for size in sizes:
        count = max(2, min(100, 64 * MIB // size))
        warm: dict[str, Callable[[], float]] = {
            "memcpy": partial(ends.copy, size, count),
            "bare tcp socket": partial(ends.bare, size, count),
        }
        cold: dict[str, Callable[[], float]] = {
            "memcpy": partial(ends.copy, size, count, cold=True)
        }
        for channel in CHANNELS:
            name = f"bulk plane, {channel}"
            warm[name] = partial(ends.plane, channel, size, count)
            cold[name] = partial(ends.plane, channel, size, count, cold=True)
        for pages, cases in (("warm", warm), ("cold", cold)):
            if pages == "cold" and size <= 64 << 10:
                continue
            samples = alternate(cases, rounds=rounds)
            params = {"size": _human(size), "pages": pages}
            result.compare(samples, unit="GB/s", params=params, baseline="memcpy")
            for name, sample in samples.items():
                series.setdefault(f"{name}, {pages}", []).append((size, sample.median))
            if size == BAR_BYTES and pages == "warm":
                shared = samples["bulk plane, shared"].over(samples["memcpy"]).median
                tcp = samples["bulk plane, tcp"].over(samples["bare tcp socket"]).median
                result.at_least(0.8, shared, "64 MiB on one machine over a warm memcpy, bulk plane")
                result.at_least(0.9, tcp, "64 MiB over tcp over a bare socket, bulk plane")
    result.figures.append(
        Figure("between two processes", "bytes", "GB/s", series, log_x=True, log_y=True)
    )


def _human(size: int) -> str:
    for unit, factor in (("MiB", MIB), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


# --- arrays between islands ----------------------------------------------------------------------


def _arrays(result: Result, size: int, rounds: int, calls: int) -> None:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def copy() -> None:
        for _ in range(MOVES):
            np.copyto(target, source)

    cases: dict[str, Callable[[], float]] = {"memcpy": lambda: _gb_per_s(size, MOVES, copy)}

    def add(name: str, peer: Peer, *, again: bool = True) -> None:
        cases[name] = lambda: size / 1e9 * peer.rate("move computed", MOVES)
        if again:
            cases[f"{name}, again"] = lambda: size / 1e9 * peer.rate("move again", MOVES)

    with ExitStack() as stack:
        movers = {}
        for channel in CHANNELS:
            with patch.dict(os.environ, {"PW_BULK": channel}):
                cluster = stack.enter_context(LocalCluster(islands=2, connect=False))
                mover = stack.enter_context(
                    Peer(channel, "bench.clients", [["move", cluster.address, str(size)]])
                )
            movers[cluster.address] = mover
            add(f"pw.put, {channel}", mover, again=channel == "shared")
            cases[f"edge of a program, {channel}"] = partial(
                lambda peer: size / 1e9 * peer.rate("edge", MOVES), mover
            )
        try:
            store = Peer(
                "Ray", "bench.baselines.ray_store", [[str(size)]], ready_s=120, freeze=True
            )
            ray = stack.enter_context(store)
            add("Ray's store", ray)
        except GaveUp as error:
            result.notes.append(f"without Ray's store: {error}")
        samples = alternate(cases, rounds=rounds, warm_up=2)
        params = {"size": _human(size), "pages": "warm"}
        result.compare(samples, unit="GB/s", params=params, baseline="memcpy")
        moved = samples["pw.put, shared"]
        text = "an array moved between islands over"
        result.at_least(0.85, moved.over(samples["memcpy"]).median, f"{text} a warm memcpy, pw.put")
        edge = samples["edge of a program, shared"].over(samples["memcpy"]).median
        result.at_least(0.9, edge, f"{text} a warm memcpy, an edge of a program")
        if "Ray's store" in samples:
            over_ray = moved.over(samples["Ray's store"]).median
            result.at_least(1.5, over_ray, f"{text} Ray's warm store")
        for address, mover in movers.items():
            _small_calls(result, address, mover, rounds, calls)


# --- edges in one island ---------------------------------------------------------------------------

_EDGES = {
    "whole to rows": (P(), P("x")),
    "whole to columns": (P(), P(None, "x")),
    "rows to whole": (P("x"), P()),
    "rows to columns": (P("x"), P(None, "x")),
}
EDGE_BAR = 0.8


def _edges(result: Result, size: int, rounds: int) -> None:
    with ExitStack() as stack:
        calls: dict[str, dict[str, Callable[[], float]]] = {edge: {} for edge in _EDGES}
        for ways in ("transfers", "chosen"):
            with patch.dict(os.environ, {"PW_EDGES": ways}):
                stack.enter_context(LocalCluster(hosts_per_island=2))
            mesh = new_mesh(2, axis="x")
            for edge, (source, destination) in _EDGES.items():
                calls[edge][ways] = _edge(mesh, source, destination, size, by_hand=False)
                if ways == "chosen":
                    calls[edge]["XLA"] = _edge(mesh, source, destination, size, by_hand=True)
        for edge, cases in calls.items():
            samples = alternate(cases, rounds=rounds, warm_up=2)
            params = {"edge": edge, "size": _human(size)}
            result.compare(samples, unit="edges/s", params=params, baseline="transfers")
            chosen = samples.pop("chosen")
            best = min(chosen.over(other).median for other in samples.values())
            result.at_least(
                EDGE_BAR, best, f"an edge by the chosen way over the best other, {edge}"
            )


def _edge(
    mesh: pw.Mesh, source: PartitionSpec, destination: PartitionSpec, size: int, *, by_hand: bool
) -> Callable[[], float]:
    """Return a function that returns edges a second; `by_hand` re-shards in a computation."""
    here, there = pw.NamedSharding(mesh, source), pw.NamedSharding(mesh, destination)
    make = pw.jit(lambda x: x + 1, mesh=mesh, in_shardings=(here,), out_shardings=here)
    same = pw.jit(lambda x: x, mesh=mesh, in_shardings=(here,), out_shardings=there)
    take = pw.jit(lambda x: x + 1, mesh=mesh, in_shardings=(there,), out_shardings=there)

    @pw.program
    def step(x: Any) -> Any:
        made = make(x)
        return take(same(made) if by_hand else made)

    given = pw.put(np.ones((64, size // 4 // 64), np.float32), sharding=here)
    step(given).block_until_ready()

    def reading() -> float:
        def work() -> None:
            for _ in range(MOVES):
                step(given).block_until_ready()

        return MOVES / seconds(work)

    return reading


# --- small calls beside transfers ----------------------------------------------------------------


def _small_calls(result: Result, address: str, mover: Peer, rounds: int, calls: int) -> None:
    """Add rows of small calls on the receiving host, which has no other work."""
    pw.connect(address)
    try:
        small = pw.jit(local, mesh=new_mesh(island="island-1"))
        small(0.0).block_until_ready()
        quiet, busy = [], []
        for _ in range(rounds):
            quiet.append(_latencies_ms(small, calls))
            with _moving(mover):
                busy.append(_latencies_ms(small, calls))
    finally:
        pw.disconnect()
    for text, percent in (("median", 50), ("99th percentile", 99)):
        alone = Sample(tuple(percentile(readings, percent) for readings in quiet))
        beside = Sample(tuple(percentile(readings, percent) for readings in busy))
        name, params = f"small call, {text}", {"over": mover.name}
        result.add(name, params, alone, "ms")
        result.add(f"{name}, beside transfers", params, beside, "ms", name, alone)
        words = f"ms that a small call waits for 64 MiB transfers over {mover.name}, {text}"
        result.at_most(BESIDE_MS, beside.minus(alone).median, words)


@contextlib.contextmanager
def _moving(mover: Peer) -> Iterator[None]:
    """Let another process move arrays one after the other until the block ends."""
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
    return [seconds(lambda: call(0.0).block_until_ready()) * 1e3 for _ in range(count)]
