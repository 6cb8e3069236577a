"""`SessionThread`: what a runtime needs of the thread in which its session lives."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from pw.core.messages import SliceBound


class SessionThread(Protocol):
    """The background thread in which a session's actors live."""

    address: str | None
    endpoint: str | None
    """The controller's address for other processes; None if they cannot reach it."""
    certificate: str
    """The tenant and the name in this process's certificate; empty without one."""
    has_frames: bool
    """Messages leave this process, so their size is limited."""

    @property
    def dashboard(self) -> str:
        """The link of the page that shows the cluster; empty if this session has not started one."""

    def post(self, note: object) -> None:
        """Deliver a note to the session; from any thread."""

    def put(self, note: object) -> None:
        """Keep a note for the session until a thread goes on with it; from any thread."""

    def go(self) -> None:
        """Have the session handle what was put; from any thread."""

    def hurry(self) -> None:
        """Handle what was posted at once; on the session's own thread."""

    def drive(self, future: Future[Any]) -> None:
        """Do the session's work in this thread while it waits for a future, if that is quicker."""

    def wait_for_hosts(self) -> None:
        """Wait for the hosts that were started with the session. Raises ConnectionFailed."""

    def bound(self, slice: int) -> SliceBound | None:
        """Return how a slice is bound, or was last; None if it was given back."""

    def trouble(self) -> str:
        """What is in the way of a link to the controller; empty if that is not known."""

    def counters(self) -> dict[str, int]:
        """Return this process's counters."""

    def close(self) -> None:
        """Say goodbye, end the thread, and release all that was started for it."""
