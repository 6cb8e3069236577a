"""The interface between a node and its network.

A `Network` carries messages to other nodes, and sees its node as a `Mailroom`. So the same node
runs over sockets and inside one process.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from pw.core.ids import Address


class Mailroom(Protocol):
    """The node, as a network sees it."""

    @property
    def name(self) -> str:
        """Name of the node."""

    @property
    def counters(self) -> Counter[str]:
        """Counters of the node."""

    @property
    def backlog(self) -> int:
        """Messages in the mailbox."""

    def post(self, actor: str, message: object, sender: Address | None = None) -> None:
        """Put a message that has arrived into the mailbox."""

    def post_to_all(self, message: object) -> None:
        """Put a message into the mailbox once for every actor."""


class Network(Protocol):
    """Carries messages between nodes: FIFO for each pair, at most once, losses reported."""

    def attach(self, node: Mailroom) -> None:
        """Deliver to this node from now on."""

    def send(self, to: Address, sender: Address, message: object) -> None:
        """Take a message for another node; it leaves with the next `flush`, if not before.

        Raises:
            ProtocolError: the message cannot cross to another process.
        """

    def flush(self) -> None:
        """Send all messages of this loop turn, in one frame for each peer."""

    def introduce(self, node: str, endpoint: str) -> None:
        """Make `node` reachable at `endpoint`; a link is made when first needed."""

    def heard_s(self, node: str) -> float | None:
        """How many seconds ago anything came from `node`; None without a link."""

    def forget(self, node: str) -> None:
        """Drop the link to `node`, its endpoint, and its unsent messages."""

    def close(self) -> None:
        """Say goodbye to all peers, and close all connections."""
