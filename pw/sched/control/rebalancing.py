"""Says which slices should move, so that a request has room, or devices are shared evenly.

The resource manager plans (`pw.sched.cluster.moves`); what it does not know is whose slices they are, and how
many bytes lie on each. Who asked moves the slices then, one after the other (`suspensions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.errors import ErrorReport, InsufficientDevices
from pw.sched.cluster.moves import PlannedMove
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.suspension_requests import SuspensionRequests

Planner = Callable[[msg.AllocateSlice | None, Mapping[int, int]], tuple[PlannedMove, ...]]
"""Function that plans moves for a request, or None, by the bytes of the slices that may move."""


@dataclass(eq=False)
class Rebalancing(ControlPart):
    """Answers which slices should move."""

    requests: SuspensionRequests
    plan: Planner

    @handles_client(msg.PlanMoves)
    def _asked(self, asker: Client, message: msg.PlanMoves) -> None:
        wanted = None
        if message.devices:
            wanted = msg.AllocateSlice(
                *(0, message.devices, None, message.island, message.topology),
                exclusive=message.exclusive,
                memory_bytes=message.memory_bytes,
            )
        sizes: Counter[int] = Counter()
        for client in self.sessions.calling:
            if self.requests.may_move(asker, client):
                sizes.update(self._sizes_of(client))
        try:
            planned = self.plan(wanted, sizes)
        except InsufficientDevices as error:
            answer = msg.Answered(message.request, ErrorReport.of(error))
            self._env.send(asker.address, answer)
            return
        moves = tuple([self._in_full(move, sizes) for move in planned])
        self._env.send(asker.address, msg.MovesPlanned(message.request, moves))

    def _sizes_of(self, client: Client) -> Counter[int]:
        """Return the bytes of the arrays on each slice of a client."""
        bindings = self._islands.bindings
        sizes = Counter({number: 0 for number in client.slices.owned if number in bindings})
        for _, array in client.arrays.all():
            slice_ = array.spec.placement.slice
            if slice_ in sizes:
                sizes[slice_] += array.spec.size_bytes
        return sizes

    def _in_full(self, move: PlannedMove, sizes: Mapping[int, int]) -> msg.SliceMove:
        client = self.sessions.owner(move.slice)
        assert client is not None, "slices of clients that are here were planned for"
        source, size_bytes = self._islands.bindings[move.slice].island, sizes[move.slice]
        names = client.number, client.name
        return msg.SliceMove(*names, move.slice, source, move.island, move.devices, size_bytes)
