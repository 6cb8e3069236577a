"""Gives the supervisor the replicas that are to outlive the runtime.

A thread of its own writes them to an anonymous file, so that the event loop goes on. They are safe
when the supervisor says that it has taken the file; the next file waits until then. So a slow
supervisor delays only the answer to a checkpoint.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pw.cli import handover
from pw.cli.supervision import Drain, Parcel, SupervisorLink
from pw.core.errors import CheckpointFailed, ErrorReport
from pw.devices.host.replica_memory import Replica
from pw.transport.log import log

Kept = Callable[[ErrorReport | None], None]


@dataclass(eq=False)
class Keeper:
    """Keeps replicas through the supervisor (see `pw.devices.host.membership.HostProcess`).

    All methods are called on the loop thread.

    Args:
        name: of the host.
        loop: the event loop.
        supervisor: the link to the supervisor.
        ended: called when the supervisor has ended.
    """

    _name: str
    _loop: asyncio.AbstractEventLoop
    _supervisor: SupervisorLink
    _ended: Callable[[], None]
    leave: Callable[[], None] = lambda: None
    """Function to call when the host is to leave the cluster once it is empty."""
    folder: str = ""
    """Folder of this process for replicas in files; empty if there is none."""
    _kept: Kept | None = None
    """Function to call when the supervisor has taken the parcel that is under way."""
    _left: bool = False

    def __post_init__(self) -> None:
        self._loop.add_reader(self._supervisor.channel.fileno(), self._listen)

    def keep(self, replicas: Sequence[Replica], kept: Kept) -> None:
        """Keep these in place of earlier ones; not called again before `kept`."""
        assert self._kept is None
        self._kept = kept

        def work() -> None:
            packed: Parcel | OSError
            try:
                packed = handover.pack(replicas, self.folder)
            except OSError as error:
                packed = error
            try:
                self._loop.call_soon_threadsafe(self._send, packed)
            except RuntimeError:  # the loop is closed
                return

        threading.Thread(target=work, name="pw-keep", daemon=True).start()

    def hand_over(self, replicas: Iterable[Replica]) -> None:
        """Leave these to the next incarnation, in place of earlier ones; this process ends then.

        The supervisor takes the parcel even when this process has ended.
        """
        self._left = True
        begun_s = time.monotonic()
        parcel = None
        try:
            parcel = handover.pack_what_fits(replicas, self._supervisor.beat, self.folder)
            self._supervisor.hand_over(parcel)
        except ConnectionError:
            # The supervisor has ended first: no incarnation comes after this one.
            log("debug", "no supervisor takes replicas", self._name)
            return
        except OSError as error:
            log("error", "no replicas are handed over", self._name, reason=error)
            return
        finally:
            if parcel is not None:
                parcel.close()
        took_s = round(time.monotonic() - begun_s, 3)
        log("debug", "handed over", self._name, bytes=parcel.index_offset, took_s=took_s)

    def _send(self, packed: Parcel | OSError) -> None:
        if isinstance(packed, OSError):
            self._end(packed)
            return
        try:
            if not self._left:
                self._supervisor.hand_over(packed)
        except ConnectionError:
            # The supervisor has ended, and so will this process.
            log("debug", "no supervisor keeps replicas", self._name)
        except OSError as error:
            self._end(error)
        finally:
            packed.close()

    def _listen(self) -> None:
        """The supervisor has taken a parcel, tells the host to leave, or has ended."""
        for message in self._supervisor.arrived():
            if isinstance(message, Drain):
                self.leave()
            elif not self._left:
                self._end(None)
        if self._supervisor.channel.ended:
            self._loop.remove_reader(self._supervisor.channel.fileno())
            self._ended()

    def _end(self, error: OSError | None) -> None:
        kept, self._kept = self._kept, None
        report = None
        if error is not None:
            words = (
                f"host {self._name} has no room for replicas that survive a crash of it: {error}"
            )
            report = ErrorReport.of(CheckpointFailed(words), self._name)
        if kept is not None:
            kept(report)
