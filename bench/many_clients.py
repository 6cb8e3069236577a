"""Client processes of three kinds, which `many` starts: training, serving and notebooks.

The duration of a computation is modelled: it is a `pw.host_function` that holds a lock of its device and
sleeps. So a device computes one thing at a time, and no core is busy for it; all else is real. A client works
from one moment to another, both of the monotonic clock, and answers with when each of its calls was due and
when it saw the end.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Self

import jax
import numpy as np

import pw
from bench.measure import GaveUp
from bench.placement import new_mesh, put

WORDS = 1 << 18
"""Float32 numbers of the state that a client keeps on the device: 1 MiB."""
BURST_S = 2.0
"""Mean seconds between the bursts of a notebook."""
BURST = (2, 8)
"""Fewest and most calls of a burst."""
AHEAD = 2
"""Calls in flight of a client that trains."""
ANSWER_S = 120.0
"""Seconds in which a client process answers."""


class Call(NamedTuple):
    """One call of a client, in seconds; moments are of the monotonic clock."""

    due_s: float
    ended_s: float
    lasted_s: float
    """Seconds for which its computation had the device."""


@dataclass(frozen=True)
class Client:
    """Description of a client: its kind, its claims, and the device's lock and duration of a computation."""

    kind: str
    share: float
    priority: int
    address: str
    lock: str
    takes_s: float
    seed: int


@dataclass(frozen=True)
class Work:
    """Work until a moment of the monotonic clock; `rate` is the number of requests a second."""

    until_s: float
    rate: float = 0.0


class ClientProcess(AbstractContextManager["ClientProcess"]):
    """A client in a process of its own, a fork of one that has imported JAX."""

    def __init__(self, client: Client) -> None:
        self.client = client
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([__name__])
        self._pipe, there = processes.Pipe()
        self.process = processes.Process(target=_serve, args=(there, client), daemon=True)
        self.process.start()
        there.close()

    def send(self, work: Work | None) -> None:
        """Have it work, or leave."""
        self._pipe.send(work)

    def answer(self) -> Any:
        """Return its answer: a text when it is ready, and the calls of a `Work`. Raises GaveUp without one."""
        try:
            if self._pipe.poll(ANSWER_S):
                answer = self._pipe.recv()
                if not isinstance(answer, BaseException):
                    return answer
                raise GaveUp(f"a client failed: {answer!r}")
        except EOFError:
            pass
        raise GaveUp(f"a client of the kind {self.client.kind!r} does not answer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Any, client: Client) -> None:
    """Connect, and do the work that the pipe asks for."""
    try:
        pw.connect(client.address, share=client.share, priority=client.priority)
        mesh = new_mesh()
        state = put(np.zeros(WORDS, np.float32), mesh)
        call = _sleeping(client, mesh)
        x = put(np.zeros(1, np.float32), mesh)
        call(x).block_until_ready()
        work = train if client.kind == "training" else request
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            pipe.send(work(client, asked, lambda: call(x)))
        del state
        pw.disconnect()
    except EOFError:
        """The benchmark has ended."""
    except BaseException as error:  # noqa: BLE001 - the other process reports it
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _sleeping(client: Client, mesh: pw.Mesh) -> Callable[[Any], Any]:
    lock, takes_s = client.lock, client.takes_s

    def computation(x: Any) -> Any:
        with open(lock) as device:
            fcntl.flock(device, fcntl.LOCK_EX)
            began_s = time.monotonic()
            time.sleep(takes_s)
            return np.full_like(x, time.monotonic() - began_s)

    result = jax.ShapeDtypeStruct((1,), np.float32)
    return pw.host_function(computation, result, mesh=mesh)


def train(client: Client, work: Work, call: Callable[[], Any]) -> list[Call]:
    """Call one step after the other; a step is due when the one before it has ended."""
    calls: list[Call] = []
    flying: deque[Any] = deque()
    since_s = time.monotonic()
    while since_s < work.until_s:
        while len(flying) < AHEAD:
            flying.append(call())
        lasted_s = float(np.asarray(flying.popleft())[0])
        calls.append(Call(since_s, time.monotonic(), lasted_s))
        since_s = calls[-1].ended_s
    for result in flying:
        result.block_until_ready()
    return calls


def request(client: Client, work: Work, call: Callable[[], Any]) -> list[Call]:
    """Call when requests come, whatever is in flight; another thread sees the ends, which are in order."""
    calls: list[Call] = []
    flying: SimpleQueue[tuple[float, Any] | None] = SimpleQueue()

    def look() -> None:
        while (one := flying.get()) is not None:
            due_s, result = one
            lasted_s = float(np.asarray(result)[0])
            calls.append(Call(due_s, time.monotonic(), lasted_s))

    looking = Thread(target=look)
    looking.start()
    draw, due_s = random.Random(client.seed), time.monotonic()
    while True:
        count = 1 if client.kind == "serving" else draw.randint(*BURST)
        due_s += draw.expovariate(work.rate if client.kind == "serving" else 1 / BURST_S)
        if due_s > work.until_s:
            break
        time.sleep(max(0.0, due_s - time.monotonic()))
        for _ in range(count):
            flying.put((due_s, call()))
    flying.put(None)
    looking.join()
    return calls
