"""Of the transport: how a link begins and ends, and what local actors hear of it."""

from __future__ import annotations

from pw.core.errors import ErrorReport
from pw.core.messages.base import Base

PROTOCOL_VERSION = 3


class Hello(Base, frozen=True, tag=1):
    """Each end of a link to the other, first of all: who I am and what I speak."""

    protocol: int
    pw_version: str
    jax_version: str
    node: str
    incarnation: int
    silence_s: float = 0.0
    """After so long a silence you may take me for dead; 0: after as long as you like."""


class Refused(Base, frozen=True, tag=2):
    """One end of a link to the other instead of a hello: why we cannot talk (an error's kind and words)."""

    error: ErrorReport


class Heartbeat(Base, frozen=True, tag=3):
    """Each end of an idle link to the other: I am alive."""


class Goodbye(Base, frozen=True, tag=4):
    """One end of a link to the other: I leave on purpose, do not wait for me."""


class PeerLost(Base, frozen=True, tag=5):
    """The transport to every local actor: nothing more will come from `node` in this incarnation."""

    node: str
    reason: str

    @property
    def may_return(self) -> bool:
        """Whether it is the process that has ended, and not the machine that is cut off or hangs."""
        return self.reason in ("closed", "connection lost", "replaced by a newer incarnation")

    @property
    def words(self) -> str:
        """The reason, as errors give it to users."""
        return in_words(self.reason)


def in_words(reason: str) -> str:
    """Why a link was lost, as errors say it to users; logs have the reason itself."""
    if reason.startswith("silent for "):
        return f"it has given no sign of life {reason.removeprefix('silent ')}"
    if reason.startswith("frames lost"):
        return "messages were lost on the way"
    return _WORDS.get(reason, reason)


_WORDS = {
    "closed": "it has ended",
    "connection lost": "its process has ended, or the network has failed",
    "replaced by a newer incarnation": "its process was started again",
    "connected anew": "the connection had to be made again",
}


class PeerRefused(Base, frozen=True, tag=6):
    """The transport to every local actor: `node` does not want to talk to us, or we not to it."""

    node: str
    error: ErrorReport
