"""The lifecycle of an edge, at the host that sends it and at the host that receives it.

Theory of operation. An edge carries one value of one run to a host that needs it. The plan divides
it into routes, one for each host that has a part of the value. Both ends know the plan, and
launches and messages between hosts travel on different links, so either end may act first.

*Sender*: one `Outgoing` for each route. It is sent when two things are there: the value, which the
backend reads as soon as it is made, and the credit, which says where the receiver wants the bytes.
A small route needs no credit, because its bytes travel in a message: it begins as granted. A
receiver without room, or without a launch, declines. A sender whose value has failed tells the
receiver at once, but remembers the route until the credit comes: the credit would otherwise be
kept for a route that nothing ends. The same holds for a route of a counted edge with few rows: they
travel in a message, although the receiver makes room for many. A route is dropped when its receiver is
lost, or when its client has left and no credit has come in time.

*Receiver*: one `Incoming` for each edge. It ends when each of its routes has delivered or failed.
The first failure poisons the value, and the launch goes on with the error. The edge stays known
until the other routes have ended as well, because their bytes must find it.

`Outgoing.happens` and `Incoming.happens` are the only code that changes these states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from pw.core.actors.lifecycle import Lifecycle
from pw.core.landing import Landing
from pw.core.messages import INLINE_BYTES
from pw.core.programs.counted import most_bytes
from pw.core.programs.plan import Counts, Receive, Route, Send
from pw.core.programs.reshard import route_layout
from pw.core.sharding import ArraySpec, DeviceAddress
from pw.devices.host.backend import Build, Part
from pw.devices.host.value import Value

EdgeKey = tuple[int, int, str]
"""Run, number of the edge in its program, and host at the other end."""

Arrived = Callable[[Build | None], None]
"""Called when later ops may use the value of an edge, after the given op if there is one."""


class Sending(StrEnum):
    """States of a route at its sender."""

    WAITING = "waiting"  # neither the value nor the credit is there
    GRANTED = "granted"  # the credit is there, or is not needed
    READY = "ready"  # the value is there
    TOLD = "told"  # the receiver has been told, of an error or all there is; its credit is to come
    TRANSFER = "transfer"  # the bytes are on their way
    ENDED = "ended"


class SendEvent(StrEnum):
    """Events of a route at its sender."""

    CREDIT = "credit"  # the receiver says where the bytes go
    DECLINED = "declined"  # the receiver does not want the bytes
    VALUE = "value"  # the backend has read the value
    INLINE = "inline"  # the backend has read the value, and its bytes travel in a message
    FAILED = "failed"  # the backend cannot read the value
    SENT = "sent"  # the transfer has ended, with or without success
    DROPPED = "dropped"  # the receiver is lost, or asks no more


class Receiving(StrEnum):
    """States of an edge at its receiver."""

    ARRIVING = "arriving"  # some routes are missing, none has failed
    POISONED = "poisoned"  # a route has failed, others are missing
    ARRIVED = "arrived"  # all routes have delivered; the backend builds the value
    ENDED = "ended"  # all routes have ended, at least one with an error


class ReceiveEvent(StrEnum):
    """Events of an edge at its receiver."""

    DELIVERED = "delivered"  # a route has delivered its pieces
    FAILED = "failed"  # a route has failed
    COMPLETE = "complete"  # no route is missing any more


SENDER = Lifecycle(
    "edge at its sender",
    {
        Sending.WAITING: {
            SendEvent.CREDIT: Sending.GRANTED,
            SendEvent.DECLINED: Sending.ENDED,
            SendEvent.VALUE: Sending.READY,
            SendEvent.INLINE: Sending.TOLD,
            SendEvent.FAILED: Sending.TOLD,
            SendEvent.DROPPED: Sending.ENDED,
        },
        Sending.GRANTED: {
            SendEvent.DECLINED: Sending.ENDED,
            SendEvent.VALUE: Sending.TRANSFER,
            SendEvent.INLINE: Sending.ENDED,
            SendEvent.FAILED: Sending.ENDED,
            SendEvent.DROPPED: Sending.ENDED,
        },
        Sending.READY: {
            SendEvent.CREDIT: Sending.TRANSFER,
            SendEvent.DECLINED: Sending.ENDED,
            SendEvent.DROPPED: Sending.ENDED,
        },
        Sending.TOLD: {
            SendEvent.CREDIT: Sending.ENDED,
            SendEvent.DECLINED: Sending.ENDED,
            SendEvent.DROPPED: Sending.ENDED,
        },
        Sending.TRANSFER: {SendEvent.SENT: Sending.ENDED, SendEvent.DROPPED: Sending.ENDED},
        Sending.ENDED: {},
    },
)

RECEIVER = Lifecycle(
    "edge at its receiver",
    {
        Receiving.ARRIVING: {
            ReceiveEvent.DELIVERED: Receiving.ARRIVING,
            ReceiveEvent.FAILED: Receiving.POISONED,
            ReceiveEvent.COMPLETE: Receiving.ARRIVED,
        },
        Receiving.POISONED: {
            ReceiveEvent.DELIVERED: Receiving.POISONED,
            ReceiveEvent.FAILED: Receiving.POISONED,
            ReceiveEvent.COMPLETE: Receiving.ENDED,
        },
        Receiving.ARRIVED: {},
        Receiving.ENDED: {},
    },
)


def route_bytes(route: Route, source: ArraySpec, counts: Counts | None) -> int:
    """Return the bytes of a route; of a counted edge, the most that may come."""
    if counts is None:
        return route_layout(route, source)[1]
    return most_bytes(route, source, len(counts.spec.shape))


class Outgoing:
    """The sending end of one route of one edge."""

    __slots__ = ("key", "landing", "parts", "send", "since_s", "state", "total_bytes")

    def __init__(self, run: int, send: Send, since_s: float) -> None:
        self.key: EdgeKey = (run, send.edge, send.route.destination_host)
        self.send = send
        self.since_s = since_s
        self.total_bytes = route_bytes(send.route, send.spec, send.counts)
        """Bytes that travel; of a counted edge the most, until its value is read."""
        self.state = Sending.GRANTED if self.is_small else Sending.WAITING
        self.parts: list[tuple[int, np.ndarray[Any, Any]]] = []
        """The value with its offsets, once the backend has read it."""
        self.landing: Landing | None = None

    @property
    def is_small(self) -> bool:
        """Whether the bytes travel in a message."""
        return self.total_bytes <= INLINE_BYTES

    def happens(self, event: SendEvent) -> Sending:
        """Change the state, and return the new one."""
        self.state = SENDER.after(self.state, event)
        return self.state


@dataclass(slots=True, eq=False)
class Incoming:
    """The receiving end of one edge."""

    run: int
    receive: Receive
    value: Value
    devices: tuple[DeviceAddress, ...]
    arrived: Arrived
    since_s: float
    probe_s: float
    """Time of the clock, in seconds, at which the senders are asked whether the edge still comes."""
    missing: set[str]
    """The hosts that have neither delivered nor failed."""
    state: Receiving = Receiving.ARRIVING
    parts: list[Part] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """The bytes that each other host sends: at most, until they have come."""
    transfers: dict[str, int] = field(default_factory=dict)
    """The landing of each sender that was given one."""
    padding: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """Views of the parts that are filled with zeros."""

    def happens(self, event: ReceiveEvent) -> Receiving:
        """Change the state, and return the new one."""
        self.state = RECEIVER.after(self.state, event)
        return self.state
