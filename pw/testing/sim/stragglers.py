"""One host of an island becomes slow, and the scheduler must name it, and no other.

A user calls one function on all devices of the largest island, again and again. At some time one host gets slow
devices, a slow processor or slow links, so that each gang takes at least half as long again; in some seeds none
does. All hosts stop for half a second now and then, and computations take longer by chance: that is not slow.

| promise | |
|---|---|
| named is slow | a host that the scheduler names is the slow one, and its cause fits |
| slow is named | `NAMED_S` after it became slow, and from then on, the scheduler names the host |
| replaced is slow | with the profile's `replace_stragglers`, only the slow host is replaced |
| slow is replaced | and if there is a spare for it, `REPLACED_S` after it should have been named |
"""

from __future__ import annotations

from collections.abc import Sequence

from pw.core import messages as msg
from pw.core.ids import Address
from pw.core.messages import SlowCause
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.devices import OP_S
from pw.testing.sim.host import SimHost
from pw.testing.sim.network import LATENCY_S
from pw.testing.sim.tenants import Tenant
from pw.testing.sim.workload import SimClient
from pw.testing.sim.world import Violation

NAMED_S = 10.0
"""Seconds after which a slow host is named."""
REPLACED_S = 20.0
"""Seconds after which a slow host that is named has left, if a spare can take its place."""
LOOK_S = 0.25
HICCUP_S = 0.5
"""Seconds for which a host may stop once."""
TAKES_S = (4e-3, 12e-3)
"""Bounds of the seconds of a call on hosts that are not slow."""
BUSY = 50.0
"""Factor by which a slow processor takes longer for each message."""
KINDS = {
    "devices": (SlowCause.DEVICE,),
    "processor": (SlowCause.PROCESSOR,),
    "links": (SlowCause.NETWORK,),
}
"""What is slow of a host, and the causes that fit."""


def largest(cluster: SimCluster) -> str:
    """Return the name of the island with most hosts."""
    return max(sorted(cluster.islands), key=lambda name: len(cluster.islands[name]))


class GangUser(Tenant):
    """A user of one function on all of the largest island, who waits for each result."""

    def _claim(self) -> tuple[float, int]:
        claim = super()._claim()
        self.takes_s = self.random.uniform(*TAKES_S)
        self.waits_for = 1
        self.think_s = self.random.uniform(5e-3, 15e-3)
        return claim

    def _place(self) -> tuple[str, int]:
        island = largest(self.cluster)
        members = self.cluster.islands[island]
        return island, len(members) * members[0].devices


class Straggling:
    """Makes a host slow, and checks which ones are named."""

    def __init__(self, cluster: SimCluster, users: Sequence[SimClient]) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._user = next((user for user in users if isinstance(user, GangUser)), None)
        self._slow: SimHost | None = None
        self._kind = ""
        self._since_s = 0.0
        self._is_leaving = False
        """True if the slow host is to be replaced, as soon as there is a spare for it."""
        self._world.watch_sent(msg.ReplaceHost, self._replaced)
        if self._user is not None:
            self._plan(self._user)

    def _plan(self, user: GangUser) -> None:
        world, random = self._world, self._world.streams("stragglers")
        members = self._cluster.islands[largest(self._cluster)]
        draw, host, kind = random.random(), random.choice(members), random.choice(sorted(KINDS))
        begins_s = random.uniform(1.5, 5.0)
        for member in members:
            if random.random() < 0.5:
                world.at(random.uniform(1.0, world.profile.span_s - 1.0), self._stop, member)
        if draw < world.profile.stragglers and len(members) > 1:
            world.at(begins_s, self._slow_down, host, kind, user.takes_s, random.uniform(0.8, 2.0))
        world.after(LOOK_S, self._look)

    def _stop(self, host: SimHost) -> None:
        if host.node is not None:
            host.node.paused_until_s = self._world.now_s + HICCUP_S

    def _slow_down(self, host: SimHost, kind: str, takes_s: float, more: float) -> None:
        """Have each call wait for a host `more` times as long as it takes without."""
        node = host.node
        members = [one.members.hosts for one in self._cluster.schedulers.values()]
        if not any(host.name in hosts for hosts in members):
            return  # a spare has its place
        assert node is not None
        if kind == "devices":
            node.device_slowness = 1.0 + more
        elif kind == "processor":
            node.slowness = BUSY
            node.enqueue_slowness = more * takes_s / OP_S
        else:
            node.link_slowness = more * takes_s / LATENCY_S
        self._slow, self._kind, self._since_s = host, kind, self._world.now_s
        self._world.ledger.injected["slow host"] += 1

    def _replaced(self, sender: Address, to: Address, message: msg.ReplaceHost) -> None:
        """Only a host that is slow, and was named, is replaced."""
        self._world.checked["replaced"] += 1
        if self._slow is None or message.node != self._slow.name:
            raise Violation("stragglers", f"{message.node} is to be replaced, and is not slow")
        self._is_leaving = True
        self._world.ledger.note("drain", message.node)

    def _look(self) -> None:
        self.check()
        if self._world.now_s < self._world.profile.span_s:
            self._world.after(LOOK_S, self._look)

    def check(self) -> None:
        """Compare the hosts that are named slow with the one that is."""
        if self._user is None or self._user.final:
            return
        self._world.checked["stragglers"] += 1
        named = {
            one.host: one
            for each in self._cluster.schedulers.values()
            for one in each.stragglers.slow()
        }
        slow = None if self._slow is None else self._slow.name
        for host, one in named.items():
            if host != slow:
                raise Violation("stragglers", f"{one.words}; but it is not slow")
            if one.cause not in KINDS[self._kind]:
                raise Violation("stragglers", f"{one.words}; but its {self._kind} are slow")
        began_s = max(self._since_s, self._user.began_s)
        if self._slow is None or self._world.now_s < began_s + NAMED_S:
            return
        if not (slow in named or self._is_leaving):
            raise Violation("stragglers", f"{slow} has slow {self._kind}, and is not named")
        inventory = self._cluster.resources.inventory
        is_late = self._world.now_s > began_s + NAMED_S + REPLACED_S
        if is_late and self._world.profile.replace_stragglers and not self._slow.finished:
            spare = inventory.spare_for(inventory.islands[self._slow.island])
            if spare is not None or not self._is_leaving:
                raise Violation("stragglers", f"{slow} is slow for long, and is not replaced")
