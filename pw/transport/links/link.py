"""The state of a link to one peer, and the versions that understand each other."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from pw.core.actors.mailbox import HELD_MESSAGES
from pw.core.errors import ErrorReport, ProtocolError, VersionMismatch
from pw.core.ids import Address
from pw.core.installed import DISTRIBUTION, version, with_jax
from pw.core.messages import PROTOCOL_VERSION, Hello
from pw.core.messages.roles import Role, role_of
from pw.transport.access.identity import Identity
from pw.transport.links.interface import Connection, Mailroom

LONGEST_SILENCE_S = 600.0
"""Longest silence, in seconds, that a peer may ask for in its hello."""
HELD_BYTES = 4 << 20
"""Bytes of waiting frames at which reading from a peer stops until they are handled."""
UNREAD_BYTES = 16 << 20
"""Unread bytes at which a client is held; it goes on when half of them are read."""
MOST_UNREAD_BYTES = 64 << 20
"""Unread bytes at which a silent peer is lost; this process keeps them for it."""
_SENDERS_REMEMBERED = 1024


def incarnation() -> int:
    """Return a number that grows with every start on this machine."""
    return time.time_ns()


class Versions(NamedTuple):
    """The versions of a process; two processes talk only if theirs fit each other."""

    protocol: int
    pw: str
    jax: str

    @classmethod
    def installed(cls) -> Versions:
        """The versions of this process, without importing jax."""
        return cls(PROTOCOL_VERSION, version(DISTRIBUTION), version("jax"))

    @classmethod
    def of(cls, hello: Hello) -> Versions:
        """The versions of the sender of a hello."""
        return cls(hello.protocol, hello.pw_version, hello.jax_version)

    def fits(self, other: Versions) -> bool:
        """Whether two processes understand each other: those of releases with equal first two numbers do.

        So the daemons of a cluster can be upgraded one after the other.
        """
        series = [one.pw.split(".")[:2] for one in (self, other)]
        return (self.protocol, self.jax, series[0]) == (other.protocol, other.jax, series[1])

    def __str__(self) -> str:
        return f"pw {self.pw} with jax {self.jax} (protocol {self.protocol})"


def version_mismatch(here: str, ours: Versions, there: str, theirs: Versions) -> ErrorReport:
    """The refusal of a peer with other versions."""
    advice = "install the same versions of pw and jax in both places"
    if theirs.fits(ours._replace(jax=theirs.jax)):
        advice = (
            "all processes of a cluster have the same jax: run pip install "
            f"{with_jax(ours.jax)} for {there}, or pip install {with_jax(theirs.jax)} for {here}"
        )
    words = f"{here} runs {ours}, but {there} runs {theirs}; {advice}"
    return ErrorReport.of(VersionMismatch(words), where=here)


def objection(here: str, ours: Versions, hello: Hello) -> ErrorReport | None:
    """Return the reason why a node refuses a hello; None if it does not."""
    theirs = Versions.of(hello)
    if not theirs.fits(ours):
        return version_mismatch(here, ours, hello.node, theirs)
    if hello.node == here:
        words = f"two processes are called {here}; give each its own name"
        return ErrorReport.of(ProtocolError(words), where=here)
    return None


@dataclass(eq=False)
class Link:
    """The link to one peer.

    Frames to the peer leave on `out`; frames from it are accepted from `source` only. Both are
    fixed when first used, so each direction is FIFO. The two differ if both ends have dialled.
    """

    node: str
    out: Connection
    endpoint: str
    """The endpoint that we dialled; empty if the peer dialled us."""
    began_s: float
    """Time of the link's begin, in seconds of this process's clock."""
    source: Connection | None = None
    """Connection on which the peer's frames come; None before its hello."""
    incarnation: int | None = None
    """Number of the peer's incarnation; None until its hello has come."""
    identity: Identity | None = None
    """Identity in the peer's certificate; None on links without TLS."""
    shown_serial: str = ""
    """Serial number of the certificate that this process has shown to the peer; empty before the hello."""
    silence_s: float = 0.0
    """Seconds that the peer may be silent, from its hello; 0 for as long as its machine answers."""
    is_silent: bool = False
    """Whether nothing had come from the peer for some heartbeats at the last look."""
    sent: int = 0
    received: int = 0
    pieces: list[bytes] = field(default_factory=list)
    pieces_bytes: int = 0
    unhandled_bytes: int = 0
    """Bytes of frames from the peer since the last moment at which none of its messages waited."""
    unread_bytes: int = 0
    """Bytes that waited for the peer to read at the last look; 0 unless the peer is held for that."""
    addresses: dict[str, Address] = field(default_factory=dict)
    """Addresses of the actors of the peer that have sent something of late."""
    is_clients: bool = field(init=False)
    """Whether the peer is a client."""

    def __post_init__(self) -> None:
        self.heard_s = self.spoke_s = self.began_s
        self.is_clients = role_of(self.node) is Role.CLIENT

    def open(self, source: Connection, hello: Hello, now_s: float) -> None:
        """Begin to receive from the peer, whose hello has come; it may name a silence of its own."""
        named = 0.0 < hello.silence_s <= LONGEST_SILENCE_S
        self.source, self.incarnation = source, hello.incarnation
        self.silence_s = hello.silence_s if named else 0.0
        self.received, self.heard_s = 1, now_s

    def took(self, frame_bytes: int, node: Mailroom) -> None:
        """A frame of the peer is with the node; read no more from the peer if much of it waits there."""
        self.unhandled_bytes += frame_bytes
        if self.is_clients and self.out.waiting_bytes > UNREAD_BYTES:
            assert self.source is not None
            self.unread_bytes = self.out.waiting_bytes
            self.source.hold()
        if node.backlog <= HELD_MESSAGES and self.unhandled_bytes <= HELD_BYTES:
            return
        is_large = self.unhandled_bytes > HELD_BYTES
        if node.holds(self.node, 0 if is_large else HELD_MESSAGES):
            assert self.source is not None
            self.source.hold()
        if is_large:
            self.unhandled_bytes = 0

    @property
    def is_held(self) -> bool:
        """Whether nothing is read from the peer now."""
        return self.source is not None and self.source.held

    def may_be_silent(self) -> bool:
        """Whether the peer's silence since the last look means nothing, because it was not read.

        A client that is held for what it has not read must go on reading; it is read again in time.
        """
        if not self.is_held or not self.unread_bytes:
            return self.is_held
        before, self.unread_bytes = self.unread_bytes, self.out.waiting_bytes
        if self.unread_bytes <= UNREAD_BYTES // 2:
            self.unread_bytes = 0
            assert self.source is not None
            self.source.resume()
            return True
        return self.unread_bytes < before

    @property
    def last_heard_s(self) -> float:
        """Return the time of the last frame or part of one: a large frame may take longer than any silence."""
        return self.heard_s if self.source is None else max(self.heard_s, self.source.heard_s)

    def unreached(self, now_s: float, connect_s: float, absent_s: float = math.inf) -> str:
        """Return the reason why a peer without a hello is lost: it was not reached in time; else empty.

        The time is `connect_s`, and `absent_s` where no peer has ever listened.
        """
        patience_s = min(connect_s, absent_s) if self.out.finds_no_peer else connect_s
        if now_s - self.began_s <= patience_s:
            return ""
        trouble = f": {self.out.trouble}" if self.out.trouble else ""
        return f"could not be reached at {self.endpoint}{trouble}"

    def complaint(self, now_s: float, lease_s: float, patience_s: float) -> str:
        """Return the reason why an open link is lost: silence for too long, also after a read; else empty.

        A peer has `patience_s`, or the silence that it has named, while its machine answers, else `lease_s`.
        """
        patience_s = self.silence_s or patience_s
        bound_s = min(lease_s, patience_s)
        if now_s - self.last_heard_s <= bound_s:
            return ""
        unread = self.source is not None and self.source.receive()
        silent_s = now_s - self.last_heard_s
        if unread or silent_s <= bound_s:
            return ""
        if self.out.unanswered_s > lease_s:
            return f"unanswered for {lease_s:g} s"
        if silent_s > patience_s:
            return f"silent for {patience_s:g} s"
        if self.out.waiting_bytes > MOST_UNREAD_BYTES:
            return f"silent for {silent_s:.0f} s, with {MOST_UNREAD_BYTES >> 20} MiB to read"
        return ""

    def falls_silent(self, now_s: float, quiet_s: float) -> bool:
        """Whether the peer has become silent since the last look: nothing has come from it for `quiet_s`."""
        before, self.is_silent = self.is_silent, now_s - self.last_heard_s > quiet_s
        return self.is_silent and not before and self.incarnation is not None

    def is_idle(self, now_s: float, heartbeat_s: float) -> bool:
        """Whether the peer is owed a heartbeat."""
        idle = self.incarnation is not None and now_s - self.spoke_s >= 0.9 * heartbeat_s
        return idle and not self.out.is_waiting

    def excuse(self, away_s: float) -> None:
        """Do not count a time in which this process did not read."""
        self.heard_s += away_s
        self.began_s += away_s
        if self.source is not None:
            self.source.heard_s += away_s

    def address(self, actor: str) -> Address:
        """The address of an actor of the peer."""
        address = self.addresses.get(actor)
        if address is None:
            if len(self.addresses) >= _SENDERS_REMEMBERED:
                self.addresses.clear()
            address = self.addresses[actor] = Address(self.node, actor)
        return address
