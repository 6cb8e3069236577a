"""The state of a link to one peer, and the versions that understand each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from pw.core.errors import ErrorReport, ProtocolError, VersionMismatch
from pw.core.ids import Address
from pw.core.installed import DISTRIBUTION, version
from pw.core.messages import PROTOCOL_VERSION, Hello
from pw.transport.connection import Connection

_SENDERS_REMEMBERED = 1024


def incarnation() -> int:
    """Return a number that grows with every start on this machine."""
    return time.time_ns()


class Versions(NamedTuple):
    """The versions of a process; two processes talk only if all three are equal."""

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

    def __str__(self) -> str:
        return f"pw {self.pw} with jax {self.jax} (protocol {self.protocol})"


def version_mismatch(here: str, ours: Versions, there: str, theirs: Versions) -> ErrorReport:
    """The refusal of a peer with other versions."""
    words = (
        f"{here} runs {ours}, but {there} runs {theirs}; "
        "install the same versions of pw and jax in both places"
    )
    return ErrorReport.of(VersionMismatch(words), where=here)


def objection(here: str, ours: Versions, hello: Hello) -> ErrorReport | None:
    """Why a node refuses a hello; None if it does not."""
    theirs = Versions.of(hello)
    if theirs != ours:
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
    made_s: float
    source: Connection | None = None
    """None before the hello."""
    incarnation: int | None = None
    """None until the peer's hello has come."""
    silence_s: float = 0.0
    """How long the peer may be silent; known once its hello has come."""
    sent: int = 0
    received: int = 0
    pieces: list[bytes] = field(default_factory=list)
    pieces_bytes: int = 0
    _addresses: dict[str, Address] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.heard_s = self.spoke_s = self.made_s

    def open(self, source: Connection, incarnation: int, silence_s: float, now_s: float) -> None:
        """Begin to receive from the peer, whose hello has come."""
        self.source, self.incarnation, self.silence_s = source, incarnation, silence_s
        self.received, self.heard_s = 1, now_s

    @property
    def last_heard_s(self) -> float:
        """When a frame came last, or a part of one: a large frame may take longer than any silence."""
        return self.heard_s if self.source is None else max(self.heard_s, self.source.heard_s)

    def is_silent(self, now_s: float) -> bool:
        """Whether the peer has been silent for too long, also after reading what has come."""
        if now_s - self.last_heard_s <= self.silence_s:
            return False
        unread = self.source is not None and self.source.receive()
        return not unread and now_s - self.last_heard_s > self.silence_s

    def excuse(self, away_s: float) -> None:
        """Do not count a time in which this process did not read."""
        self.heard_s += away_s
        self.made_s += away_s
        if self.source is not None:
            self.source.heard_s += away_s

    def address(self, actor: str) -> Address:
        """The address of an actor of the peer."""
        address = self._addresses.get(actor)
        if address is None:
            if len(self._addresses) >= _SENDERS_REMEMBERED:
                self._addresses.clear()
            address = self._addresses[actor] = Address(self.node, actor)
        return address
