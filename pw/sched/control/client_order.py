"""The stream of each client: its messages are handled in the order in which the client sent them.

A message that must wait goes to the client's backlog, and all later ones with it. A run waits until
its program is compiled: then a compile error fails it on all hosts alike. While islands are away, what
needs them is set aside and the rest goes on (`set_aside`); when they are back, every message waits until
what was lost is brought back. At the end of each turn of the controller, and nowhere else, the backlog
goes on by at most `AT_ONCE`. `Run` and `CreateArray` of a client that tells what an earlier controller
knew do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from pw.core import messages as msg
from pw.core.errors import ArrayDeleted, ErrorReport
from pw.core.ids import arrays_in
from pw.sched.control.checkpoints.in_memory import Checkpoints
from pw.sched.control.checkpoints.on_disk import Saves
from pw.sched.control.clients import Client
from pw.sched.control.handovers import HandoverTable
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.set_aside import Ordered

CHECKPOINTS_AT_ONCE = 2
"""Number of a client's checkpoints under way, of each kind: each has a copy of its arrays in host memory."""

AT_ONCE = 64
"""Number of messages of a backlog that are handled in one turn: the messages of other clients wait
meanwhile."""

Handlers = Mapping[type, Callable[[Client, Any], None]]


@dataclass(eq=False)
class ClientOrder(ControlPart):
    """Handles the messages of each client in their order."""

    checkpoints: Checkpoints
    saves: Saves
    handovers: HandoverTable
    _handlers: Handlers = field(init=False)
    _resuming: Handlers = field(init=False)
    _later: set[int] = field(default_factory=set)
    """Numbers of clients whose backlogs go on in the next turn."""
    _inquiries: list[tuple[Client, msg.Inquire, int]] = field(default_factory=list)
    """Questions about arrays that other sessions still have to make, with the first of these; they hold up
    nothing."""

    def set_handlers(self, handlers: Handlers, resuming: Handlers) -> None:
        """Set the handlers, and those for clients that tell what an earlier controller knew."""
        self._handlers, self._resuming = handlers, resuming

    @handles_client(*get_args(Ordered))
    def _received(self, client: Client, message: Ordered) -> None:
        if client.resuming is not None and type(message) in self._resuming:
            self._resuming[type(message)](client, message)
        elif self._is_held(client) or not self.proceed(client, message):
            client.stream.backlog.append(message)

    def _is_held(self, client: Client) -> bool:
        """Whether earlier messages come first."""
        stream = client.stream
        return bool(stream.backlog) or (
            bool(stream.aside.messages) and stream.aside.may_go_on(client.away)
        )

    def go_on(self, client: Client) -> None:
        """Handle messages that do not have to wait any more; if there are many, the rest in the next turns."""
        if client.number in self._later:
            return
        backlog, aside = client.stream.backlog, client.stream.aside
        if aside.messages and aside.may_go_on(client.away):
            backlog.extendleft(reversed(aside.take()))
        for _ in range(AT_ONCE):
            if not backlog:
                return
            message = backlog.popleft()
            if not self.proceed(client, message):
                backlog.appendleft(message)
                return
        if not self._later:
            self._env.call_later(0.0, self._later.clear)
        self._later.add(client.number)

    def proceed(self, client: Client, message: Ordered) -> bool:
        """Handle a message, or set it aside; return False if it waits, and all that come after it."""
        if client.is_held:
            return False
        if client.slices.unbound and (away := client.away) is not None:
            rest = client.stream.aside.sift(message, away)
            if rest is None:
                return True
            message = rest
        if self.obstacle(client, message):
            return False
        self.carry_out(client, message)
        return True

    def carry_out(self, client: Client, message: Ordered) -> None:
        """Handle a message whose turn it is."""
        if isinstance(message, msg.Delete):
            arrays = self.handovers.keep(client, message.arrays)
            self._islands.release(client.number, client.delete(arrays))
        elif isinstance(message, msg.Inquire):
            self._inquire(client, message)
        else:
            self._handlers[type(message)](client, message)

    def reason(self, client: Client, message: Ordered) -> str:
        """Return what a message waits for, in words; empty if it does not have to wait."""
        return "the client to be resumed" if client.is_held else self.obstacle(client, message)

    def obstacle(self, client: Client, message: Ordered) -> str:
        """Return the `reason` of a client that is not held."""
        if client.recovering and client.away is None:
            return "the recovery of what was lost with a host"
        if isinstance(message, msg.Run):
            program = client.programs.get(message.program)
            if program is not None and program.installing:
                islands = ", ".join(sorted(program.installing))
                return f"the compilation of {program.body.name!r} on {islands}"
            if message.lease and any(map(client.arrays.is_arriving, arrays_in(message.args))):
                return (
                    "the uploads that it reads: it was launched behind them, where they have come"
                )
            if client.asking and not client.asking.isdisjoint(message.args):
                return "another session to hand over an array that it reads"
            if client.offered and not client.offered.keys().isdisjoint(client.donated_to(message)):
                return "another session to take arrays that it donates"
        elif isinstance(message, msg.ReleaseSlice):
            if self.handovers.needs_slice(client, message.slice):
                return "another session to hand over an array that it hands on from this slice"
        elif isinstance(message, (msg.Checkpoint, msg.SaveArrays)):
            if any(map(client.arrays.is_arriving, message.arrays)):
                return "the uploads of what it checkpoints"
            to_disk = isinstance(message, msg.SaveArrays)
            under_way = (self.saves if to_disk else self.checkpoints).count(client)
            if under_way >= CHECKPOINTS_AT_ONCE:
                doing = "written to disk" if to_disk else "copied"
                return f"{under_way} checkpoints that are still being {doing}"
            if isinstance(message, msg.SaveArrays) and self.saves.commits_at(message.path):
                return f"an earlier checkpoint to be put in its place at {message.path}"
        return ""

    def take_runs(self, client: Client, wanted: Callable[[msg.Run], bool]) -> list[msg.Run]:
        """Take the `wanted` runs out of a backlog; a `Delete` of their donated arrays replaces each."""
        runs: list[msg.Run] = []
        rest: list[Ordered] = []
        for message in client.stream:
            if not (isinstance(message, msg.Run) and wanted(message)):
                rest.append(message)
                continue
            runs.append(message)
            client.stream.aside.overtaken.discard(message.run)
            if donated := client.donated_to(message):
                rest.append(msg.Delete(donated))  # an earlier run may have to make them
        client.stream.replace(rest)
        return runs

    def begin_uploads(self, client: Client) -> None:
        """Announce uploads to bound slices ahead of what waits: their bytes are on their way."""
        uploads: list[msg.CreateArray] = []
        rest: list[Ordered] = []
        for message in client.stream:
            if (
                isinstance(message, msg.CreateArray)
                and message.source is None
                and self._islands.is_bound(message.spec)
            ):
                uploads.append(message)
            else:
                rest.append(message)
        client.stream.replace(rest)
        for message in uploads:
            self.carry_out(client, message)

    def _inquire(self, client: Client, message: msg.Inquire) -> None:
        """Say whether the client still holds these arrays; nothing is being recovered now.

        Hosts do not know that another session makes an array there again: the answer waits for that.
        """
        for array in message.arrays:
            if self._is_to_come(client, array):
                self._inquiries.append((client, message, array))
                return
        error = None
        if any(number not in client.arrays for number in message.arrays):
            words = (
                "the array was deleted, or donated to a computation, before its value was asked "
                "for; keep a copy, copy.copy(x), or do not donate it"
            )
            error = ErrorReport.of(ArrayDeleted(words))
        self.sessions.tell(client, msg.Answered(message.request, error))

    def answer_inquiries(self) -> None:
        """Answer those for which arrays of other sessions have come in this turn."""
        waiting, self._inquiries = self._inquiries, []
        for one in waiting:
            client, message, array = one
            if self.sessions.get(client.number) is not client:
                continue
            if self._is_to_come(client, array):
                self._inquiries.append(one)
            else:
                self._inquire(client, message)

    def _is_to_come(self, client: Client, array: int) -> bool:
        """Whether another session has yet to make an array."""
        return client.arrays.is_arriving(array) and self.handovers.is_taken(array)

    @handles_client(msg.LinkLost)
    def _link_lost(self, client: Client, message: msg.LinkLost) -> None:
        """Mark the uploads to this host that wait as sent to no hosts, so that they are asked for again.

        Launches under a lease may not have arrived either.
        """
        if any(_is_upload_to(client, message.host, one) for one in client.stream):
            waiting = [
                msgspec.structs.replace(one, bound=0)
                if _is_upload_to(client, message.host, one)
                else one
                for one in client.stream
            ]
            client.stream.replace(waiting)
        self._islands.tell_all(msg.HolderCutOff(client.number, message.host))


def _is_upload_to(client: Client, host: str, message: Ordered) -> bool:
    """Whether a message announces an array of a slice that is or was on a host."""
    if not isinstance(message, msg.CreateArray):
        return False
    return host in client.slices.hosts.get(message.spec.placement.slice, ())
