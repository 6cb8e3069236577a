"""Measures what arrays take on each device of this host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import CONTROLLER, Address
from pw.core.messages import ArrayMemory, HeldMemory, HostMeasured, MeasureHost
from pw.devices.host.arrays import Arrays
from pw.devices.host.backend import Backend


@dataclass(eq=False, repr=False)
class Measuring(Part):
    """Answers `MeasureHost`."""

    env: Env
    backend: Backend
    arrays: Arrays

    @handles(MeasureHost)
    def _measure(self, sender: Address, message: MeasureHost) -> None:
        if sender.node != CONTROLLER:
            self.env.count("messages_refused")
            return
        held = self.arrays.on_devices()
        devices = tuple(
            self._held(ordinal, held.get(ordinal, ()), message.largest)
            for ordinal in range(message.devices)
        )
        self.env.send(sender, HostMeasured(message.request, devices))

    def _held(self, ordinal: int, arrays: Sequence[ArrayMemory], largest: int) -> HeldMemory:
        counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for one in arrays:
            count = counts[one.client]
            count[0] += 1
            count[1] += one.size_bytes
        return HeldMemory(
            tuple((client, number, size_bytes) for client, (number, size_bytes) in counts.items()),
            tuple(nlargest(largest, arrays, key=lambda one: one.size_bytes)),
            *self.backend.allocated_bytes(ordinal),
        )
