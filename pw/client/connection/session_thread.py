"""`SessionThread`: what a runtime needs of the thread in which its session lives."""

from __future__ import annotations

from typing import Any, Protocol

from pw.client.connection.waiting import Waiting
from pw.client.session.leases import Leases
from pw.client.session.thread_messages import Await, Get, Put
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
        """Deliver a note to the session; from any thread with the session's lock."""

    def call(
        self,
        run: int,
        program: int,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
        wanted: Await | Get | None,
    ) -> None:
        """Have a program run, and ask for a result if one is `wanted`; from any thread with the lock."""

    def put(self, note: Put) -> None:
        """Upload a value; from any thread with the session's lock."""

    @property
    def leases(self) -> Leases:
        """What this client may launch itself."""

    def ask(self, note: Await | Get) -> None:
        """Ask hosts for what an array is, or whether it is ready; from any thread with the lock."""

    def is_here(self) -> bool:
        """Whether the caller is the thread of the session, which must not wait for it."""

    def hurry(self) -> None:
        """Handle what was posted at once; on the session's own thread."""

    def drive(self, future: Waiting[Any], timeout_s: float) -> None:
        """Handle the answers of hosts in this thread while it waits for a future, if it can."""

    def wake(self) -> None:
        """A future was settled, for which a thread may wait in `drive`."""

    def look(self) -> None:
        """Handle the answers of hosts that have come, if this thread can."""

    def watch(self) -> None:
        """Have the session handle the answers of hosts."""

    def wait_for_hosts(self) -> None:
        """Wait for the hosts that were started with the session. Raises ConnectionFailed."""

    def bound(self, slice: int) -> SliceBound | None:
        """Return how a slice is bound, or was last; None if it was given back."""

    def is_lost(self, slice: int) -> bool:
        """Whether a slice has no devices now: its island was lost, or it was given back."""

    def trouble(self) -> str:
        """What is in the way of a link to the controller; empty if that is not known."""

    def forked(self) -> None:
        """This is the copy in a forked process: nothing comes here."""

    def counters(self) -> dict[str, int]:
        """Return this process's counters."""

    def close(self) -> None:
        """Say goodbye, end the thread, and release all that was started for it."""
