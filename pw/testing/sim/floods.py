"""Clients that send far more than a node can handle, and what others notice of it.

`flood` sends a few thousand requests to the controller and to the hosts that a client knows.
`Fairness` checks that no message of another peer waits long for its turn, at any node.
"""

from __future__ import annotations

from random import Random

from pw.core.ids import CONTROL, CONTROLLER, Address
from pw.core.messages import GetStats, GetStatus
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.world import Process, Violation

FAIR_S = 5e-3
"""How long a message of a peer that does not flood waits at most, times the node's slowness.

A turn takes 1 ms, and the turns of the other peers are shorter.
"""
_REQUESTS = 3000
_IN_A_FRAME = 40


def flood(random: Random, node: Process) -> None:
    """Send some thousand requests to each peer, as fast as the client can."""
    node.world.floods.add(node.name)
    sender, network = Address(node.name, "session"), node.network
    for peer in sorted(network.peers()):
        for number in range(random.randint(_REQUESTS // 2, _REQUESTS)):
            request = -1 - number  # the session never gave this number
            if peer == CONTROLLER:
                network.send(CONTROL, sender, random.choice((GetStats, GetStatus))(request))
            else:
                network.send(Address(peer, "store"), sender, GetStats(request))
            if number % _IN_A_FRAME == 0:
                network.flush()
    network.flush()


class Fairness:
    """Checks how long messages of peers wait, at every node, in worlds where clients flood."""

    def __init__(self, cluster: SimCluster) -> None:
        self._world = cluster.world
        if self._world.profile.floods:
            self._world.waited = self._waited

    def _waited(self, node: Process, peer: str, arrived_s: float, now_s: float) -> None:
        world = self._world
        flooded = peer in world.floods or node.name in world.floods  # by its answers
        if flooded or node.paused_until_s >= arrived_s:
            return
        world.checked["fair"] += 1
        waited_s = now_s - arrived_s
        if waited_s > FAIR_S * node.slowness:
            words = f"a message of {peer} waited {waited_s * 1e3:.1f} ms at {node.name}"
            raise Violation("fair", words)
