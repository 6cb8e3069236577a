"""Holds the launches of clients that are to leave their devices.

A client is held from `HoldLaunches` to `LetLaunch`: nothing of its queue is launched but the runs that are
named, which are the first ones. It gets no launch lease, and those that it has are closed. The answer says
which runs are queued, when no lease is left: from then on no host takes launches of the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import CONTROL, Address, client_of
from pw.sched.island.leases import LaunchLeases
from pw.sched.island.queues import Queues


@dataclass(eq=False, repr=False)
class LaunchHolds(Part):
    """Clients of one island whose launches are held."""

    env: Env
    island: str
    queues: Queues
    leases: LaunchLeases
    asked: set[int] = field(default_factory=set, init=False)
    """Numbers of clients of which the controller has yet to hear that they are held."""

    @handles(msg.HoldLaunches)
    def _hold(self, sender: Address, message: msg.HoldLaunches) -> None:
        queue = self.queues.clients.get(message.client)
        if queue is not None:
            queue.held_but = frozenset(message.but)
            self.leases.close_of(message.client, "suspension")
        self.asked.add(message.client)

    @handles(msg.LetLaunch)
    def _let(self, sender: Address, message: msg.LetLaunch) -> None:
        self.asked.discard(message.client)
        queue = self.queues.clients.get(message.client)
        if queue is not None:
            queue.held_but = None
        memory = self.queues.admission.memory
        if memory is not None:  # at once: what comes back is counted anew
            for array in message.gone:
                memory.release(array)

    @handles(msg.RemoveClient)
    def _client_removed(self, sender: Address, message: msg.RemoveClient) -> None:
        self.asked.discard(message.client)

    def turn_ended(self) -> None:
        """Tell the controller of clients that are held, and of what is queued of them."""
        lent = {lease.client for lease in self.leases.table.numbered.values()}
        for client in [one for one in self.asked if one not in lent]:
            self.asked.remove(client)
            queued = [
                run
                for run, tasks in self.queues.runs.items()
                if client_of(run) == client and not tasks[0].here.introduced
            ]
            self.env.send(CONTROL, msg.LaunchesHeld(self.island, client, tuple(queued)))
