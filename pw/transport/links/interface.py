"""The interfaces between a node, its network, and the connections of the network.

A `Network` carries messages to other nodes, and sees its node as a `Mailroom`. So the same node
runs over sockets, inside one process and in the simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from pw.core.ids import Address
from pw.transport.access.identity import Identity

LOST = "connection lost"
"""The reason when the process at the other end of a connection has ended."""


class EventLoop(Protocol):
    """The event loop, as a node sees it."""

    def call_soon(self, action: Callable[..., object], /, *args: Any) -> Any:
        """Call `action(*args)` in the next turn of the loop."""

    def call_later(self, delay_s: float, action: Callable[..., object], /, *args: Any) -> Any:
        """Call `action(*args)` later; returns a timer that can be cancelled."""

    def call_soon_threadsafe(self, action: Callable[..., object], /, *args: Any) -> Any:
        """Call `action(*args)` soon; from any thread."""


class Connection:
    """One end of a connection that carries whole frames, in order, as links see it."""

    def __init__(self) -> None:
        self.closed = False
        self.is_open = False
        """Whether the peer has shown its certificate, if it needs one, and has greeted."""
        self.is_waiting = False
        """Whether frames wait until the peer can take more."""
        self.held = False
        """Whether nothing is received until `resume`."""
        self.identity: Identity | None = None
        """Identity in the peer's certificate, also of a refused peer; None without TLS."""
        self.peer = "local"
        """The address of a tcp peer, as host:port."""
        self.heard_s = 0.0
        """Time, in seconds, of the last bytes that were not one whole message; the owner notes those."""
        self.trouble = ""
        """Reason why the last try to dial has failed, and what the user can do; empty if none has."""
        self.finds_no_peer = False
        """Whether no process that this one could talk to has listened at the address, at any try."""

    @property
    def is_local(self) -> bool:
        """Whether the peer is a process on this machine, of this user or of root."""
        return False

    @property
    def waiting_bytes(self) -> int:
        """The bytes of frames that wait, because the peer reads more slowly than this process sends."""
        return 0

    @property
    def unanswered_s(self) -> float:
        """Return the seconds for which the peer's machine has acknowledged nothing, though it was asked to.

        0 while the machine answers, whatever the peer's process does.
        """
        return 0.0

    def send(self, frame: bytes) -> bool:
        """Send now, or in order as soon as the peer can take it; False if it has to wait."""
        raise NotImplementedError

    def receive(self) -> bool:
        """Receive all that has come; True if there may be more."""
        return False

    def hold(self) -> None:
        """Receive nothing until `resume`; the sender has to wait when the buffers are full."""
        raise NotImplementedError

    def resume(self) -> None:
        """Receive again after `hold`."""
        raise NotImplementedError

    def withdraw(self) -> list[bytes]:
        """Close a connection that is not open yet, and return its unsent frames; else do nothing."""
        raise NotImplementedError

    def close(self, linger_s: float = 0.0) -> None:
        """Close; blocks up to `linger_s` to send the frames that wait."""
        raise NotImplementedError


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

    def take(self, act: Callable[[], object]) -> None:
        """Do something that may bring messages, and handle them now or soon."""

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
        """Return the seconds since anything came from `node`; None without a link."""

    def identity_of(self, node: str) -> Identity | None:
        """The identity of a peer with a link; None for a link without TLS, or without a link."""

    def trouble_of(self, node: str) -> str:
        """Return the obstacle to a link to `node`; empty if there is a link, or the obstacle is unknown."""

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
