"""Admits the processes that dial a node.

Tcp connections that have not greeted yet are strangers. Their number is bounded, in all and for
each address: beyond a bound the oldest is dropped, so that idle ones keep no good one out.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Protocol, TypeVar

from pw.core.ids import CONTROLLER
from pw.transport.access.credentials import Identity
from pw.transport.access.security import NO_CREDENTIALS, Security
from pw.transport.access.tls import plain_alert
from pw.transport.endpoints import is_off_loopback, is_on_loopback
from pw.transport.links.admission import Access
from pw.transport.links.connection import StreamConnection
from pw.transport.log import Warnings

Stranger = TypeVar("Stranger")

STRANGERS = 512
STRANGERS_OF_ADDRESS = 128


class Network(Protocol):
    """The network that listens."""

    name: str
    endpoint: str

    def accept(self, accepted: socket.socket) -> StreamConnection:
        """Begin a connection."""

    def turn_away(self, connection: StreamConnection) -> None:
        """Drop a connection that has not greeted, and say nothing."""

    def count(self, counter: str) -> None:
        """Count an event."""


class Entrance:
    """Takes what the listening sockets of a node accept."""

    def __init__(
        self, network: Network, access: Access, security: Security, warnings: Warnings
    ) -> None:
        self._network = network
        self._access = access
        self._security = security
        self._warnings = warnings
        self._strangers: dict[StreamConnection, str] = {}

    def accepted(self, connection: socket.socket) -> None:
        """A process of this user, or one over tcp, has dialled."""
        if connection.family == socket.AF_UNIX:
            self._network.accept(connection)
        elif self._security.takes_tcp:
            self._make_room(self._network.accept(connection))
        else:
            peer = "tcp"
            with contextlib.suppress(OSError):  # the dialler is gone
                peer = "{}:{}".format(*connection.getpeername())
                connection.setblocking(False)
                connection.send(plain_alert())
            connection.close()
            self.refused(peer, None, NO_CREDENTIALS)

    def refused(self, peer: str, identity: Identity | None, reason: str) -> None:
        """A stranger is refused."""
        self._network.count("connections_refused")
        fields = {} if identity is None else {"name": identity.uri}
        self._warnings.once(reason, "a connection is refused", peer, **fields, reason=reason)
        self._access.refused(peer, identity, reason)

    def ended(self, reason: str) -> None:
        """A stranger's connection has ended, and not because its process has."""
        self._network.count("connections_malformed")
        self._warnings.once(reason, "a stranger's connection", self._network.name, reason=reason)

    def introduced(self, node: str, endpoint: str) -> None:
        """Warn if a host of a cluster on several machines can be dialled only on its own."""
        away = is_off_loopback(self._network.endpoint) and is_on_loopback(endpoint)
        if away and node != CONTROLLER:
            words = "no other machine can dial this peer, unless it gets another --bind"
            self._warnings.once(("loopback", node), words, node, endpoint=endpoint)

    def refused_user(self) -> None:
        """Another user's process has dialled, and was refused."""
        self._network.count("connections_refused")
        self._warnings.once("user", "another user's process has dialled", self._network.name)

    def deferred(self, error: OSError) -> None:
        """This process has no descriptor for a connection."""
        self._network.count("accepts_deferred")
        event = "cannot accept connections"
        self._warnings.once("accept", event, self._network.name, reason=error)

    def _make_room(self, new: StreamConnection) -> None:
        """Count a new stranger, and drop the oldest if there are too many."""
        strangers, host = self._strangers, new.peer.rpartition(":")[0]
        if len(strangers) >= STRANGERS_OF_ADDRESS:
            for known in [one for one in strangers if one.is_open or one.closed]:
                del strangers[known]
        oldest = crowded_out(strangers, host)
        strangers[new] = host
        if oldest is not None:
            del strangers[oldest]
            self._network.count("connections_crowded_out")
            self._network.turn_away(oldest)


def crowded_out(strangers: Mapping[Stranger, str], host: str) -> Stranger | None:
    """Return the stranger that leaves when another one of this address comes; None if there is room.

    Args:
        strangers: the address of each, the oldest first.
    """
    if len(strangers) < min(STRANGERS_OF_ADDRESS, STRANGERS):
        return None
    same = [one for one, address in strangers.items() if address == host]
    if len(same) >= STRANGERS_OF_ADDRESS:
        return same[0]
    return next(iter(strangers)) if len(strangers) >= STRANGERS else None
