"""Asks hosts whether arrays have their values.

A run is over for the controller when its hosts have done it. What a user's function has raised is with the
values, on the hosts. A part that needs to know asks here, and gets one answer: no host has an error, or the
first error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import ErrorReport
from pw.core.ids import Address, store_of
from pw.sched.control.array_states import ArrayEntry
from pw.sched.control.sessions import ControlPart, handles_host

Then = Callable[[ErrorReport | None], None]


@dataclass(slots=True, eq=False)
class _Confirmation:
    """A question to the hosts of some arrays."""

    islands: dict[str, str]
    """Island of each host that has not answered."""
    then: Then


@dataclass(eq=False)
class Confirmations(ControlPart):
    """Questions whether arrays have their values."""

    _questions: dict[int, _Confirmation] = field(default_factory=dict, init=False)
    _count: int = field(default=0, init=False)

    def ask(self, arrays: Iterable[tuple[int, ArrayEntry]], then: Then) -> None:
        """Ask the hosts of arrays that are there; `then` is called once, in a later turn if there are any."""
        by_host: dict[str, list[int]] = {}
        islands: dict[str, str] = {}
        for number, entry in arrays:
            for host in entry.hosts:
                by_host.setdefault(host, []).append(number)
                islands[host] = entry.island
        if not by_host:
            then(None)
            return
        self._count += 1
        self._questions[self._count] = _Confirmation(islands, then)
        for host, numbers in by_host.items():
            self._env.send(store_of(host), msg.ConfirmArrays(self._count, tuple(numbers)))

    @handles_host(msg.ArraysConfirmed)
    def _confirmed(self, host: str, message: msg.ArraysConfirmed) -> None:
        question = self._questions.get(message.request)
        if question is None or host not in question.islands:
            self._env.count("messages_stale")
            return
        del question.islands[host]
        if message.error is not None or not question.islands:
            del self._questions[message.request]
            question.then(message.error)

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        """Hosts of the island do not answer any more."""
        for number, question in list(self._questions.items()):
            if message.island in question.islands.values():
                del self._questions[number]
                question.then(message.error)
