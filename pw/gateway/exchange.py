"""Arrays that the script's own session takes from a client of the gateway, and hands to it.

| program | its value | arguments | results |
|---|---|---|---|
| `pw_offer` | `token` | arrays of one island, which another session may take | none |
| `pw_take` | `token`, `arrays` | none | the arrays of another session's offer |
| `pw_checkpoint` | nothing | arrays, of which hosts make replicas | none; it ends when they have |

A token is 16 random bytes in hexadecimal digits. `arrays` describes each result: `dtype`, `shape`,
`shard` (the shape of a shard), `devices` (JAX's numbers) and `replicated`. See `pw.sched.control.shares`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from pw.core.errors import ArgumentError, ErrorReport
from pw.gateway.arrays import ProxyArray, Stored
from pw.gateway.devices import Devices
from pw.gateway.runs import Runs


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
        given = [(one.number, one.spec) for one in stored]
        self._runs.runtime.handovers.offer(given, bytes.fromhex(asked["token"]))

    def refuse(self, asked: Any, error: BaseException) -> None:
        """Tell the session that takes arrays why it gets none."""
        report = ErrorReport.of(error, kind=ArgumentError)
        self._runs.runtime.handovers.refuse(bytes.fromhex(asked["token"]), report)

    async def take(self, asked: Any) -> list[ProxyArray]:
        """Take the arrays of an offer."""
        made = [self._described(one) for one in asked["arrays"]]
        specs = [self._runs.spec_of(array) for array in made]
        runtime = self._runs.runtime
        taken = runtime.handovers.take(bytes.fromhex(asked["token"]), specs)
        for array, number, spec in zip(made, taken, specs, strict=True):
            array.consist_of(Stored(runtime, number, spec))
        return made

    async def checkpoint(self, args: Sequence[ProxyArray]) -> Future[None]:
        """Have hosts make replicas of arrays."""
        stored = await self._stored(args)
        done: Future[None] = self._runs.runtime.ask.checkpoint([one.number for one in stored])
        return done

    def _described(self, one: Any) -> ProxyArray:
        return ProxyArray(
            str(one["dtype"]),
            tuple(map(int, one["shape"])),
            tuple(map(int, one["shard"])),
            tuple(map(int, one["devices"])),
            self._devices.memories[0],
            bool(one["replicated"]),
        )
