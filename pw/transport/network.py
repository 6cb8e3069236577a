"""What a node and a network know of each other.

A `Network` carries messages to other nodes; the node behind it is seen only as a `Mailroom`.
Neither knows which kind it is given, so that a node runs over sockets or inside one process
unchanged.
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
        """Let everything go that was sent in this loop turn, in one frame for each peer."""

    def introduce(self, node: str, endpoint: str) -> None:
        """Make `node` reachable at `endpoint`; a link is made when first needed."""

    def heard_s(self, node: str) -> float | None:
        """How many seconds ago anything came from `node`; None if there is no link, or no telling."""

    def forget(self, node: str) -> None:
        """Drop the link to `node`, its endpoint, and all that waits to be sent to it."""

    def close(self) -> None:
        """Say goodbye to all peers and give everything back."""
