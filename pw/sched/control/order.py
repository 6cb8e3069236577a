"""The order of a client's messages: what a message has to wait for, and with it all that come later.

While a program is being compiled, its runs wait, so that a compile error poisons a run on all its
hosts alike, and no delete overtakes a run. All messages wait while something of the client is
rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable

from pw.core.messages import Checkpoint, Delete, Run, SaveArrays
from pw.sched.control.checkpoints.copying import Checkpoints
from pw.sched.control.checkpoints.saves import Saves
from pw.sched.control.clients import Client, Ordered

CHECKPOINTS_AT_ONCE = 2
"""Checkpoints of a client under way, of each kind: each has a copy of its arrays in host memory."""


class Order:
    """Knows what messages wait for; see the module."""

    def __init__(self, checkpoints: Checkpoints, saves: Saves) -> None:
        self._checkpoints = checkpoints
        self._saves = saves

    def obstacle(self, client: Client, message: Ordered) -> str:
        """Return what a message waits for, in words; empty if it does not have to wait."""
        if client.recovering:
            return "the recovery of what was lost with a host"
        if isinstance(message, Run):
            program = client.programs.get(message.program)
            if program is not None and program.installing:
                islands = ", ".join(sorted(program.installing))
                return f"the compilation of {program.body.name!r} on {islands}"
        elif isinstance(message, (Checkpoint, SaveArrays)):
            arrays = map(client.arrays.get, message.arrays)
            if any(array is not None and array.awaited for array in arrays):
                return "the uploads of what it checkpoints"
            to_disk = isinstance(message, SaveArrays)
            under_way = (self._saves if to_disk else self._checkpoints).count(client)
            if under_way >= CHECKPOINTS_AT_ONCE:
                doing = "written to disk" if to_disk else "copied"
                return f"{under_way} checkpoints that are still being {doing}"
            if isinstance(message, SaveArrays) and self._saves.commits_at(message.path):
                return f"an earlier checkpoint to be put in its place at {message.path}"
        return ""


def waiting_runs(client: Client, wanted: Callable[[Run], bool]) -> list[Run]:
    """Return the runs in a client's backlog that are `wanted`."""
    return [message for message in client.backlog if isinstance(message, Run) and wanted(message)]


def withdraw(client: Client, run: Run) -> None:
    """Take a run out of a client's backlog. In its place, the arrays that it was to take are deleted."""
    place = client.backlog.index(run)
    if given := client.donated_to(run):
        client.backlog[place] = Delete(given)  # in its turn: an earlier run may have to make them
    else:
        del client.backlog[place]
