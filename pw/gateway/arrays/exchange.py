"""Programs of pw's own scripts: arrays that the script's session takes or hands over, and memory.

| program | its value | arguments | results |
|---|---|---|---|
| `pw_offer` | `token` | arrays of one island, which another session may take | none |
| `pw_take` | `token`, `arrays` | none | the arrays of another session's offer |
| `pw_checkpoint` | nothing | arrays, of which hosts make replicas | none; it ends when they have |
| `pw_memory` | `device` (JAX's number) | none | `MEMORY` of the device, in bytes; -1 for what is not known |

A token is 16 random bytes in hexadecimal digits. `arrays` describes each result: `dtype`, `shape`,
`shard` (the shape of a shard), `devices` (JAX's numbers) and `replicated`. See `pw.sched.control.handovers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from pw.core.errors import ArgumentError, ErrorReport
from pw.core.messages import DeviceUse
from pw.core.sharding import DeviceAddress
from pw.gateway.arrays.arrays import ProxyArray, Stored
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.runs import Runs

MEMORY = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
"""Results of `pw_memory`, by the names that JAX has for them."""


class ArrayExchange:
    """The programs for one client."""

    def __init__(self, devices: Devices, runs: Runs) -> None:
        self._devices = devices
        self._runs = runs

    async def _stored(self, arrays: Sequence[ProxyArray]) -> list[Stored]:
        return [await self._runs.fitting(one, self._runs.spec_of(one)) for one in arrays]

    async def offer(self, asked: Any, args: Sequence[ProxyArray]) -> None:
        """Let another session take arrays."""
        try:
            stored = await self._stored(args)
        except Exception as error:
            self.refuse(asked, error)
            raise
        arrays = [(one.number, one.spec) for one in stored]
        self._runs.runtime.handovers.offer(arrays, bytes.fromhex(asked["token"]))

    def refuse(self, asked: Any, error: BaseException) -> None:
        """Tell the session that takes arrays why it gets none."""
        report = ErrorReport.of(error, kind=ArgumentError)
        self._runs.runtime.handovers.refuse(bytes.fromhex(asked["token"]), report)

    async def take(self, asked: Any) -> list[ProxyArray]:
        """Take the arrays of an offer."""
        arrays = [self._described(one) for one in asked["arrays"]]
        specs = [self._runs.spec_of(array) for array in arrays]
        runtime = self._runs.runtime
        numbers = runtime.handovers.take(bytes.fromhex(asked["token"]), specs)
        for array, number, spec in zip(arrays, numbers, specs, strict=True):
            array.consist_of(Stored(runtime, number, spec))
        return arrays

    async def checkpoint(self, args: Sequence[ProxyArray]) -> Future[None]:
        """Have hosts make replicas of arrays."""
        stored = await self._stored(args)
        done: Future[None] = self._runs.runtime.ask.checkpoint([one.number for one in stored])
        return done

    async def memory(self, asked: Any) -> ProxyArray:
        """Return what is in use of a device's memory."""
        reply = await asyncio.to_thread(self._runs.runtime.ask.memory)
        place = self._devices.address(int(asked["device"]))
        numbers: tuple[int | None, ...] = (None,) * len(MEMORY)
        for use in reply.devices:
            if DeviceAddress(use.host, use.device) == place:
                numbers = memory_of_device(use)
        sizes = [-1 if size is None else size for size in numbers]
        array = ProxyArray("int64", (3,), (3,), (0,), self._devices.memories[0], True)
        array.value = np.array(sizes, np.int64)
        return array

    def _described(self, one: Any) -> ProxyArray:
        return ProxyArray(
            str(one["dtype"]),
            tuple(map(int, one["shape"])),
            tuple(map(int, one["shard"])),
            tuple(map(int, one["devices"])),
            str(one["memory_kind"]),
            bool(one["replicated"]),
        )


def memory_of_device(use: DeviceUse) -> tuple[int | None, ...]:
    """Return `MEMORY` of a device; hosts count arrays where its allocator does not count."""
    in_use = use.arrays_bytes if use.in_use_bytes is None else use.in_use_bytes
    return in_use, use.peak_bytes, use.limit_bytes
