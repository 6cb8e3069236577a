"""The interface between a node and its network.

A `Network` carries messages to other nodes, and sees its node as a `Mailroom`. So the same node
runs over sockets and inside one process.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from pw.core.ids import Address
from pw.transport.access.credentials import Identity


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
        """Messages of peers in the mailbox."""

    def holds(self, peer: str, most: int) -> bool:
        """Whether more than `most` messages of a peer wait.

        Then the network reads no more of it, until the node calls `resume`.
        """

    def deliver(self, actor: str, message: object, sender: Address) -> None:
        """Put a message of another node into the mailbox, if its sender's role may send it."""

    def tell_all(self, peer: str, news: object) -> None:
        """Put news of a peer into the mailbox for every actor, behind the messages of that peer."""


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

    def identity_of(self, node: str) -> Identity | None:
        """The identity of a peer with a link; None for a link without TLS, or without a link."""

    def trouble_of(self, node: str) -> str:
        """What is in the way of a link to `node`; empty if there is one, or that is not known."""

    def tenant_of(self, node: str) -> str:
        """The tenant of a peer: "operator" on links without TLS; empty if it never had a link."""

    def islands_of(self, node: str) -> tuple[str, ...]:
        """The only islands that the certificate of a peer allows it to join; empty for all."""

    def resume(self, node: str) -> None:
        """Read again from a peer that was held (see `Mailroom.holds`)."""

    def forget(self, node: str) -> None:
        """Drop the link to `node`, its endpoint, and its unsent messages."""

    def close(self) -> None:
        """Say goodbye to all peers, and close all connections."""
