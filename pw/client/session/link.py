"""A session's way to its controller, which may be lost and come back as another process.

The session's parts send to the controller as if it were always there. While it is not, what they say is
held; when there is another one, that is told all that its predecessor knew, and then what was held.

    open -PeerLost-> lost -Attached-> open, after `Journal.retold`, open requests, and what was held
"""

from __future__ import annotations

import msgspec

from pw.client.session.journal import Journal
from pw.client.session.requests import Requests
from pw.core.actor import Env
from pw.core.ids import CONTROL, Address
from pw.core.messages import AllocateSlice, CreateArray, InputGone, LinkLost

_OF_NO_USE = (InputGone, LinkLost)
"""What only the controller wants to hear that has asked, or that sees the same cluster."""


class ControllerLink:
    """An `Env` whose messages to the controller survive it.

    Args:
        env: the session's.
    """

    def __init__(self, env: Env) -> None:
        self._env = env
        self.now_s = env.now_s
        self.call_later = env.call_later
        self.introduce = env.introduce
        self.forget = env.forget
        self.log = env.log
        self.count = env.count
        self.keeps = False
        """Whether there will be somebody to tell everything again."""
        self.journal = Journal()
        self._held: list[object] | None = None

    @property
    def address(self) -> Address:
        """The session's own address."""
        return self._env.address

    @property
    def is_open(self) -> bool:
        """Whether there is a controller."""
        return self._held is None

    def may_have(self, array: int) -> bool:
        """Whether the client may still have this array; certain if what it says is written down."""
        return not self.keeps or array in self.journal

    def send(self, to: Address, message: object) -> None:
        """Send, or hold what is for the controller until there is one."""
        if to != CONTROL:
            self._env.send(to, message)
        elif self._held is None:
            self._env.send(to, message)
            if self.keeps:  # what could not be sent would stop the next controller's being told
                self.journal.told(message)
        elif not isinstance(message, _OF_NO_USE):
            self._held.append(message)

    def call(self, message: object) -> None:
        """Send to whoever may be the controller by now, whatever has been lost."""
        self._env.send(CONTROL, message)

    def lost(self, requests: Requests) -> None:
        """There is no controller: hold what is for it. What it was asked it will be asked once more."""
        if self._held is None:
            self._held = self.journal.open_requests(requests.is_open)

    def resume(self) -> int:
        """There is another controller: tell it everything. Returns how many runs were in flight."""
        assert self._held is not None, "resumes without having lost anything"
        held, self._held = self._held, None
        in_flight, self.journal.in_flight = self.journal.in_flight, 0
        for message in self.journal.retold():
            self._env.send(CONTROL, message)
        for message in held:
            if isinstance(message, AllocateSlice):
                message = msgspec.structs.replace(message, resumed=True)
            elif isinstance(message, CreateArray) and message.source is None:
                message = msgspec.structs.replace(message, bound=0)
            self.send(CONTROL, message)
        return in_flight
