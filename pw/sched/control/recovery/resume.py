"""What a client tells a controller that was started after the one which knew it.

The client keeps all that its controller has to know: its slices, its programs, and as much of its lineage
as may be needed (`ForgetRuns`, `ForgetInputs` say what is not). Another controller hears it in the order in
which it happened, and then what the client has of it (`Resumed`). All that is *lost* to this controller, as
after the loss of a host, and is brought back in the same way (`pw.sched.control.recovery.rebuild`): hosts
have handed over what was ready, so that little has to be run again. A run that was in flight is no more than a
record whose results are lost. It counts no more among the runs in flight; the client knows that.

Numbers of clients never repeat while anybody remembers them: each start of a controller begins elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from pw.core.errors import ErrorReport, HostLost, ProtocolError
from pw.core.messages import CreateArray, Resumed, Run
from pw.core.messages.links import in_words
from pw.sched.control.clients import NOWHERE, Array, Client
from pw.sched.control.programs import RegisteredProgram

CLIENT_NUMBERS = 1 << 23
"""Numbers below this one: an id has 63 bits, and 40 of them are the client's to give."""

GIVEN_KEPT = 1 << 16
"""Numbers of clients that have left are known until so many others have come: each `pw status` is a client."""

RESTARTED = ErrorReport.of(HostLost("the controller was started again"))


class ClientNumbers:
    """The numbers that one controller gives to its clients.

    Args:
        first: the first one; another start has another one.
        here: those of the clients that are here.
    """

    def __init__(self, first: int, here: Container[int]) -> None:
        self.first = first % CLIENT_NUMBERS or 1
        self._here = here
        self._next = self.first
        self._given: OrderedDict[int, str] = OrderedDict()
        """With the reason why a client left that is not here any more."""

    def take(self, taken: Container[int]) -> int:
        """A number that is not `taken`."""
        while self._next in taken or self.is_known(self._next):
            self._skip()
        number = self._next
        self._give(number)
        self._skip()
        return number

    def _give(self, number: int) -> None:
        self._given[number] = ""
        if len(self._given) > GIVEN_KEPT:
            self._given.popitem(last=False)

    def _skip(self) -> None:
        self._next = (self._next + 1) % CLIENT_NUMBERS or 1

    def claim(self, number: int) -> bool:
        """A client of an earlier controller has this number; false if it cannot have it (any more)."""
        if not 0 < number < CLIENT_NUMBERS or self.is_known(number):
            return False
        self._give(number)
        return True

    def left(self, number: int, reason: str) -> None:
        """The client with this number has left."""
        if number in self._given:
            self._given[number] = reason

    def why_gone(self, number: int) -> str:
        """Why a client that comes back cannot have this number any more."""
        reason = self._given.get(number)
        if not reason:
            return "it does not know this session, nor did the one before it; its arrays are gone"
        if reason.startswith("silent"):
            return f"{in_words(reason)}, and was given up"
        return (
            f"the connection between them was lost ({in_words(reason)}), and so it was given up. If the "
            "network was not cut, the controller was paused for longer than its clients wait for it"
        )

    def is_known(self, number: int) -> bool:
        """Whether a client has this number here, or had it not long ago, whatever has become of it."""
        return number in self._here or number in self._given


@dataclass(slots=True)
class Resumption:
    """A client that is telling what it has."""

    loss: int
    """What its slices are unbound by."""
    programs: dict[int, RegisteredProgram] = field(default_factory=dict)

    def create(self, client: Client, message: CreateArray) -> None:
        """It had announced this input."""
        client.lineage.add_input(message.array, message.spec, message.source)
        client.newest_input = max(client.newest_input, message.array)

    def run(self, client: Client, message: Run) -> None:
        """It had asked for this run."""
        if message.run <= client.last_run:
            return
        client.last_run = message.run
        program = self.programs.get(message.program)
        body = program.body if program is not None else None
        if (
            program is None
            or body is None
            or len(message.args) != len(body.inputs)
            or len(message.results) != len(body.outputs)
            or not client.lineage.origins.keys().isdisjoint(message.results)
        ):
            client.lineage.refuse_run(message.run)
            return
        for arg, spec in zip(message.args, body.inputs, strict=True):
            if isinstance(arg, int):
                client.lineage.add_known(arg, spec)
        client.lineage.add_run(message.run, program, message.args, message.results)

    def finish(self, client: Client, message: Resumed) -> None:
        """It has told everything: what it holds is lost from now on, until it is rebuilt."""
        lineage = client.lineage
        try:
            known_arrays = message.known.whole().arrays
        except ProtocolError:
            known_arrays = ()
        for known in known_arrays:
            lineage.add_known(known.array, client.one_spec(known.spec))
        held = set(message.held)
        lineage.release([array for array in lineage.origins if array not in held])
        for failed in message.failed:
            if failed.array in held:
                client.arrays[failed.array] = Array(NOWHERE, "", (), error=failed.error)
            elif failed.array in lineage.origins:
                lineage.origins[failed.array].error = failed.error
        for number in message.held:
            if number not in client.arrays:
                origin = lineage.origins.get(number)
                spec = origin.spec if origin is not None else NOWHERE
                client.arrays[number] = Array(spec, "", ())
                client.lost[number] = RESTARTED
        for array in message.copied:
            lineage.was_copied(array)
