"""What clients have used on an island, until the accounts of the controller take it.

A launch may end, and a host may have compiled, after the client has left. That counts as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.accounts import Spent
from pw.core.actors.actor import Part, handles
from pw.core.ids import Address, client_of
from pw.sched.island.client_queue import ClientQueue
from pw.sched.island.launch_states import SegmentTask
from pw.sched.island.queues import Queues


@dataclass(eq=False, repr=False)
class Spending(Part):
    """What the accounts have not taken."""

    queues: Queues
    _spent: dict[tuple[int, str], Spent] = field(default_factory=dict, init=False)
    """Amounts besides the launches of the clients that are here, by client and tenant."""

    def _of(self, client: int, tenant: str) -> Spent:
        return self._spent.setdefault((client, tenant), Spent())

    def ended_late(self, task: SegmentTask) -> None:
        """A launch has ended whose client has left."""
        stake = task.here.stake
        self._of(stake.client, stake.tenant).add(Spent(task.device_s, 1))

    @handles(msg.Installed)
    def _compiled(self, sender: Address, message: msg.Installed) -> None:
        queue = self.queues.clients.get(client_of(message.program))
        if queue is not None and message.compile_s:
            self._of(queue.stake.client, queue.stake.tenant).compile_s += message.compile_s

    @handles(msg.RemoveClient)
    def _client_left(self, sender: Address, message: msg.RemoveClient) -> None:
        """Handled before the queue is forgotten."""
        queue = self.queues.clients.get(message.client)
        if queue is not None and (more := _since_taken(queue)):
            self._of(message.client, queue.stake.tenant).add(more)

    @property
    def untaken_s(self) -> float:
        """Device time that the accounts have not taken, in seconds."""
        queues = self.queues.clients.values()
        here = sum(queue.device_s - queue.account.device_s for queue in queues)
        return here + sum(spent.device_s for spent in self._spent.values())

    def take(self, client: int = 0) -> Iterator[tuple[int, str, Spent]]:
        """Yield what one client, or each, has used since the last time, with the client's tenant."""
        queues = self.queues.clients
        for queue in [queues[client]] if client in queues else () if client else queues.values():
            if more := _since_taken(queue):
                yield queue.stake.client, queue.stake.tenant, more
        for key in [key for key in self._spent if client in (0, key[0])]:
            yield *key, self._spent.pop(key)


def _since_taken(queue: ClientQueue) -> Spent:
    before, queue.account = queue.account, Spent(queue.device_s, queue.ended_launches)
    return Spent(queue.device_s - before.device_s, queue.ended_launches - before.launches)
