"""The stream of each client: its messages are handled in the order in which the client sent them.

A message that has to wait (`order`) goes to the client's backlog, with all that come after it. The
stream goes on at the end of each turn of the controller, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec

from pw.core.errors import ArrayDeleted, ErrorReport
from pw.core.messages import (
    Answered,
    Checkpoint,
    CreateArray,
    Delete,
    Inquire,
    LinkLost,
    ReleaseProgram,
    ReleaseSlice,
    Run,
    SaveArrays,
)
from pw.sched.control.checkpoints.copying import Checkpoints
from pw.sched.control.checkpoints.saves import Saves
from pw.sched.control.clients import Client, Ordered
from pw.sched.control.order import Order
from pw.sched.control.recovery.resume import Resumptions
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.runs import Runs
from pw.sched.control.sessions import ControlPart, Sessions, handles_client
from pw.sched.control.slices import Slices
from pw.sched.control.uploads import Uploads


class Stream(ControlPart):
    """Handles the messages of clients in their order; see the module."""

    def __init__(
        self,
        sessions: Sessions,
        order: Order,
        resumptions: Resumptions,
        slices: Slices,
        registry: ProgramRegistry,
        runs: Runs,
        uploads: Uploads,
        checkpoints: Checkpoints,
        saves: Saves,
    ) -> None:
        super().__init__(sessions)
        self._order = order
        self._resumptions = resumptions
        self._handlers: dict[type, Callable[[Client, Any], None]] = {
            Run: runs.start,
            Delete: self._delete,
            CreateArray: uploads.create,
            Checkpoint: checkpoints.begin,
            SaveArrays: saves.begin,
            Inquire: self._inquire,
            ReleaseProgram: registry.release,
            ReleaseSlice: slices.release,
        }

    @handles_client(*get_args(Ordered))
    def _received(self, client: Client, message: Ordered) -> None:
        if client.resuming is not None and isinstance(message, Run):
            self._resumptions.ran(client, message)
        elif client.resuming is not None and isinstance(message, CreateArray):
            self._resumptions.announced(client, message)
        elif client.backlog or self._order.obstacle(client, message):
            client.backlog.append(message)
        else:
            self._handlers[type(message)](client, message)

    def go_on(self, client: Client) -> None:
        """Handle what does not have to wait any more."""
        backlog = client.backlog
        while backlog and not self._order.obstacle(client, backlog[0]):
            message = backlog.popleft()
            self._handlers[type(message)](client, message)

    def _delete(self, client: Client, message: Delete) -> None:
        self._islands.release(client.number, client.delete(message.arrays))

    def _inquire(self, client: Client, message: Inquire) -> None:
        """Nothing is lost any more, so each array that the client holds is where it should be."""
        error = None
        if any(number not in client.arrays for number in message.arrays):
            error = ErrorReport.of(
                ArrayDeleted(
                    "the array was deleted, or donated to a computation, before its value was asked "
                    "for; keep a copy, copy.copy(x), or do not donate it"
                )
            )
        self._env.send(client.address, Answered(message.request, error))

    @handles_client(LinkLost)
    def _link_lost(self, client: Client, message: LinkLost) -> None:
        """Mark the uploads in the backlog as sent to no hosts, so that they are asked for again."""
        for place, waiting in enumerate(client.backlog):
            if isinstance(waiting, CreateArray):
                client.backlog[place] = msgspec.structs.replace(waiting, bound=0)
