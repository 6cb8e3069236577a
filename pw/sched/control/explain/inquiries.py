"""Asks schedulers and hosts, and collects their answers until all have come or the time is over.

An inquiry is a generator: it yields the type of the answers that it wants with the question for each
actor, is sent the answers that have come in time, may ask more, and returns a report. An answer that
was not asked for, or is of another type, is dropped. Inquiries cost hosts and other clients time, so
a client may have only a few open.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import ErrorReport, ProtocolError
from pw.core.ids import Address
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart

ANSWER_S = 0.8
"""Seconds that hosts have to answer."""

AT_ONCE = 4
"""Number of inquiries of one kind and one client that are open at once; more are refused."""

Questions = tuple[type, Mapping[Address, Callable[[int], object]]]
"""Type of the answers, and for each actor a function that makes the question from a number."""

Inquiry = Generator[
    Questions, dict[Address, Any], msg.Explanation | msg.Memory | msg.Queue | msg.DevicesTested
]

Request = msg.Explain | msg.GetMemory | msg.GetQueue | msg.TestDevices


@dataclass(slots=True, eq=False)
class _OpenInquiry:
    """An open inquiry."""

    inquiry: Inquiry
    tell: Callable[[Any], None]
    """Function that takes the report."""
    asker: tuple[int, type] | None
    """The client and the type of its request; None for an inquiry of the controller."""
    answer_s: float = ANSWER_S
    """Seconds that hosts have to answer."""
    answer_type: type = object
    awaited: set[Address] = field(default_factory=set)
    """Actors that have not answered."""
    answers: dict[Address, Any] = field(default_factory=dict)


class Inquiries(ControlPart):
    """Open inquiries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._open: dict[int, _OpenInquiry] = {}
        self._asked = 0

    def answer(
        self, client: Client, request: Request, inquiry: Inquiry, answer_s: float = ANSWER_S
    ) -> None:
        """Send a client the report of an inquiry, or an error if it has too many open."""
        asker = (client.number, type(request))
        if sum(one.asker == asker for one in self._open.values()) < AT_ONCE:
            self.begin(inquiry, partial(self._env.send, client.address), asker, answer_s)
            return
        self._env.count("questions_refused")
        error = ProtocolError(
            f"client {client.number} has asked {AT_ONCE} times, and is not answered yet; wait for an "
            "answer, then ask again"
        )
        self.sessions.tell(client, msg.RequestFailed(request.request, ErrorReport.of(error)))

    def begin(
        self,
        inquiry: Inquiry,
        tell: Callable[[Any], None],
        asker: tuple[int, type] | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Begin an inquiry; `tell` takes its report, at once or later."""
        self._ask(_OpenInquiry(inquiry, tell, asker, answer_s), next)

    def _ask(self, one: _OpenInquiry, resume: Callable[[Inquiry], Questions]) -> None:
        """Resume an inquiry, and send the questions that it yields."""
        try:
            one.answer_type, questions = resume(one.inquiry)
        except StopIteration as end:
            one.tell(end.value)
            return
        self._asked += 1
        number = self._asked
        self._open[number] = one
        one.awaited, one.answers = set(questions), {}
        for address, question in questions.items():
            self._env.send(address, question(number))
        if questions:
            self._env.call_later(one.answer_s, partial(self._go_on, number))
        else:
            self._go_on(number)

    @handles(
        *(msg.IslandReport, msg.IslandMeasured, msg.IslandWaits),
        *(msg.HostReport, msg.HostMeasured, msg.HostTested),
    )
    def _answered(self, sender: Address, message: Any) -> None:
        number = message.request
        one = self._open.get(number)
        if one is None or sender not in one.awaited or one.answer_type is not type(message):
            self._env.count("messages_stale")
            return
        one.awaited.discard(sender)
        one.answers[sender] = message
        if not one.awaited:
            self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Go on with the answers that have come, unless that is done."""
        one = self._open.pop(number, None)
        if one is not None:
            self._ask(one, lambda inquiry: inquiry.send(one.answers))
