"""The sending ends of edges on this host.

A small edge is sent in a message when its value is made. A large one is pushed over the bulk plane
when both its value and the receiver's credit are there (`pw.devices.host.edge_states`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import Disconnected, ErrorReport, HostLost, ProtocolError
from pw.core.ids import CONTROL, Address, client_of, coordinator_of
from pw.core.landing import Bulk
from pw.core.packing import pack
from pw.core.programs.counted import Array, joined, packed
from pw.core.programs.plan import Route, Send
from pw.core.programs.reshard import route_layout
from pw.core.recorder import SENT
from pw.core.sharding import Box, DeviceAddress
from pw.devices.host.backend import Op, Read
from pw.devices.host.counted import Slots, reads
from pw.devices.host.early_edges import EarlyMessages
from pw.devices.host.edge_states import EdgeKey, Outgoing, SendEvent, Sending
from pw.devices.host.run_table import RunTable
from pw.devices.host.value import Value

REPORT_S = 2.0
"""Seconds between two reports of the bytes that were sent."""

_STAGES = {
    Sending.WAITING: "no value",
    Sending.GRANTED: "no value",
    Sending.READY: "no credit",
    Sending.TOLD: "no credit",
    Sending.TRANSFER: "sending",
}


@dataclass(eq=False, repr=False)
class EdgesOut(Part):
    """Sends the edges of the runs on this host."""

    env: Env
    bulk: Bulk
    runs: RunTable
    early: EarlyMessages
    _outgoing: dict[EdgeKey, Outgoing] = field(default_factory=dict)
    _void_clients: set[int] = field(default_factory=set)
    """Clients whose edges need a credit that is here already, because they left long ago."""
    moved: Counter[int] = field(default_factory=Counter)
    """Bytes that were sent for each client and are not reported."""

    def __post_init__(self) -> None:
        self._reports = Ticker(self.env, REPORT_S, self._report_moved)

    def __len__(self) -> int:
        return len(self._outgoing)

    def send_op(
        self, run: int, began: int, send: Send, value: Value, devices: tuple[DeviceAddress, ...]
    ) -> Op:
        """Return the op that reads and sends one route.

        `began` is the run's place (`RunTable.begin`).
        """
        outgoing = self._begin(run, began, send)

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if outgoing.state is Sending.ENDED:
                return
            if isinstance(views, ErrorReport):
                self._fail(outgoing, views, value.may_be_elsewhere)
            elif outgoing.is_small:
                self._send_inline(outgoing, pack(views))
            else:
                offsets = route_layout(send.route, send.spec)[0]
                outgoing.parts = list(zip(offsets, views, strict=True))
                if self._happens(outgoing, SendEvent.VALUE) is Sending.TRANSFER:
                    self._push(outgoing)

        return Read(value, source_boxes(send.route), send.spec, devices, read)

    def counted_ops(
        self, run: int, began: int, send: Send, slots: Slots, devices: tuple[DeviceAddress, ...]
    ) -> tuple[Op, Op]:
        """Return the ops that read the rows that count of one route, and send them."""
        outgoing = self._begin(run, began, send)
        assert send.counts is not None

        def failed(error: ErrorReport, alone: bool) -> None:
            if outgoing.state is not Sending.ENDED:
                self._fail(outgoing, error, alone)

        def read(views: list[Array], counts: Array) -> None:
            if outgoing.state is Sending.ENDED:
                return
            parts, outgoing.total_bytes = packed(
                send.route, send.spec, counts, views, msg.INLINE_BYTES
            )
            if outgoing.is_small:
                self._send_inline(outgoing, joined(parts, outgoing.total_bytes))
                return
            outgoing.parts = parts
            if self._happens(outgoing, SendEvent.VALUE) is Sending.TRANSFER:
                self._push(outgoing)

        value = slots[send.slot]
        return reads(send.route, send.spec, send.counts, value, slots, devices, read, failed)

    def fail(self, run: int, began: int, send: Send, value: Value) -> None:
        """End one route with the error of its value, which no op of the backend makes."""
        assert value.error is not None
        outgoing = self._begin(run, began, send)
        if outgoing.state is not Sending.ENDED:
            self._fail(outgoing, value.error, value.alone)

    def _begin(self, run: int, began: int, send: Send) -> Outgoing:
        outgoing = Outgoing(run, send, self.env.now_s())
        key = outgoing.key
        is_void = self.runs.has_left(key[2], began)
        if not is_void and self.runs.was_cut_off(key[2], began):
            is_void = True
            self._cut_off(key)
        is_wanted = client_of(run) not in self._void_clients or self.early.has_credit(key)
        self.runs.sends(key)
        credit = self.early.take_credit(key)
        self._outgoing[key] = outgoing
        if is_void or not is_wanted:
            self._happens(outgoing, SendEvent.DROPPED)
        elif credit is not None:
            self._take_credit(outgoing, credit)
        return outgoing

    def _fail(self, outgoing: Outgoing, error: ErrorReport, alone: bool) -> None:
        self._happens(outgoing, SendEvent.FAILED)
        self._tell_failed(outgoing.key, error, alone=alone)

    def _send_inline(self, outgoing: Outgoing, data: bytes) -> None:
        run, edge, destination = outgoing.key
        self._happens(outgoing, SendEvent.INLINE)
        self.count(run, len(data))
        self.env.send(coordinator_of(destination), msg.EdgeData(run, edge, data))
        if self.env.recorder.on:
            self._record(outgoing, self.env.now_s())

    def _happens(self, outgoing: Outgoing, event: SendEvent) -> Sending:
        state = outgoing.happens(event)
        if state is Sending.ENDED:
            del self._outgoing[outgoing.key]
        return state

    def _tell_failed(self, key: EdgeKey, error: ErrorReport, *, alone: bool = False) -> None:
        """Tell the receiver of a route that its bytes do not come."""
        run, edge, destination = key
        self.env.send(coordinator_of(destination), msg.EdgeFailed(run, edge, error, alone))

    @handles(msg.EdgeCredit)
    def _credit(self, sender: Address, message: msg.EdgeCredit) -> None:
        key = (message.run, message.edge, sender.node)
        outgoing = self._outgoing.get(key)
        if outgoing is not None and outgoing.state is not Sending.TRANSFER:
            self._take_credit(outgoing, message)
        elif message.landing is None and not self.runs.is_to_come(key):
            return  # it was sent, or is never sent: no route would take the credit
        elif client_of(message.run) in self.runs.gone_clients and not self.runs.is_queued(key):
            self._refuse(key)
        else:
            self.early.keep(key, message)

    def _take_credit(self, outgoing: Outgoing, credit: msg.EdgeCredit) -> None:
        outgoing.landing = credit.landing
        event = SendEvent.DECLINED if credit.landing is None else SendEvent.CREDIT
        if self._happens(outgoing, event) is Sending.TRANSFER:
            self._push(outgoing)

    def _refuse(self, key: EdgeKey) -> None:
        """Answer a credit that no sender will use: its receiver must not wait."""
        error = ErrorReport.of(Disconnected("the client has left"), self.env.address.node)
        self._tell_failed(key, error, alone=True)

    def _push(self, outgoing: Outgoing) -> None:
        """Push the bytes of a route to the place that its receiver has named."""
        landing = outgoing.landing
        assert landing is not None
        # If it began before the recording, a timeline shows it from its start, whenever that was.
        began_s = self.env.now_s() if self.env.recorder.on else outgoing.since_s

        size_bytes = sum(part.nbytes for _, part in outgoing.parts)

        def pushed(error: Exception | None) -> None:
            if error is None:
                self.count(outgoing.key[0], size_bytes)
            if outgoing.state is Sending.ENDED:
                return
            self._happens(outgoing, SendEvent.SENT)
            if error is not None:
                self._tell_failed(outgoing.key, ErrorReport.of(error, self.env.address.node))
            elif self.env.recorder.on:
                self._record(outgoing, began_s)

        if landing.size_bytes < outgoing.total_bytes:
            pushed(ProtocolError(f"edge {outgoing.key[1]} got a landing that is too small"))
            return
        self.bulk.push(landing, outgoing.parts, pushed)

    def count(self, run: int, size_bytes: int) -> None:
        """Count bytes for the accounts."""
        self.moved[client_of(run)] += size_bytes
        self._reports.start()

    def _report_moved(self) -> bool:
        moved, self.moved = self.moved, Counter()
        self.env.send(CONTROL, msg.BytesMoved(tuple(moved.items())))
        return False

    def _record(self, outgoing: Outgoing, began_s: float) -> None:
        """Record a route that was sent, for timelines."""
        run, edge, peer = outgoing.key
        recorder, now_s = self.env.recorder, self.env.now_s()
        recorder.add(SENT, began_s, now_s, run, edge, recorder.name(peer), outgoing.total_bytes)

    def drop_orphans(self, is_meant: Callable[[EdgeKey], bool], client: int = 0) -> None:
        """Drop the routes without a credit, and refuse the credits without a route."""
        if client:
            self._void_clients.add(client)
        for key in self.early.drop(is_meant):
            self._refuse(key)
        for key, outgoing in list(self._outgoing.items()):
            if is_meant(key) and outgoing.landing is None:
                self._happens(outgoing, SendEvent.DROPPED)

    def lose(self, node: str) -> None:
        """Drop the routes to a lost host; a transfer that has begun ends by itself."""
        for key, outgoing in list(self._outgoing.items()):
            if key[2] == node and outgoing.state is not Sending.TRANSFER:
                self._happens(outgoing, SendEvent.DROPPED)
                if not self.runs.is_absent(node):
                    self._cut_off(key)

    def left(self, node: str) -> None:
        """Forget the transfers to a host that has left: the next host of that name knows no run."""
        for key, outgoing in list(self._outgoing.items()):
            if key[2] == node:
                self._happens(outgoing, SendEvent.DROPPED)

    def _cut_off(self, key: EdgeKey) -> None:
        """Tell the receiver of a route that was lost with the link; it may still be there."""
        error = HostLost("the link between two hosts was lost")
        self._tell_failed(key, ErrorReport.of(error, self.env.address.node))

    @handles(msg.EdgeProbe)
    def _probed(self, sender: Address, message: msg.EdgeProbe) -> None:
        """Answer a receiver whose bytes do not come any more."""
        key = (message.run, message.edge, sender.node)
        if not (self.runs.is_to_come(key) or key in self._outgoing):
            self.env.send(coordinator_of(sender.node), msg.EdgeGone(message.run, message.edge))

    def reports(self) -> Iterator[msg.EdgeReport]:
        """Describe every route that has not ended."""
        now_s = self.env.now_s()
        for (run, edge, peer), outgoing in self._outgoing.items():
            yield msg.EdgeReport(
                run,
                edge,
                peer,
                False,
                _STAGES[outgoing.state],
                shards_of(outgoing.send.route),
                outgoing.total_bytes,
                0,
                now_s - outgoing.since_s,
            )


def shards_of(route: Route) -> tuple[int, ...]:
    """Return the mesh positions of the shards that a route carries."""
    return tuple(sorted({piece.source_device for piece in route.pieces}))


def source_boxes(route: Route) -> list[tuple[int, Box]]:
    """Return the boxes that a route reads at its sender."""
    return [(piece.source_device, piece.source_box) for piece in route.pieces]
