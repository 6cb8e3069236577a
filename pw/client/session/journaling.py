"""`JournalingEnv`: the session's `Env`, whose messages to the controller survive the loss of the controller.

The parts of a session send to the controller as if it were always there. This `Env` writes down in
the journal what it sends to the controller. While there is no controller, it holds messages for it.
The next controller gets the journal, and then the held messages.

    open -PeerLost-> lost -Attached-> open, after `Journal.retold`, open requests and held messages

Nothing waits for the controller to hear of a run that is launched under a lease, so it is told of
several at once. Threads that launch note runs here (`launched`), and the session tells of them: soon,
and before whatever else it tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from pw.client.session.journal import Journal
from pw.core import messages as msg
from pw.core.actors.actor import Env
from pw.core.errors import ErrorReport, NameNotFound
from pw.core.ids import CONTROL, Address
from pw.core.messages.checks import beyond_bounds, has_bounds, refusal

KEEP_LEASES = (
    msg.Run,
    msg.Delete,
    msg.RegisterProgram,
    msg.ReleaseProgram,
    msg.CreateArray,
    msg.Inquire,
    msg.WatchIslands,
)
"""Messages to the controller that end no lease: they have no place among launches."""

_NOT_HELD = (msg.InputGone, msg.LinkLost, msg.WatchIslands)
"""Answers, news and watches that only the lost controller can use."""


class JournalingEnv:
    """An `Env` for all parts of a session.

    Args:
        env: the session's own.
    """

    def __init__(self, env: Env) -> None:
        self._env = env
        self.address = env.address
        self.recorder = env.recorder
        self.now_s = env.now_s
        self.call_later = env.call_later
        self.introduce = env.introduce
        self.forget = env.forget
        self.tenant_of = env.tenant_of
        self.islands_of = env.islands_of
        self.log = env.log
        self.audit = env.audit
        self.count = env.count
        self.keeps = False
        """True if the session keeps a journal, because it will look for another controller."""
        self.journal = Journal()
        self.on_order: Callable[[], None] = lambda: None
        """Called before a message is sent that has its place among the launches."""
        self.on_launched: Callable[[msg.Run], None] = lambda run: None
        """Called before the controller is told of a launched run."""
        self._held: list[object] | None = None
        self._launched: deque[msg.Run | msg.CreateArray] = deque()
        """Launched runs, and uploads before them, that the controller has not been told of."""
        self.launched = self._launched.append
        """Notes a run or an upload that a thread sends, before any host hears of it; from any thread."""

    @property
    def is_open(self) -> bool:
        """Whether there is a controller."""
        return self._held is None

    def may_have(self, array: int) -> bool:
        """Whether the client may still have this array; exact when there is a journal."""
        return not self.keeps or array in self.journal

    def send(self, to: Address, message: object) -> None:
        """Send a message; hold it if it is for the controller and there is none."""
        kind: type = type(message)
        if has_bounds(kind) and self._refuses(message):
            return
        if to != CONTROL:
            self._env.send(to, message)
        elif self._held is None:
            if not isinstance(message, KEEP_LEASES):
                self.on_order()
            if self._launched:
                self.tell_launched()
            self._env.send(to, message)
            if self.keeps:  # after sending: one that cannot be sent must not be in the journal
                self.journal.record(message)
        elif not isinstance(message, _NOT_HELD):
            self._held.append(message)

    def tell_launched(self) -> None:
        """Tell of the runs that were launched, or write them down for another controller."""
        while self._launched:
            message = self._launched.popleft()
            if isinstance(message, msg.Run):
                self.count("leased_launches")
                self.on_launched(message)
            if self.keeps:
                self.journal.record(message)
            if self._held is None:
                self._env.send(CONTROL, message)

    def call(self, message: object) -> None:
        """Send to the process at the controller's address, although no controller is known there."""
        if not self._refuses(message):
            self._env.send(CONTROL, message)

    def _refuses(self, message: object) -> bool:
        """Answer a message that is beyond its bounds here, where it would not decode there."""
        if (error := beyond_bounds(message)) is None:
            return False
        self.count("messages_refused")
        if (answer := refusal(message, error)) is not None:
            self._env.send(self.address, answer)
        return True

    def lost(self, is_open: Callable[[int], bool]) -> None:
        """Hold messages from now on, after the unanswered requests; `is_open` says which those are."""
        if self._held is None:
            requests = self.journal.open_requests(is_open)
            self._held = [one for one in requests if not self.has_ended(one)]
            self.tell_launched()

    def has_ended(self, request: object) -> bool:
        """Answer a publication that the lost controller has ended; the next one would begin it again."""
        if not isinstance(request, msg.Publish) or request.request in self.journal.publications:
            return False
        error = NameNotFound(
            f"{request.name!r} was ended before all arrays of this version were there, by pw.unpublish as a "
            "rule, and then the controller was lost; publish it again if readers are to have it"
        )
        refused = msg.RequestFailed(request.request, ErrorReport.of(error))
        self._env.send(self.address, refused)
        return True

    def resume(self) -> int:
        """Tell another controller everything. Returns how many runs were in flight."""
        assert self._held is not None, "the controller was not lost"
        self.tell_launched()
        held, self._held = self._held, None
        in_flight, self.journal.in_flight = self.journal.in_flight, 0
        for message in self.journal.retold():
            self._env.send(CONTROL, message)
        for message in held:
            if isinstance(message, msg.AllocateSlice):
                message = msgspec.structs.replace(message, resumed=True)
            elif isinstance(message, msg.CreateArray) and message.source is None:
                message = msgspec.structs.replace(message, bound=0)
            self.send(CONTROL, message)
        return in_flight
