"""The receiving ends of edges on this host.

As soon as a launch arrives, the receiver tells the senders of its large edges where their bytes go.
When all routes have delivered, the backend builds the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import Error, ErrorReport, HostLost, ProtocolError
from pw.core.ids import Address, coordinator_of
from pw.core.landing import Bulk, Bytes
from pw.core.packing import unpack
from pw.core.programs.counted import Array
from pw.core.programs.plan import Receive, Route
from pw.core.programs.reshard import route_layout
from pw.core.recorder import RECEIVED
from pw.core.sharding import DeviceAddress
from pw.devices.host.backend import Backend, Build, Op, Read
from pw.devices.host.backend import Part as ShardPart
from pw.devices.host.counted import Slots, arrived_rows, parts_of, reads
from pw.devices.host.early_edges import EarlyMessages
from pw.devices.host.edge_states import Arrived, Incoming, ReceiveEvent, Receiving, route_bytes
from pw.devices.host.edges_out import shards_of, source_boxes
from pw.devices.host.observing import Observing
from pw.devices.host.run_table import RunTable
from pw.devices.host.value import Value

PROBE_S = 2.0
"""Seconds after which the senders of an edge are asked for the first time."""


@dataclass(eq=False, repr=False)
class EdgesIn(Part):
    """Receives the edges of the runs on this host."""

    env: Env
    backend: Backend
    bulk: Bulk
    runs: RunTable
    early: EarlyMessages
    observing: Observing
    _incoming: dict[tuple[int, int], Incoming] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._host = self.env.address.node
        self._probes = Ticker(self.env, PROBE_S, self._probe)

    def __len__(self) -> int:
        return len(self._incoming)

    def expect(
        self,
        run: int,
        receive: Receive,
        value: Value,
        devices: tuple[DeviceAddress, ...],
        arrived: Arrived,
    ) -> None:
        """Prepare for an edge of a run that was launched; `arrived` is called once."""
        routes = {route.source_host: route for route in receive.routes}
        now_s = self.env.now_s()
        incoming = Incoming(
            run, receive, value, devices, arrived, now_s, now_s + PROBE_S, set(routes)
        )
        self._incoming[(run, receive.edge)] = incoming
        for source, route in routes.items():
            if source == self._host:
                continue
            total = route_bytes(route, receive.source, receive.counts)
            incoming.sizes[source] = total
            if self.runs.is_absent(source):
                self._fail(incoming, source, self._lost(source, "it left its island"))
                continue
            early = self.early.take((run, receive.edge, source))
            if total > msg.INLINE_BYTES and isinstance(early, msg.EdgeData):  # few rows count
                self.env.send(coordinator_of(source), msg.EdgeCredit(run, receive.edge, None))
            elif total > msg.INLINE_BYTES and not self._grant(incoming, route, total):
                continue
            if isinstance(early, msg.EdgeData):
                self.take(incoming, route, early.data)
            elif isinstance(early, msg.EdgeFailed):
                self._fail(incoming, source, early.error, alone=early.alone)
        self._probes.start()
        if not routes:
            self._complete(incoming)

    def decline(self, run: int, receive: Receive) -> None:
        """Tell the senders of an edge that its launch does not come here."""
        for source in [route.source_host for route in receive.routes]:
            if source == self._host:
                continue
            self.early.take((run, receive.edge, source))
            if not self.runs.is_absent(source):
                self.env.send(coordinator_of(source), msg.EdgeCredit(run, receive.edge, None))

    def local_read(
        self, run: int, receive: Receive, source: Value, devices: tuple[DeviceAddress, ...]
    ) -> Op | None:
        """Return the op that reads this host's own pieces of an edge."""
        incoming = self._incoming.get((run, receive.edge))
        route = next((r for r in receive.routes if r.source_host == self._host), None)
        if incoming is None or route is None:
            return None

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                self._fail(incoming, self._host, views, alone=source.may_be_elsewhere)
            else:
                self._deliver(incoming, route, _parts(route, views))

        return Read(source, source_boxes(route), receive.source, devices, read)

    def counted_reads(
        self, run: int, receive: Receive, slots: Slots, devices: tuple[DeviceAddress, ...]
    ) -> Sequence[Op]:
        """Return the ops that read the rows that count of this host's own pieces of an edge."""
        incoming = self._incoming.get((run, receive.edge))
        route = next((r for r in receive.routes if r.source_host == self._host), None)
        if incoming is None or route is None or receive.counts is None:
            return ()

        def failed(error: ErrorReport, alone: bool) -> None:
            self._fail(incoming, self._host, error, alone=alone)

        def read(views: list[Array], counts: Array) -> None:
            self._deliver(incoming, route, parts_of(route, receive.source, views, counts))

        rows = slots[receive.source_slot]
        return reads(route, receive.source, receive.counts, rows, slots, devices, read, failed)

    def _grant(self, incoming: Incoming, route: Route, total_bytes: int) -> bool:
        """Tell a sender where its bytes go; False if there is no room, which fails the edge."""
        run, edge, source = incoming.run, incoming.receive.edge, route.source_host
        try:
            landing = self.bulk.land(total_bytes, partial(self.take, incoming, route))
        except Error as error:
            self.env.send(coordinator_of(source), msg.EdgeCredit(run, edge, None))
            self._fail(incoming, source, ErrorReport.of(error, self._host), alone=True)
            return False
        incoming.transfers[source] = landing.transfer
        self.env.send(coordinator_of(source), msg.EdgeCredit(run, edge, landing))
        return True

    @handles(msg.EdgeData)
    def _data(self, sender: Address, message: msg.EdgeData) -> None:
        incoming = self._incoming.get((message.run, message.edge))
        if incoming is None:
            key = (message.run, message.edge, sender.node)
            self.early.keep(key, message, len(message.data))
            return
        for route in incoming.receive.routes:
            if route.source_host == sender.node:
                transfer = incoming.transfers.pop(sender.node, None)
                if transfer is not None:  # fewer rows than could be: the sender does not push
                    self.bulk.cancel(transfer, unused=True)
                self.take(incoming, route, message.data)

    def take(self, incoming: Incoming, route: Route, buffer: bytes | Bytes) -> None:
        """Take the bytes of one route."""
        spec, counts = incoming.receive.source, incoming.receive.counts
        offsets, total = route_layout(route, spec) if counts is None else ((), len(buffer))
        try:
            if len(buffer) != total:
                raise ValueError(f"{len(buffer)} bytes instead of {total}")
            if counts is None:
                views = [
                    unpack(buffer, offset, spec, piece.source_box)
                    for piece, offset in zip(route.pieces, offsets, strict=True)
                ]
                parts = _parts(route, views)
            else:
                parts, padding, total = arrived_rows(incoming.receive, route, buffer)
                incoming.padding += padding
        except ValueError as error:
            edge = incoming.receive.edge
            words = f"the bytes of transfer {edge} from {route.source_host} came wrong: {error}"
            report = ErrorReport.of(ProtocolError(words), self._host)
            self._fail(incoming, route.source_host, report, alone=True)
        else:
            self._deliver(incoming, route, parts, total)

    def _deliver(
        self, incoming: Incoming, route: Route, parts: list[ShardPart], size_bytes: int = 0
    ) -> None:
        if route.source_host not in incoming.missing:
            return
        if incoming.happens(ReceiveEvent.DELIVERED) is Receiving.ARRIVING:
            incoming.parts += parts
        incoming.missing.discard(route.source_host)
        if route.source_host != self._host:
            incoming.sizes[route.source_host] = size_bytes
            if self.env.recorder.on:
                self._record(incoming, route.source_host)
        if not incoming.missing:
            self._complete(incoming)

    def _record(self, incoming: Incoming, source: str) -> None:
        """Record a route that was received, for timelines."""
        recorder = self.env.recorder
        recorder.add(
            RECEIVED,
            incoming.since_s,
            self.env.now_s(),
            incoming.run,
            incoming.receive.edge,
            recorder.name(source),
            incoming.sizes[source],
        )

    @handles(msg.EdgeFailed)
    def _edge_failed(self, sender: Address, message: msg.EdgeFailed) -> None:
        incoming = self._incoming.get((message.run, message.edge))
        if incoming is None:
            self.early.keep((message.run, message.edge, sender.node), message)
        else:
            self._fail(incoming, sender.node, message.error, alone=message.alone)

    def _fail(
        self, incoming: Incoming, source: str, error: ErrorReport, *, alone: bool = False
    ) -> None:
        """End a route with an error; the first one poisons the value and lets the launch go on.

        `alone`: other hosts may have the value.
        """
        if source not in incoming.missing:
            return
        is_first = incoming.state is Receiving.ARRIVING
        incoming.happens(ReceiveEvent.FAILED)
        if source in incoming.transfers:
            self.bulk.cancel(incoming.transfers[source])
        incoming.missing -= {source, self._host}  # this host's own pieces are not read any more
        if not incoming.missing:
            self._complete(incoming)
        if is_first:
            incoming.parts.clear()
            incoming.value.fail(error, alone=alone)
            incoming.arrived(None)

    def _complete(self, incoming: Incoming) -> None:
        """Forget an edge without missing routes, and build its value if none has failed."""
        del self._incoming[(incoming.run, incoming.receive.edge)]
        if self.observing.is_on:
            self._observe(incoming)
        if incoming.happens(ReceiveEvent.COMPLETE) is not Receiving.ARRIVED:
            return
        receive = incoming.receive
        build = Build(incoming.value, receive.spec, incoming.devices, incoming.parts)
        build.over_zeros, build.padding = receive.counts is not None, incoming.padding
        if build.size_bytes <= msg.INLINE_BYTES:
            incoming.arrived(build)
            return
        # Ops that do not need a large value must not wait until it is built.
        build.done = lambda error: incoming.arrived(None)
        self.backend.submit([build])

    def _observe(self, incoming: Incoming) -> None:
        """Note the end of an edge from other hosts."""
        if incoming.sizes:
            transfer = msg.Transferred(
                incoming.run,
                incoming.receive.edge,
                tuple(incoming.sizes),
                sum(incoming.sizes.values()),
                self.env.now_s() - incoming.since_s,
                incoming.state is not Receiving.ARRIVING,
            )
            self.observing.ended(transfer)

    def lose(self, node: str, reason: str) -> None:
        """Fail all routes from a lost host."""
        error = self._lost(node, reason)
        for incoming in list(self._incoming.values()):
            self._fail(incoming, node, error)

    def _lost(self, node: str, reason: str) -> ErrorReport:
        error = HostLost(f"host {node} was lost while it was sending: {reason}")
        return ErrorReport.of(error, self._host)

    def _probe(self) -> bool:
        """Ask the senders of edges that take long: a link may have been lost, with the bytes."""
        now_s = self.env.now_s()
        for (run, edge), incoming in self._incoming.items():
            if now_s < incoming.probe_s:
                continue
            incoming.probe_s = now_s + 2 * (now_s - incoming.since_s)
            for source in sorted(incoming.missing - {self._host}):
                self.env.send(coordinator_of(source), msg.EdgeProbe(run, edge))
        return bool(self._incoming)

    @handles(msg.EdgeGone)
    def _gone(self, sender: Address, message: msg.EdgeGone) -> None:
        incoming = self._incoming.get((message.run, message.edge))
        if incoming is not None:
            error = HostLost(f"the bytes from {sender.node} were lost with the link to it")
            self._fail(incoming, sender.node, ErrorReport.of(error, self._host))

    def edge_of(self, value: Value) -> tuple[int, int]:
        """Return the run and edge of a value that is arriving; (0, 0) when all of it is here."""
        for key, incoming in self._incoming.items():
            if incoming.value is value:
                return key
        return 0, 0

    def reports(self) -> Iterator[msg.EdgeReport]:
        """Describe every route that is missing."""
        now_s = self.env.now_s()
        for (run, edge), incoming in self._incoming.items():
            for route in incoming.receive.routes:
                peer = route.source_host
                if peer not in incoming.missing:
                    continue
                transfer = incoming.transfers.get(peer)
                yield msg.EdgeReport(
                    run,
                    edge,
                    peer,
                    True,
                    "awaited" if transfer is None else "credit sent",
                    shards_of(route),
                    route_bytes(route, incoming.receive.source, incoming.receive.counts),
                    0 if transfer is None else self.bulk.landed_bytes(transfer),
                    now_s - incoming.since_s,
                )


def _parts(route: Route, views: list[Array]) -> list[ShardPart]:
    """Return the pieces of a route as parts of the destination's shards."""
    return [
        (piece.destination_devices, piece.destination_box, view)
        for piece, view in zip(route.pieces, views, strict=True)
    ]
