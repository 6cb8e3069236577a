"""A runtime's side of what its supervisor keeps for the next one.

What is to be kept is written to an anonymous file on a thread of its own, so that the event loop goes on, and
counts as kept when the supervisor says that it has taken the file. Until then the next file waits: a
supervisor that is slow or stopped has at most one before it, and holds up nothing but the answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from pw.cli import handover
from pw.cli.supervision import Parcel, SupervisorLink
from pw.core.errors import CheckpointFailed, ErrorReport
from pw.devices.host.replica_memory import Replica
from pw.transport.log import log

Kept = Callable[[ErrorReport | None], None]


class Keeper:
    """Gives the supervisor what is to outlive this process (see `pw.devices.host.membership.HostProcess`).

    All methods belong to the loop's thread.

    Args:
        name: of the host.
        loop: the event loop.
        supervisor: the link to the supervisor.
        ended: called when the supervisor has ended.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        supervisor: SupervisorLink,
        ended: Callable[[], None],
    ) -> None:
        self._name = name
        self._loop = loop
        self._supervisor = supervisor
        self._ended = ended
        self._kept: Kept | None = None
        """To be called when what is being kept has been taken."""
        self._left = False
        loop.add_reader(supervisor.fileno(), self._listen)

    def keep(self, replicas: Sequence[Replica], kept: Kept) -> None:
        """Keep these in place of what was kept before; not to be called again before `kept` is."""
        assert self._kept is None
        self._kept = kept

        def work() -> None:
            packed: Parcel | OSError
            try:
                packed = handover.pack(replicas)
            except OSError as error:
                packed = error
            try:
                self._loop.call_soon_threadsafe(self._send, packed)
            except RuntimeError:  # the loop is closed
                return

        threading.Thread(target=work, name="pw-keep", daemon=True).start()

    def hand_over(self, replicas: Iterable[Replica]) -> None:
        """Keep these, taken one by one, in place of what was kept before; the end of this process follows.

        What has been sent is taken even when this process has ended.
        """
        self._left = True
        begun_s = time.monotonic()
        parcel = None
        try:
            parcel = handover.pack_what_fits(replicas, self._supervisor.beat)
            self._supervisor.hand_over(parcel)
        except OSError as error:
            log("error", "nothing is handed over", self._name, "", {"reason": error})
            return
        finally:
            if parcel is not None:
                parcel.close()
        took_s = round(time.monotonic() - begun_s, 3)
        fields = {"bytes": parcel.index_offset, "took_s": took_s}
        log("debug", "handed over", self._name, "", fields)

    def _send(self, packed: Parcel | OSError) -> None:
        if isinstance(packed, OSError):
            self._end(packed)
            return
        try:
            if not self._left:
                self._supervisor.hand_over(packed)
        except OSError as error:
            self._end(error)
        finally:
            packed.close()

    def _listen(self) -> None:
        """The supervisor has taken something, or has ended."""
        for _ in range(self._supervisor.taken()):
            if not self._left:
                self._end(None)
        if self._supervisor.ended:
            self._loop.remove_reader(self._supervisor.fileno())
            self._ended()

    def _end(self, error: OSError | None) -> None:
        kept, self._kept = self._kept, None
        report = None
        if error is not None:
            words = f"host {self._name} has no room for copies that survive a crash of it: {error}"
            report = ErrorReport.of(CheckpointFailed(words), self._name)
        if kept is not None:
            kept(report)
