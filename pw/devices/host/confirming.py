"""Tells the controller when arrays have their values, or that they have none.

The controller knows of a run when it has ended on its hosts, not whether the program has raised. It asks before
it gives arrays a name (`pw.sched.control.confirmations`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ErrorReport, HostLost
from pw.core.ids import CONTROL, Address
from pw.devices.host.arrays import Arrays
from pw.devices.host.backend import Backend, Watch


@dataclass(eq=False, repr=False)
class Confirming(Part):
    """Answers the controller when values are there."""

    env: Env
    backend: Backend
    arrays: Arrays

    @handles(msg.ConfirmArrays)
    def _confirm(self, sender: Address, message: msg.ConfirmArrays) -> None:
        entries = {array: self.arrays.get(array) for array in message.arrays}
        values = [entry.value for entry in entries.values() if entry and entry.submitted]
        if len(values) < len(entries):
            missing = [array for array, entry in entries.items() if entry is None]
            self.env.send(CONTROL, msg.ArraysLost(tuple(missing)))
            error = HostLost("a host does not have the array")
            self._answer(message.request, ErrorReport.of(error, self.env.address.node))
            return

        def watched(error: ErrorReport | None) -> None:
            self._answer(message.request, error)

        self.backend.submit([Watch(tuple(values), watched)])

    def _answer(self, request: int, error: ErrorReport | None) -> None:
        self.env.send(CONTROL, msg.ArraysConfirmed(request, error))
