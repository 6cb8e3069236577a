"""Of the transport: the begin and the end of a link, and the news of it for local actors."""

from __future__ import annotations

from pw.core.errors import ErrorReport
from pw.core.messages.base import Local, OnLink
from pw.core.messages.bounds import Name

PROTOCOL_VERSION = 11


class Hello(OnLink, frozen=True, tag=1):
    """Each end of a link to the other, before all else: its name, its incarnation and its versions."""

    protocol: int
    pw_version: Name
    jax_version: Name
    node: Name
    incarnation: int
    silence_s: float = 0.0
    """Seconds of silence after which this end counts as lost though its machine answers; 0: the other end
    decides."""


class Refused(OnLink, frozen=True, tag=2):
    """One end of a link to the other instead of a hello: it refuses the link."""

    error: ErrorReport


class Heartbeat(OnLink, frozen=True, tag=3):
    """Each end of an idle link to the other: this process is alive."""


class Goodbye(OnLink, frozen=True, tag=4):
    """One end of a link to the other: this process leaves on purpose."""


class PeerLost(Local, frozen=True, tag=5):
    """Transport to every local actor: nothing more will come from this incarnation of `node`."""

    node: str
    reason: str

    @property
    def may_return(self) -> bool:
        """Whether the process has ended, not only its machine been cut off or hung."""
        return self.reason in ("closed", "connection lost", "replaced by a newer incarnation")

    @property
    def words(self) -> str:
        """The reason in the words of errors."""
        return in_words(self.reason)


def in_words(reason: str) -> str:
    """Return why a link was lost in the words of errors; logs have the reason itself."""
    if reason.startswith("silent for "):
        return f"it has sent no heartbeat {reason.removeprefix('silent ')}"
    if reason.startswith("unanswered for "):
        return f"its machine has not answered {reason.removeprefix('unanswered ')}"
    if reason.startswith("frames lost"):
        return "messages were lost on the way"
    return _WORDS.get(reason, reason)


_WORDS = {
    "closed": "it has ended",
    "connection lost": "its process has ended, or the network has failed",
    "replaced by a newer incarnation": "its process was started again",
    "connected anew": "the connection had to be made again",
}


class PeerSilent(Local, frozen=True, tag=7):
    """Transport to every local actor: nothing has come from `node` for some heartbeats, but its link stands."""

    node: str


class PeerRefused(Local, frozen=True, tag=6):
    """Transport to every local actor: `node` refuses the link, or this process does."""

    node: str
    error: ErrorReport
