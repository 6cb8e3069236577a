"""One model that answers requests: it batches those that wait, and computes on the cluster.

Each model is a client of its own. The cluster's policy gives its devices to clients by their shares.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw

BATCH = 16
"""Requests that are answered together, at most; smaller batches are padded."""


def model(width: int, layers: int) -> Any:
    """Return a function from a batch of vectors to a batch of answers, on the cluster's devices."""
    draw = np.random.default_rng(0)
    weights = pw.put(draw.normal(0, 1 / math.sqrt(width), (layers, width, width)).astype("float32"))

    @pw.jit
    def answers(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    return lambda x: answers(weights, x)


class Server:
    """Answers requests with a model, one batch after the other."""

    def __init__(self, answers: Any, width: int) -> None:
        self._answers = answers
        self._width = width
        self._waiting: asyncio.Queue[tuple[np.ndarray[Any, Any], asyncio.Future[Any]]]
        self._waiting = asyncio.Queue()
        self.batches = 0

    async def ask(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Answer one request. Raises what the model raises."""
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._waiting.put((x, answered))
        return await answered  # type: ignore[no-any-return]

    async def run(self) -> None:
        """Answer requests for ever; those that come during a batch form the next one."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            x = np.zeros((BATCH, self._width), np.float32)
            for row, (given, _) in enumerate(batch):
                x[row] = given
            try:
                made = np.asarray(await self._answers(x))
            except pw.Error as error:
                for _, answered in batch:
                    answered.set_exception(error)
                continue
            self.batches += 1
            for row, (_, answered) in enumerate(batch):
                answered.set_result(made[row])


async def user(server: Server, seed: int, width: int, end_s: float, took_s: list[float]) -> None:
    """Ask, wait for the answer, think; again and again."""
    draw = random.Random(seed)
    x = np.random.default_rng(seed).normal(size=width).astype(np.float32)
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        await server.ask(x)
        took_s.append(time.monotonic() - began_s)
        await asyncio.sleep(draw.expovariate(1 / 0.002))


async def serve(width: int, layers: int, users: int, seconds: float) -> dict[str, Any]:
    """Serve so many users; return the latencies and the number of batches."""
    answers = model(width, layers)
    np.asarray(answers(np.zeros((BATCH, width), np.float32)))  # compiles
    print("ready", flush=True)
    sys.stdin.readline()
    server = Server(answers, width)
    running = asyncio.create_task(server.run())
    took_s: list[float] = []
    end_s = time.monotonic() + seconds
    await asyncio.gather(*(user(server, seed, width, end_s, took_s) for seed in range(users)))
    running.cancel()
    return {"took_s": took_s, "batches": server.batches}


def main(share: float, width: int, layers: int, users: int, seconds: float) -> None:
    """Be one model, in a process of its own; prints the result as JSON."""
    pw.connect(share=share)
    print(json.dumps(asyncio.run(serve(width, layers, users, seconds))))
