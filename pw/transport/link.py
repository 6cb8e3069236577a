"""Who speaks on a link, and which versions understand each other."""

from __future__ import annotations

from typing import NamedTuple

from pw.core.errors import ErrorReport, VersionMismatch
from pw.core.ids import Address
from pw.core.installed import DISTRIBUTION, version
from pw.core.messages import PROTOCOL_VERSION, Hello
from pw.transport.connection import Connection

_SENDERS_REMEMBERED = 1024


class Versions(NamedTuple):
    """What a process runs; two of them talk only if all three are equal."""

    protocol: int
    pw: str
    jax: str

    @classmethod
    def installed(cls) -> Versions:
        """What this process runs, without importing any of it."""
        return cls(PROTOCOL_VERSION, version(DISTRIBUTION), version("jax"))

    @classmethod
    def of(cls, hello: Hello) -> Versions:
        """What the sender of a hello runs."""
        return cls(hello.protocol, hello.pw_version, hello.jax_version)

    def __str__(self) -> str:
        return f"pw {self.pw} with jax {self.jax} (protocol {self.protocol})"


def version_mismatch(here: str, ours: Versions, there: str, theirs: Versions) -> ErrorReport:
    """The refusal of a peer that runs something else."""
    words = (
        f"{here} runs {ours}, but {there} runs {theirs}; "
        "install the same versions of pw and jax in both places"
    )
    return ErrorReport.of(VersionMismatch(words), where=here)


class Link:
    """What is known of the link to one peer.

    Frames to the peer always leave on `out`; frames from it are accepted from `source` only. Both
    are fixed when first used, which makes each direction FIFO whatever connections exist besides.
    The two may differ: when both ends have dialled, each speaks on the connection it has made.
    """

    def __init__(self, node: str, out: Connection, endpoint: str, now_s: float) -> None:
        self.node = node
        self.out = out
        self.endpoint = endpoint
        """Where we dialled; empty if the peer did."""
        self.source: Connection | None = None
        """None before the hello."""
        self.incarnation: int | None = None
        """None until the peer's hello has come."""
        self.silence_s = 0.0
        """How long the peer may be silent; known once its hello has come."""
        self.sent = 0
        self.received = 0
        self.pieces: list[bytes] = []
        self.pieces_bytes = 0
        self.made_s = now_s
        self.heard_s = now_s
        self.spoke_s = now_s
        self._addresses: dict[str, Address] = {}

    def address(self, actor: str) -> Address:
        """The address of an actor of the peer."""
        address = self._addresses.get(actor)
        if address is None:
            if len(self._addresses) >= _SENDERS_REMEMBERED:
                self._addresses.clear()
            address = self._addresses[actor] = Address(self.node, actor)
        return address
