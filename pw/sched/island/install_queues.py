"""Which programs the hosts of an island are compiling, and which wait until earlier ones are compiled.

Launches of all clients reach a host on one link, behind the programs that were sent before. So hosts
get only a few programs of one client at once: however many a client registers, the launches of others
wait for no more than these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pw.core.ids import client_of
from pw.core.messages import InstallProgram

AT_ONCE = 8
"""Number of programs of one client that a host may be compiling; it compiles some in parallel."""

_Install = tuple[int, int]
"""Number of a program, and of its installation."""


@dataclass(slots=True)
class _ClientInstalls:
    """The installs of one client."""

    sent: dict[_Install, set[str]] = field(default_factory=dict)
    """Names of hosts that have not answered yet, by installation."""
    waiting: OrderedDict[int, InstallProgram] = field(default_factory=OrderedDict)
    """Installs that wait, by program, in the order in which they are sent."""


class InstallQueues:
    """Installs of every client; those of one client stay in their order."""

    def __init__(self) -> None:
        self.at_once = AT_ONCE
        self._queues: dict[int, _ClientInstalls] = {}

    def put(self, message: InstallProgram) -> None:
        """Put an install behind the others of its client, in the place of an earlier install of the program
        that waits.
        """
        queue = self._queues.setdefault(client_of(message.program), _ClientInstalls())
        queue.waiting[message.program] = message
        queue.waiting.move_to_end(message.program)

    def take(self, client: int) -> Iterator[InstallProgram]:
        """Yield what may be sent to hosts now; it counts as sent."""
        queue = self._queues.get(client)
        while queue is not None and queue.waiting and len(queue.sent) < self.at_once:
            _, message = queue.waiting.popitem(last=False)
            hosts = {plan.host for plan in message.plans}
            queue.sent[message.program, message.install] = hosts
            yield message

    def answered(self, program: int, install: int, *by: str) -> None:
        """Hosts have compiled a program, or have failed, or were told to forget it."""
        queue = self._queues.get(client_of(program))
        if queue is None or (hosts := queue.sent.get((program, install))) is None:
            return
        hosts.difference_update(by)
        if not hosts:
            del queue.sent[program, install]
            if not queue.sent and not queue.waiting:
                self.forget(client_of(program))

    def drop(self, program: int) -> None:
        """Do not send the installs of a program that still wait."""
        queue = self._queues.get(client_of(program))
        if queue is not None:
            queue.waiting.pop(program, None)

    def forget(self, client: int) -> None:
        """A client has left."""
        self._queues.pop(client, None)

    def clear(self) -> None:
        """The hosts have left their epoch, and answer no more."""
        self._queues.clear()
