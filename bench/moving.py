"""A client that moves to another island, beside its bytes alone; and one that is suspended and resumed.

The client holds arrays of 8 MiB on one device. A migration takes from the request until all of them are there
and one call with each has ended. The pause is the longest time between the ends of two calls of a client that
computes meanwhile. The bytes alone are the same bytes, put by `pw.put` from the devices of one island on those
of the other.

- The bars: a migration, and a pause, of at most 1.5 times the time of the bytes, and 0.3 s.
- Values are compared bit for bit after each move.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import pw
from bench.measure import alternate, seconds
from bench.report import Result
from pw.client.connection import current

BAR, MORE_S = 1.5, 0.3
EACH = 1 << 21
"""Elements of an array, of 4 bytes."""
CALLS_AFTER = 20
"""Number of calls after the client has left its devices."""
WHAT = "a client that moves, beside its bytes alone; suspended and resumed"


def run(quick: bool) -> Result:
    """Move a client to and fro, and put its arrays there."""
    count = 4 if quick else 128
    result = Result("moving", WHAT)
    with pw.LocalCluster(islands=2):
        client = _Client(count)
        samples = alternate(
            {
                "migration": lambda: seconds(client.migrate),
                "pause": client.pause,
                "bytes alone": lambda: seconds(client.copy),
                "suspended and resumed": lambda: seconds(client.suspend),
            },
            rounds=1 if quick else 5,
            warm_up=1,
        )
        client.check()
    alone = samples["bytes alone"]
    for name, sample in samples.items():
        reference = alone if name != "bytes alone" else None
        result.add(name, {}, sample, "s", "bytes alone" if reference else "", reference)
    bars = {
        "migration": "pause of a migration, less 0.3 s, to its bytes",
        "pause": "pause of calls during a migration, less 0.3 s, to its bytes",
    }
    for name, words in bars.items():
        more = max(0.0, samples[name].median - MORE_S)
        result.at_most(BAR, more / alone.median, words)
    result.notes.append(f"{count} arrays of 8 MiB: {count * EACH * 4 / 2**20:.0f} MiB")
    return result


class _Client:
    """Arrays on one device of a cluster of two islands."""

    def __init__(self, count: int) -> None:
        slices = [
            pw.make_virtual_device_set().add_slice(devices=1, island=f"island-{at}")
            for at in range(2)
        ]
        meshes = [pw.Mesh(one.devices, ("x",)) for one in slices]
        self._slice = slices[0]
        self._there = [pw.NamedSharding(mesh, pw.PartitionSpec()) for mesh in meshes]
        random = np.random.default_rng(0)
        self._values = [random.standard_normal(EACH, np.float32) for _ in range(count)]
        self._arrays = [pw.put(value, self._there[0]) for value in self._values]
        self._more = pw.jit(lambda x: x[:1] + 1, mesh=meshes[0])
        self._use()

    def _use(self) -> None:
        """Make a call with each array."""
        pw.block_until_ready([self._more(array) for array in self._arrays])

    @property
    def _elsewhere(self) -> str:
        return "island-1" if self._slice.island == "island-0" else "island-0"

    def migrate(self) -> None:
        """Move the arrays to the other island, and use them there."""
        pw.migrate(self._slice, island=self._elsewhere)
        self._use()

    def pause(self) -> float:
        """Move while calls are made; return the longest time between the ends of two calls, in seconds."""
        moved = current.runtime().ask.migrate(0, self._slice.id, self._elsewhere)
        longest_s, after = 0.0, 0
        last_s = time.perf_counter()
        while after < CALLS_AFTER:
            after += moved.done()
            self._more(self._arrays[0]).block_until_ready()
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        self._use()
        return longest_s

    def suspend(self) -> None:
        """Leave the devices, come back, and use the arrays."""
        pw.suspend()
        pw.resume()
        self._use()

    def copy(self) -> None:
        """Put the arrays on the other slice, from device to device."""
        copies: Any = pw.put(self._arrays, [self._there[1]] * len(self._arrays))
        pw.block_until_ready(copies)

    def check(self) -> None:
        """Raise AssertionError unless all values are as they were put."""
        for array, value in zip(self._arrays, self._values, strict=True):
            if not np.array_equal(np.asarray(array), value):
                raise AssertionError("the values are others after the moves")
