"""The shard coordinator of a host: the edges of programs, host to host (the paper's Plaque role).

The plan tells both ends of an edge about each other. For a small edge the sender sends the bytes in a
message. For a large one the receiver posts where they should go (`EdgeCredit`) as soon as it sees the
launch, and the sender pushes over the bulk plane when its value is ready. Messages between hosts and
launches come over different links, so either may be first: what arrives for an edge that is not expected
yet is kept until it is, within bounds of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core.actor import Actor, Env, handles
from pw.core.errors import (
    Disconnected,
    Error,
    ErrorReport,
    HostLost,
    ProtocolError,
    TransferFailed,
)
from pw.core.ids import Address, client_of, coordinator_of
from pw.core.landing import Bulk, Bytes, Landing
from pw.core.messages import INLINE_BYTES, EdgeCredit, EdgeData, EdgeFailed, PeerLost
from pw.core.packing import pack, unpack
from pw.core.plan import Receive, Route, Send
from pw.core.reshard import route_layout
from pw.core.sharding import Box, DeviceAddress
from pw.devices.backend import Backend, Build, Op, Part, Read, Value

PARKED_BYTES = 256 << 20
"""Bytes of edges kept that no launch has announced yet."""

FAILURE_KEPT_S = 600.0
"""How long news that an edge failed wait for the launch that receives it."""

ORPHAN_S = 30.0
"""How long the edges of a client that has left may stay without a receiver."""

_Early = EdgeCredit | EdgeData | EdgeFailed
Arrived = Callable[[], None]


@dataclass(slots=True)
class _Outgoing:
    """The sending end of one route of one edge."""

    run: int
    send: Send
    total_bytes: int
    offsets: list[int]
    views: list[np.ndarray[Any, Any]] | None = None
    landing: Landing | None = None
    failed: bool = False
    """There is no value; the credit, which every large edge gets, has yet to come."""


@dataclass(slots=True)
class _Incoming:
    """The receiving end of one edge: over when every route has delivered or failed."""

    run: int
    receive: Receive
    value: Value
    devices: tuple[DeviceAddress, ...]
    arrived: Arrived
    missing: set[str]
    parts: list[Part] = field(default_factory=list)
    transfers: dict[str, int] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _DropOrphans:
    """Note to oneself: the edges of this client, or run, that found no other end are void now."""

    client: int
    run: int = 0

    def concerns(self, run: int) -> bool:
        """Whether an edge of `run` is meant."""
        return run == self.run or client_of(run) == self.client


@dataclass(frozen=True, slots=True)
class _Expire:
    """Note to oneself: news of a failed edge have waited long enough."""

    place: tuple[int, int, str, bool]


class ShardCoordinator(Actor):
    """Moves the pieces of edges between this host and others."""

    def __init__(self, env: Env, backend: Backend, bulk: Bulk) -> None:
        super().__init__(env)
        self._backend = backend
        self._bulk = bulk
        self._host = env.address.node
        self._outgoing: dict[tuple[int, int, str], _Outgoing] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._parked: dict[tuple[int, int, str, bool], _Early] = {}
        """By run, edge and peer, and whether it is a credit: one edge may go both ways between two hosts."""
        self._parked_bytes = 0
        self._gone_clients: set[int] = set()
        self._void_clients: set[int] = set()
        self._begun = 0
        self._gone_at: dict[str, int] = {}
        """How many runs had begun here when a host left its island: whoever bears its name since then
        has never heard of them."""
        self._lost_at: dict[str, int] = {}
        """The same for the link to a host: the host may wait for what was to be sent."""
        self._present: frozenset[str] = frozenset()
        self._absent: set[str] = set()

    def begin(self) -> int:
        """A run begins here: its place among the runs of this host."""
        self._begun += 1
        return self._begun

    # --- receiving -----------------------------------------------------------------------------------

    def expect(
        self,
        run: int,
        receive: Receive,
        value: Value,
        devices: tuple[DeviceAddress, ...],
        arrived: Arrived,
    ) -> None:
        """Prepare for an edge of a run just launched; `arrived` is called when `value` can be used."""
        routes = {route.source_host: route for route in receive.routes}
        incoming = _Incoming(run, receive, value, devices, arrived, set(routes))
        self._incoming[(run, receive.edge)] = incoming
        for source, route in routes.items():
            if source == self._host:
                continue
            if source in self._absent:
                self._fail(incoming, source, self._lost(source, "it left its island"))
                continue
            total = route_layout(route, receive.source)[1]
            if total > INLINE_BYTES and not self._grant(incoming, route, total):
                continue
            early = self._unpark((run, receive.edge, source, False))
            if isinstance(early, EdgeData):
                self._take(incoming, route, early.data)
            elif isinstance(early, EdgeFailed):
                self._fail(incoming, source, early.error)
        if not routes:
            self._build(incoming)

    def _grant(self, incoming: _Incoming, route: Route, total_bytes: int) -> bool:
        """Tell a sender where its bytes go; False if there is no room, which fails the edge."""
        run, edge, source = incoming.run, incoming.receive.edge, route.source_host
        try:
            landing = self._bulk.land(total_bytes, self._landed(incoming, route))
        except Error as error:
            self.env.send(coordinator_of(source), EdgeCredit(run, edge, None))
            self._unpark((run, edge, source, False))
            self._fail(incoming, source, ErrorReport.of(error, self._host))
            return False
        incoming.transfers[source] = landing.transfer
        self.env.send(coordinator_of(source), EdgeCredit(run, edge, landing))
        return True

    def _landed(self, incoming: _Incoming, route: Route) -> Callable[[Bytes], None]:
        return lambda buffer: self._take(incoming, route, buffer)

    def local_read(
        self, run: int, receive: Receive, source: Value, devices: tuple[DeviceAddress, ...]
    ) -> Op | None:
        """The op that reads this host's own pieces of an edge, to be submitted in its turn."""
        incoming = self._incoming.get((run, receive.edge))
        route = next((r for r in receive.routes if r.source_host == self._host), None)
        if incoming is None or route is None:
            return None

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                self._fail(incoming, self._host, views)
            else:
                self._collect(incoming, route, views)

        return Read(source, _source_boxes(route), receive.source, devices, read)

    @handles(EdgeData)
    def _data(self, sender: Address, message: EdgeData) -> None:
        incoming = self._incoming.get((message.run, message.edge))
        if incoming is None:
            self._park((message.run, message.edge, sender.node), message, len(message.data))
            return
        for route in incoming.receive.routes:
            if route.source_host == sender.node:
                self._take(incoming, route, message.data)

    def _take(self, incoming: _Incoming, route: Route, buffer: bytes | Bytes) -> None:
        offsets, total = route_layout(route, incoming.receive.source)
        if len(buffer) != total:
            error = ProtocolError(
                f"edge {incoming.receive.edge} from {route.source_host} came with {len(buffer)} bytes "
                f"instead of {total}"
            )
            self._fail(incoming, route.source_host, ErrorReport.of(error, self._host))
            return
        source = incoming.receive.source
        views = [
            unpack(buffer, offset, source, piece.source_box)
            for piece, offset in zip(route.pieces, offsets, strict=True)
        ]
        self._collect(incoming, route, views)

    def _collect(
        self, incoming: _Incoming, route: Route, views: list[np.ndarray[Any, Any]]
    ) -> None:
        if route.source_host not in incoming.missing:
            return
        if incoming.failed:
            self._ended(incoming, route.source_host)
            return
        incoming.missing.discard(route.source_host)
        incoming.parts += [
            (piece.destination_devices, piece.destination_box, view)
            for piece, view in zip(route.pieces, views, strict=True)
        ]
        if not incoming.missing:
            self._build(incoming)

    def _build(self, incoming: _Incoming) -> None:
        del self._incoming[(incoming.run, incoming.receive.edge)]
        self._backend.submit(
            [
                Build(
                    incoming.value,
                    incoming.receive.spec,
                    incoming.devices,
                    incoming.parts,
                    lambda error: incoming.arrived(),
                )
            ]
        )

    @handles(EdgeFailed)
    def _edge_failed(self, sender: Address, message: EdgeFailed) -> None:
        incoming = self._incoming.get((message.run, message.edge))
        if incoming is None:
            self._park((message.run, message.edge, sender.node), message, 0)
        elif sender.node in incoming.missing:
            self._fail(incoming, sender.node, message.error)

    def _fail(self, incoming: _Incoming, source: str, error: ErrorReport) -> None:
        """A route has no value: poison what the edge should have filled, and go on.

        The edge stays known until its other routes have ended as well: what they bring must find it.
        """
        first, incoming.failed = not incoming.failed, True
        if source in incoming.transfers:
            self._bulk.cancel(incoming.transfers[source])
        incoming.missing.discard(self._host)
        self._ended(incoming, source)
        if first:
            incoming.parts.clear()
            incoming.value.error = error
            incoming.arrived()

    def _ended(self, incoming: _Incoming, source: str) -> None:
        incoming.missing.discard(source)
        if not incoming.missing:
            self._incoming.pop((incoming.run, incoming.receive.edge), None)

    # --- sending -------------------------------------------------------------------------------------

    def send_op(
        self,
        run: int,
        began: int,
        send: Send,
        value: Value,
        devices: tuple[DeviceAddress, ...],
    ) -> Op:
        """The op that reads the pieces of one route, to be submitted in its turn.

        `began` is the run's place (`begin`).
        """
        offsets, total = route_layout(send.route, send.spec)
        outgoing = _Outgoing(run, send, total, offsets)
        key = (run, send.edge, send.route.destination_host)
        void = key[2] in self._absent or began <= self._gone_at.get(key[2], 0)
        if not void and began <= self._lost_at.get(key[2], 0):
            void = True
            self._unsent(key)
        if client_of(run) not in self._void_clients and not void:
            self._outgoing[key] = outgoing
        early = self._unpark((*key, True))
        if isinstance(early, EdgeCredit):
            outgoing.landing = early.landing
            if early.landing is None:
                self._outgoing.pop(key, None)

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if self._outgoing.get(key) is not outgoing:
                return
            if isinstance(views, ErrorReport):
                if total <= INLINE_BYTES or outgoing.landing is not None:
                    del self._outgoing[key]
                outgoing.failed = True
                self.env.send(
                    coordinator_of(send.route.destination_host),
                    EdgeFailed(run, send.edge, views),
                )
            elif total <= INLINE_BYTES:
                del self._outgoing[key]
                self.env.send(
                    coordinator_of(send.route.destination_host),
                    EdgeData(run, send.edge, pack(views)),
                )
            else:
                outgoing.views = views
                self._push(key, outgoing)

        return Read(value, _source_boxes(send.route), send.spec, devices, read)

    @handles(EdgeCredit)
    def _credit(self, sender: Address, message: EdgeCredit) -> None:
        key = (message.run, message.edge, sender.node)
        outgoing = self._outgoing.get(key)
        if outgoing is None and client_of(message.run) in self._gone_clients:
            self._refuse(key)
        elif outgoing is None:
            self._park(key, message, 0)
        elif outgoing.failed or message.landing is None:
            del self._outgoing[key]
        else:
            outgoing.landing = message.landing
            self._push(key, outgoing)

    def _refuse(self, key: tuple[int, int, str]) -> None:
        """There is no sender for a credit any more: its receiver must not wait."""
        run, edge, destination = key
        error = ErrorReport.of(Disconnected("the client has left"), self._host)
        self.env.send(coordinator_of(destination), EdgeFailed(run, edge, error))

    def _push(self, key: tuple[int, int, str], outgoing: _Outgoing) -> None:
        """Push as soon as both the bytes and their place are known."""
        if outgoing.views is None or outgoing.landing is None:
            return
        del self._outgoing[key]
        run, edge, destination = key
        if outgoing.landing.size_bytes < outgoing.total_bytes:
            error = ProtocolError(f"edge {edge} got a landing that is too small")
            self.env.send(
                coordinator_of(destination),
                EdgeFailed(run, edge, ErrorReport.of(error, self._host)),
            )
            return

        def pushed(error: Exception | None) -> None:
            if error is not None:
                self.env.send(
                    coordinator_of(destination),
                    EdgeFailed(run, edge, ErrorReport.of(error, self._host)),
                )

        parts = list(zip(outgoing.offsets, outgoing.views, strict=True))
        self._bulk.push(outgoing.landing, parts, pushed)

    # --- what came too early, or will never come --------------------------------------------------------

    def _park(
        self,
        key: tuple[int, int, str],
        message: _Early,
        size_bytes: int,
    ) -> None:
        if client_of(key[0]) in self._gone_clients:
            self.env.count("edges_stale")
            return
        if self._parked_bytes + size_bytes > PARKED_BYTES:
            self.env.count("edges_dropped")
            self.env.log("error", "too many early edges", run=key[0], edge=key[1], sender=key[2])
            error = TransferFailed(
                f"more than {PARKED_BYTES} bytes of edges came to host {self._host} before the launches "
                "that receive them"
            )
            message = EdgeFailed(key[0], key[1], ErrorReport.of(error, self._host))
            size_bytes = 0
        self.env.count("edges_early")
        place = (*key, isinstance(message, EdgeCredit))
        self._parked[place] = message
        if isinstance(message, EdgeFailed):
            self.env.call_later(FAILURE_KEPT_S, _Expire(place))
        self._parked_bytes += size_bytes

    @handles(_Expire)
    def _expire(self, sender: Address, note: _Expire) -> None:
        """The launch was cancelled with the host that bore this name before."""
        if isinstance(self._parked.get(note.place), EdgeFailed):
            del self._parked[note.place]

    def _unpark(self, key: tuple[int, int, str, bool]) -> _Early | None:
        message = self._parked.pop(key, None)
        if isinstance(message, EdgeData):
            self._parked_bytes -= len(message.data)
        return message

    def drop_client(self, client: int) -> None:
        """A client is gone. What was launched on both ends completes; the rest is void after a while.

        A receiver posts its credit when its launch arrives, so an edge without one after `ORPHAN_S` has
        no receiver: its launch was still queued when the client went.
        """
        self._gone_clients.add(client)
        self.env.call_later(ORPHAN_S, _DropOrphans(client))

    def drop_run(self, run: int) -> None:
        """The rest of a run will not come: edges from what was launched to what was not are void soon."""
        self.env.call_later(ORPHAN_S, _DropOrphans(0, run))

    @handles(_DropOrphans)
    def _drop_orphans(self, sender: Address, message: _DropOrphans) -> None:
        if message.client:
            self._void_clients.add(message.client)
        for early in [early for early in self._parked if message.concerns(early[0])]:
            if isinstance(self._unpark(early), EdgeCredit):
                self._refuse(early[:3])
        for key, outgoing in list(self._outgoing.items()):
            if message.concerns(key[0]) and outgoing.landing is None:
                del self._outgoing[key]

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        self._lose(message.node, message.reason)

    def hosts_are(self, nodes: frozenset[str]) -> None:
        """The controller says which hosts exist; one that has gone sends nothing more.

        Launches come behind this on the same link, so what they expect from a host that has gone
        fails at once, whether or not there ever was a link to it.
        """
        gone, self._present = self._present - nodes, nodes
        self._absent = (self._absent | gone) - nodes
        for node in sorted(gone):
            self._gone_at[node] = self._begun
            self._lose(node, "it left its island")

    def _lose(self, node: str, reason: str) -> None:
        """Edges from and to a lost host will never be completed."""
        self._lost_at[node] = self._begun
        error = self._lost(node, reason)
        for incoming in list(self._incoming.values()):
            if node in incoming.missing:
                self._fail(incoming, node, error)
        for key in [key for key in self._outgoing if key[2] == node]:
            del self._outgoing[key]
            if node not in self._absent:
                self._unsent(key)
        for early in [early for early in self._parked if early[2] == node]:
            self._unpark(early)

    def _unsent(self, key: tuple[int, int, str]) -> None:
        """The link to a host was lost, and with it this edge: the host, if it is there, must not wait."""
        run, edge, destination = key
        error = ErrorReport.of(HostLost("the link between two hosts was lost"), self._host)
        self.env.send(coordinator_of(destination), EdgeFailed(run, edge, error))

    def _lost(self, node: str, reason: str) -> ErrorReport:
        return ErrorReport.of(
            HostLost(f"host {node} was lost while it was sending: {reason}"), self._host
        )

    def census(self) -> dict[str, int]:
        """Edges under way on this host."""
        return {
            "edges_incoming": len(self._incoming),
            "edges_outgoing": len(self._outgoing),
            "edges_parked": len(self._parked),
        }


def _source_boxes(route: Route) -> list[tuple[int, Box]]:
    return [(piece.source_device, piece.source_box) for piece in route.pieces]


def is_local(receive: Receive, devices: tuple[DeviceAddress, ...], host: str) -> bool:
    """Whether every shard on `host` is made of exactly one piece, and that from `host` itself."""
    if any(route.source_host != host for route in receive.routes):
        return False
    spec = receive.spec
    shard = tuple((0, size) for size in spec.sharding.shard_shape(spec.shape))
    covered: list[int] = []
    for route in receive.routes:
        for piece in route.pieces:
            if piece.destination_box != shard:
                return False
            covered += piece.destination_devices
    here = [position for position, device in enumerate(devices) if device.host == host]
    return sorted(covered) == here
