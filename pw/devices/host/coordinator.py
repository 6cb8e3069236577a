"""The shard coordinator of a host: the edges of programs, host to host (the paper's Plaque role).

The plan tells both ends of an edge about each other. For a small edge the sender sends the bytes in a
message. For a large one the receiver posts where they should go (`EdgeCredit`) as soon as it sees the
launch, and the sender pushes over the bulk plane when its value is ready. Messages between hosts and
launches come over different links, so either may be first: what arrives for an edge that is not expected
yet is kept until it is, within bounds of bytes. A receiver whose launch will not come, because its run was
withdrawn, tells its senders (a credit without a place), or they would keep the bytes while the client stays.
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
from pw.core.messages import (
    INLINE_BYTES,
    EdgeCredit,
    EdgeData,
    EdgeFailed,
    EdgeGone,
    EdgeProbe,
    EdgeReport,
    PeerLost,
)
from pw.core.packing import pack, unpack
from pw.core.plan import Receive, Route, Send
from pw.core.reshard import route_layout
from pw.core.sharding import Box, DeviceAddress
from pw.core.ticker import Ticker
from pw.devices.host.backend import Backend, Build, Op, Part, Read, Value

SERIES_BITS = 39
"""Above these bits, runs are told apart that begin in no particular order: those of different clients, and
those that are repeated from those that are not."""

PROBE_S = 2.0
"""How long an edge may take before its sender is asked, at first."""

PARKED_BYTES = 256 << 20
"""Bytes of edges kept that no launch has announced yet."""

PARKED_S = 600.0
"""How long what came early waits for the launch that receives it. After that, the launch has been cancelled
with the host that bore this name before; if not, the receiver will ask and hear that it was sent. A credit for
a run whose turn has not come waits on."""

EXPIRY_S = 1.0
"""How often to look, at most, what has waited that long."""

EDGES_TOLD = 64
"""Open edges that a host tells of when it is asked."""

ORPHAN_S = 30.0
"""How long the edges of a client that has left may stay without a receiver."""

_Early = EdgeCredit | EdgeData | EdgeFailed
Arrived = Callable[[Build | None], None]
"""Called when the value of an edge can be used by what is submitted from now on, at first the op that makes it
if one is given."""


@dataclass(slots=True)
class _Outgoing:
    """The sending end of one route of one edge."""

    run: int
    send: Send
    total_bytes: int
    offsets: tuple[int, ...]
    views: list[np.ndarray[Any, Any]] | None = None
    landing: Landing | None = None
    failed: bool = False
    """There is no value; the credit, which every large edge gets, has yet to come."""
    since_s: float = 0.0


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
    since_s: float = 0.0
    probe_s: float = 0.0
    """When to ask whether it is still to come."""


@dataclass(frozen=True, slots=True)
class _DropOrphans:
    """Note to oneself: the edges of this client, or run, that found no other end are void now."""

    client: int
    run: int = 0

    def concerns(self, run: int) -> bool:
        """Whether an edge of `run` is meant."""
        return run == self.run or client_of(run) == self.client


@dataclass(frozen=True, slots=True)
class _Probe:
    """Note to oneself: some edges may have been lost."""


@dataclass(frozen=True, slots=True)
class _Expire:
    """Note to oneself: some of what came early has waited long enough."""


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
        self._parked_at: dict[tuple[int, int, str, bool], float] = {}
        self._parked_bytes = 0
        self._pushing: dict[tuple[int, int, str], _Outgoing] = {}
        """What the bulk plane has been given and has not said to be done."""
        self._gone_clients: set[int] = set()
        self._void_clients: set[int] = set()
        self._begun = 0
        self._began: dict[int, int] = {}
        """Places of the runs under way here."""
        self._probes = Ticker(env, PROBE_S, _Probe())
        self._expiry = Ticker(env, PARKED_S, _Expire())
        self._sent: dict[int, set[tuple[int, str]]] = {}
        """Edges and destinations that runs under way here have begun to send."""
        self._newest: dict[int, int] = {}
        """The newest run begun here of each series: runs of one series begin in order."""
        self._gone_at: dict[str, int] = {}
        """How many runs had begun here when a host left its island: whoever bears its name since then
        has never heard of them. Kept while one of them is under way."""
        self._lost_at: dict[str, int] = {}
        """The same for the link to a host: the host may wait for what was to be sent."""
        self._present: frozenset[str] = frozenset()
        self._absent: set[str] = set()

    def begin(self, run: int) -> int:
        """A run begins here: its place among the runs of this host."""
        self._begun += 1
        self._began[run] = self._begun
        self._sent[run] = set()
        series = run >> SERIES_BITS
        self._newest[series] = max(run, self._newest.get(series, 0))
        return self._begun

    def end(self, run: int) -> None:
        """All instructions of a run have been handed over here, or will never be."""
        self._sent.pop(run, None)
        self._began.pop(run, None)
        if self._gone_at or self._lost_at:
            oldest = min(self._began.values(), default=self._begun + 1)
            for losses in (self._gone_at, self._lost_at):
                for node in [node for node, begun in losses.items() if begun < oldest]:
                    del losses[node]

    # --- receiving -----------------------------------------------------------------------------------

    def expect(
        self,
        run: int,
        receive: Receive,
        value: Value,
        devices: tuple[DeviceAddress, ...],
        arrived: Arrived,
    ) -> None:
        """Prepare for an edge of a run just launched; `arrived` is called once, when all of it is here."""
        routes = {route.source_host: route for route in receive.routes}
        incoming = _Incoming(run, receive, value, devices, arrived, set(routes))
        incoming.since_s = self.env.now_s()
        incoming.probe_s = incoming.since_s + PROBE_S
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
                self._fail(incoming, source, early.error, alone=early.alone)
        self._probes.start()
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
            self._fail(incoming, source, ErrorReport.of(error, self._host), alone=True)
            return False
        incoming.transfers[source] = landing.transfer
        self.env.send(coordinator_of(source), EdgeCredit(run, edge, landing))
        return True

    def _landed(self, incoming: _Incoming, route: Route) -> Callable[[Bytes], None]:
        return lambda buffer: self._take(incoming, route, buffer)

    def decline(self, run: int, receive: Receive) -> None:
        """An edge of a run whose launch will not come here: nobody is to keep or send anything for it."""
        for source in [route.source_host for route in receive.routes]:
            if source == self._host:
                continue
            self._unpark((run, receive.edge, source, False))
            if source not in self._absent:
                self.env.send(coordinator_of(source), EdgeCredit(run, receive.edge, None))

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
                self._fail(incoming, self._host, views, alone=_is_alone(source))
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
            report = ErrorReport.of(error, self._host)
            self._fail(incoming, route.source_host, report, alone=True)
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
        build = Build(incoming.value, incoming.receive.spec, incoming.devices, incoming.parts)
        if build.size_bytes <= INLINE_BYTES:
            incoming.arrived(build)
            return
        # A large one would hold up what does not need it.
        build.done = lambda error: incoming.arrived(None)
        self._backend.submit([build])

    @handles(EdgeFailed)
    def _edge_failed(self, sender: Address, message: EdgeFailed) -> None:
        incoming = self._incoming.get((message.run, message.edge))
        if incoming is None:
            self._park((message.run, message.edge, sender.node), message, 0)
        elif sender.node in incoming.missing:
            self._fail(incoming, sender.node, message.error, alone=message.alone)

    def _fail(
        self, incoming: _Incoming, source: str, error: ErrorReport, *, alone: bool = False
    ) -> None:
        """A route has no value: poison what the edge should have filled, and go on.

        The edge stays known until its other routes have ended as well: what they bring must find it.
        `alone`: other hosts may have got the value.
        """
        first, incoming.failed = not incoming.failed, True
        if source in incoming.transfers:
            self._bulk.cancel(incoming.transfers[source])
        incoming.missing.discard(self._host)
        self._ended(incoming, source)
        if first:
            incoming.parts.clear()
            incoming.value.alone = alone
            incoming.value.error = error
            incoming.arrived(None)

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
        outgoing = _Outgoing(run, send, total, offsets, since_s=self.env.now_s())
        key = (run, send.edge, send.route.destination_host)
        void = key[2] in self._absent or began <= self._gone_at.get(key[2], 0)
        if not void and began <= self._lost_at.get(key[2], 0):
            void = True
            self._unsent(key)
        is_wanted = client_of(run) not in self._void_clients or (*key, True) in self._parked
        if is_wanted and not void:
            self._outgoing[key] = outgoing
        if run in self._sent:
            self._sent[run].add((send.edge, key[2]))
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
                    EdgeFailed(run, send.edge, views, alone=_is_alone(value)),
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
        if outgoing is None and message.landing is None and not self._is_to_come(key):
            return  # it was sent, or never will be: nobody would take the credit
        if (
            outgoing is None
            and client_of(message.run) in self._gone_clients
            and not self._is_queued(key)
        ):
            self._refuse(key)
        elif outgoing is None:
            self._park(key, message, 0)
        elif outgoing.failed or message.landing is None:
            del self._outgoing[key]
        else:
            outgoing.landing = message.landing
            self._push(key, outgoing)

    def _is_queued(self, key: tuple[int, int, str]) -> bool:
        """Whether an edge is of a run whose turn is still to come here, so that it will be sent."""
        run, *edge = key
        return run in self._sent and tuple(edge) not in self._sent[run]

    def _is_to_come(self, key: tuple[int, int, str]) -> bool:
        """Whether an edge may still be sent: its run has not begun here, or is queued."""
        run = key[0]
        is_newer = run > self._newest.get(run >> SERIES_BITS, 0)
        return (is_newer and client_of(run) not in self._gone_clients) or self._is_queued(key)

    def _refuse(self, key: tuple[int, int, str]) -> None:
        """There is no sender for a credit any more: its receiver must not wait. Others may have the value."""
        run, edge, destination = key
        error = ErrorReport.of(Disconnected("the client has left"), self._host)
        self.env.send(coordinator_of(destination), EdgeFailed(run, edge, error, alone=True))

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

        self._pushing[key] = outgoing

        def pushed(error: Exception | None) -> None:
            if self._pushing.pop(key, None) is not None and error is not None:
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
        if client_of(key[0]) in self._gone_clients and not isinstance(message, EdgeCredit):
            self.env.count("edges_stale")
            return
        if self._parked_bytes + size_bytes > PARKED_BYTES:
            self.env.count("edges_dropped")
            self.env.log("error", "too many early edges", run=key[0], edge=key[1], sender=key[2])
            error = TransferFailed(
                f"more than {PARKED_BYTES} bytes came to host {self._host} from other hosts before it was told "
                "what they are for"
            )
            message = EdgeFailed(key[0], key[1], ErrorReport.of(error, self._host))
            size_bytes = 0
        self.env.count("edges_early")
        place = (*key, isinstance(message, EdgeCredit))
        self._parked[place] = message
        self._parked_at[place] = self.env.now_s()
        self._expiry.start()
        self._parked_bytes += size_bytes

    @handles(_Expire)
    def _expire(self, sender: Address, note: _Expire) -> None:
        now_s = self.env.now_s()
        for place in [p for p, since_s in self._parked_at.items() if now_s - since_s >= PARKED_S]:
            if place[3] and self._is_queued(place[:3]):
                self._parked_at[place] = now_s  # nobody would give it again
                continue
            self._unpark(place)
            self.env.count("edges_expired")
        self._expiry.ticked(more=False)
        if self._parked_at:
            due_s = min(self._parked_at.values()) + PARKED_S
            self._expiry.start(max(due_s - now_s, EXPIRY_S))

    def _unpark(self, key: tuple[int, int, str, bool]) -> _Early | None:
        message = self._parked.pop(key, None)
        self._parked_at.pop(key, None)
        if isinstance(message, EdgeData):
            self._parked_bytes -= len(message.data)
        return message

    def drop_client(self, client: int) -> None:
        """A client is gone. What was launched on both ends completes; the rest is void after a while.

        A receiver posts its credit when its launch arrives, so an edge without one after `ORPHAN_S` has
        no receiver: its launch was still queued when the client went.
        """
        self._gone_clients.add(client)
        for series in [
            series for series in self._newest if client_of(series << SERIES_BITS) == client
        ]:
            del self._newest[series]
        self.env.call_later(ORPHAN_S, _DropOrphans(client))

    def drop_run(self, run: int) -> None:
        """The rest of a run will not come: edges from what was launched to what was not are void soon."""
        self.env.call_later(ORPHAN_S, _DropOrphans(0, run))

    @handles(_DropOrphans)
    def _drop_orphans(self, sender: Address, message: _DropOrphans) -> None:
        if message.client:
            self._void_clients.add(message.client)
        for early in [early for early in self._parked if message.concerns(early[0])]:
            if early[3] and self._is_queued(early[:3]):
                continue
            void = self._unpark(early)
            if isinstance(void, EdgeCredit) and void.landing is not None:
                self._refuse(early[:3])
        for key, outgoing in list(self._outgoing.items()):
            if message.concerns(key[0]) and outgoing.landing is None:
                del self._outgoing[key]

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        self._lose(message.node, message.words)

    def hosts_are(self, nodes: frozenset[str]) -> None:
        """The controller says which hosts exist; one that has gone sends nothing more.

        Launches come behind this on the same link, so what they expect from a host that has gone
        fails at once, whether or not there ever was a link to it.
        """
        gone, self._present = self._present - nodes, nodes
        self._absent = (self._absent | gone) - nodes
        for node in sorted(gone):
            if self._began:
                self._gone_at[node] = self._begun
            self._lose(node, "it left its island")
            for key in [key for key in self._pushing if key[2] == node]:
                del self._pushing[key]  # whoever bears its name next has not heard of the run

    def _lose(self, node: str, reason: str) -> None:
        """Edges from and to a lost host will never be completed."""
        if self._began:
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

    @handles(_Probe)
    def _probe(self, sender: Address, note: _Probe) -> None:
        """Ask after edges that have not come for long: a link may have been lost, and they with it."""
        now_s = self.env.now_s()
        for (run, edge), incoming in self._incoming.items():
            if now_s < incoming.probe_s:
                continue
            incoming.probe_s = now_s + 2 * (now_s - incoming.since_s)
            for source in sorted(incoming.missing - {self._host}):
                self.env.send(coordinator_of(source), EdgeProbe(run, edge))
        self._probes.ticked(more=bool(self._incoming))

    @handles(EdgeProbe)
    def _probed(self, sender: Address, message: EdgeProbe) -> None:
        """Has this been sent, so that it will not come (again)?"""
        key = (message.run, message.edge, sender.node)
        if not (self._is_to_come(key) or key in self._outgoing or key in self._pushing):
            self.env.send(coordinator_of(sender.node), EdgeGone(message.run, message.edge))

    @handles(EdgeGone)
    def _gone(self, sender: Address, message: EdgeGone) -> None:
        incoming = self._incoming.get((message.run, message.edge))
        if incoming is not None and sender.node in incoming.missing:
            error = HostLost(
                f"what {sender.node} had sent was lost with the link between the hosts"
            )
            self._fail(incoming, sender.node, ErrorReport.of(error, self._host))

    def _unsent(self, key: tuple[int, int, str]) -> None:
        """The link to a host was lost, and with it this edge: the host, if it is there, must not wait."""
        run, edge, destination = key
        error = ErrorReport.of(HostLost("the link between two hosts was lost"), self._host)
        self.env.send(coordinator_of(destination), EdgeFailed(run, edge, error))

    def _lost(self, node: str, reason: str) -> ErrorReport:
        return ErrorReport.of(
            HostLost(f"host {node} was lost while it was sending: {reason}"), self._host
        )

    def edge_of(self, value: Value) -> tuple[int, int]:
        """The run and edge that a value on its way belongs to; (0, 0) once all of it is here."""
        for key, incoming in self._incoming.items():
            if incoming.value is value:
                return key
        return 0, 0

    def edges(self) -> tuple[EdgeReport, ...]:
        """Both kinds of ends that are open here, those that opened first before the others."""
        now_s = self.env.now_s()
        found = []
        for (run, edge), incoming in self._incoming.items():
            for route in incoming.receive.routes:
                peer = route.source_host
                if peer not in incoming.missing:
                    continue
                transfer = incoming.transfers.get(peer)
                report = EdgeReport(
                    run,
                    edge,
                    peer,
                    True,
                    "awaited" if transfer is None else "credit sent",
                    _shards(route),
                    route_layout(route, incoming.receive.source)[1],
                    0 if transfer is None else self._bulk.landed_bytes(transfer),
                    now_s - incoming.since_s,
                )
                found.append(report)
        for ends, is_moving in ((self._outgoing, False), (self._pushing, True)):
            for (run, edge, peer), outgoing in ends.items():
                state = "sending" if is_moving else "no credit"
                if outgoing.views is None and not outgoing.failed:
                    state = "no value"
                report = EdgeReport(
                    run,
                    edge,
                    peer,
                    False,
                    state,
                    _shards(outgoing.send.route),
                    outgoing.total_bytes,
                    0,
                    now_s - outgoing.since_s,
                )
                found.append(report)
        found.sort(key=lambda report: -report.open_s)
        early = [
            EdgeReport(run, edge, peer, False, "credit early")
            for run, edge, peer, is_credit in self._parked
            if is_credit
        ]
        return tuple((found + early)[:EDGES_TOLD])

    def census(self) -> dict[str, int]:
        """Edges under way on this host."""
        return {
            "edges_incoming": len(self._incoming),
            "edges_outgoing": len(self._outgoing),
            "edges_parked": len(self._parked),
        }


def _is_alone(value: Value) -> bool:
    """Whether a value that could not be read may have been read on other hosts."""
    return value.error is None or value.alone


def _shards(route: Route) -> tuple[int, ...]:
    return tuple(sorted({piece.source_device for piece in route.pieces}))


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
