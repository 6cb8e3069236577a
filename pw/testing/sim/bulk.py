"""The bulk plane of a simulated process: transfers that take time, stall, fail, and find no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pw.core.errors import TransferFailed
from pw.core.landing import AWAITED_S, Bytes, Landing

if TYPE_CHECKING:
    from pw.testing.sim.node import SimNode

BYTES_PER_S = 2e9
SETUP_S = 40e-6
STALLED_S = 5.0
"""Seconds without progress after which a transfer fails."""

_Parts = Sequence[tuple[int, np.ndarray[Any, Any]]]
_Done = Callable[[Exception | None], None]


class SimBulk:
    """Moves bytes between simulated processes (see `pw.core.landing.Bulk`)."""

    def __init__(self, node: SimNode, planes: dict[int, SimBulk]) -> None:
        self._node = node
        self._world = node.world
        self._planes = planes
        """Planes of the world, by the transfers that have been landed."""
        self._landings: dict[int, tuple[int, Callable[[Bytes], None]]] = {}
        self._random = node.world.streams(f"bulk/{node.name}")

    @property
    def landings(self) -> int:
        """Buffers that are reserved."""
        return len(self._landings)

    def counters(self) -> dict[str, int]:
        """Nothing is counted."""
        return {"sent_bytes": 0, "received_bytes": 0}

    def land(self, size_bytes: int, deliver: Callable[[Bytes], None], sender: str = "") -> Landing:
        """Reserve a buffer; `deliver` is called once, when all bytes are in."""
        world = self._world
        if not world.calm and self._random.random() < world.profile.landing_refused:
            world.ledger.note("landing refused", self._node.name)
            raise TransferFailed(f"{self._node.name} has no room for {size_bytes} bytes")
        transfer = len(self._planes) + 1
        self._planes[transfer] = self
        self._landings[transfer] = (size_bytes, deliver)
        plane = f"{transfer:032x}" if sender else ""
        return Landing(transfer, size_bytes, 0, self._node.name, "", "", plane)

    def cancel(self, transfer: int, *, unused: bool = False) -> None:
        """Give up a landing."""
        self._landings.pop(transfer, None)

    def landed_bytes(self, transfer: int) -> int:
        """Bytes come all at once."""
        return 0

    def push(self, landing: Landing, parts: _Parts, done: _Done) -> None:
        """Copy arrays to offsets of a landing; `done` when they are no longer needed."""
        world, node = self._world, self._node
        there = self._planes[landing.transfer]
        target = there._node.name
        delay_s = SETUP_S + landing.size_bytes / BYTES_PER_S * self._random.uniform(1.0, 3.0)
        delay_s *= max(node.slowness, there._node.slowness)
        fails = not world.calm and self._random.random() < world.profile.bulk_failure
        stall_s = world.blocked_until(node.name, target) - world.now_s
        if fails:
            world.ledger.note("transfer failed", node.name, target)
            if landing.plane and landing.transfer % 2:  # the receiver did not dial
                delay_s = AWAITED_S
            world.after(delay_s, self._fail, done, f"the connection to {target} broke")
        elif stall_s > STALLED_S:
            world.after(STALLED_S, self._fail, done, f"{target} took nothing for {STALLED_S:g} s")
        else:
            world.after(delay_s + max(0.0, stall_s), self._arrive, there, landing, parts, done)

    def _arrive(self, there: SimBulk, landing: Landing, parts: _Parts, done: _Done) -> None:
        world, node, target = self._world, self._node, there._node
        if not node.alive:
            return  # the bytes went with their process
        until_s = max(node.paused_until_s, target.paused_until_s)
        if until_s > world.now_s:
            if target.alive and target.paused_until_s - world.now_s > STALLED_S:
                words = f"{target.name} took nothing for {STALLED_S:g} s"
                world.after(STALLED_S, self._fail, done, words)
            else:
                world.at(until_s, self._arrive, there, landing, parts, done)
            return
        if not target.alive:
            self._fail(done, f"{target.name} is gone")
            return
        waiting = there._landings.pop(landing.transfer, None)
        if waiting is None:  # cancelled there; the sender may or may not hear of it
            if self._random.random() < 0.5:
                self._fail(done, f"{target.name} does not want the bytes any more")
            else:
                node.call(lambda: done(None))
            return
        buffer = np.zeros(landing.size_bytes, np.uint8)
        for offset, array in parts:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            buffer[offset : offset + flat.size] = flat
        buffer.flags.writeable = False
        target.call(lambda: waiting[1](buffer))
        world.after(self._random.uniform(0.0, 1e-4), node.call, lambda: done(None))

    def _fail(self, done: _Done, words: str) -> None:
        self._node.call(lambda: done(TransferFailed(words)))
