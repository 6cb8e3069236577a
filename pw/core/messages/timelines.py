"""What processes record for timelines (`pw.core.recorder`), and how a client reads it."""

from __future__ import annotations

from pw.core.errors import ErrorReport
from pw.core.messages.base import (
    ClientToController,
    ClientToStore,
    ControllerToSession,
    HostToSession,
)


class ReadRecords(ClientToController, ClientToStore, frozen=True, tag=170):
    """ClientSession to ObjectStore or Controller: send what this process has recorded since the last one.

    The first one for a timeline begins the recording. It ends with `stop`, when the client is lost, or when
    no other one comes for `pw.core.timeline.READER_TIMEOUT_S`.
    """

    timeline: int
    """Number of the timeline at the client."""
    question: int
    stop: bool = False
    """True to record no more; what is left is sent in answers to further messages like this one."""


class Records(ControllerToSession, HostToSession, frozen=True, tag=171):
    """ObjectStore or Controller to ClientSession: the next records of a timeline, the oldest first."""

    timeline: int
    question: int
    now_s: float
    """Time on this process's clock, in seconds."""
    since_s: float = 0.0
    """Time at which this process began to record for this timeline, in seconds; later if that was
    interrupted."""
    first: int = 0
    """Number of records of this timeline that were sent before."""
    count: int = 0
    """Number of records in this message."""
    data: bytes = b""
    """Values of all records in one msgpack array (`pw.core.recorder.WIDTH` for each)."""
    names: tuple[tuple[int, str], ...] = ()
    """Names that the records refer to by number, without those that were sent before; blank for what is
    of other tenants."""
    dropped: int = 0
    """Number of records that found no room since the last answer."""
    left: int = 0
    """Number of records that are left to be sent."""
    refused: bool = False
    """True if the process does not know the client (yet)."""
    error: ErrorReport | None = None
    """Error that says why the client may not begin another timeline."""
