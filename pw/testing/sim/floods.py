"""Clients that send far more than a node can handle, and what others notice of it.

`flood` sends a few thousand requests to the controller and to the hosts that a client knows;
`flood_of_programs` registers some hundred programs, and releases them.
`Fairness` checks that no message of another peer waits long for its turn, at any node, and that no
host has more than a few programs of one client to compile.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.ids import CONTROL, CONTROLLER, Address, client_id, client_of
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.workload import SimClient
from pw.testing.sim.world import SimProcess, Violation

FAIR_S = 5e-3
"""Seconds that a message of a peer that does not flood waits at most, times the node's slowness. A turn takes
0.5 ms, and the turns of the other peers are shorter."""
COMPILING = 8
"""Number of programs of one client that a host has to compile, at most."""
_FIRST_PROGRAM = 1 << 38
"""First serial number of flooding programs; the session never gives it, nor a larger one."""
_PROGRAMS = 300
_REQUESTS = 3000
_IN_A_FRAME = 40


def flood(random: Random, node: SimProcess) -> None:
    """Send some thousand requests to each peer, as fast as the client can."""
    node.world.floods.add(node.name)
    sender, network = Address(node.name, "session"), node.network
    for peer in sorted(network.links):
        for number in range(random.randint(_REQUESTS // 2, _REQUESTS)):
            request = -1 - number  # the session never gave this number
            if peer == CONTROLLER:
                network.send(CONTROL, sender, random.choice((msg.GetStats, msg.GetStatus))(request))
            else:
                network.send(Address(peer, "store"), sender, msg.GetStats(request))
            if number % _IN_A_FRAME == 0:
                network.flush()
    network.flush()


def flood_of_programs(random: Random, client: SimClient) -> None:
    """Register copies of a client's programs as fast as it can; release each, early or late."""
    drafts = list(client.programs.values())
    if client.attached is None or not drafts:
        return
    node, number = client.node, client.attached.client
    node.world.floods.add(node.name)
    sender, network = Address(node.name, "session"), node.network
    kept: list[int] = []
    for _ in range(random.randint(_PROGRAMS // 2, _PROGRAMS)):
        program = client_id(number, _FIRST_PROGRAM + random.getrandbits(32))
        draft = random.choice(drafts)
        register = msg.RegisterProgram(program, Compact.of(draft.body), draft.artifacts)
        network.send(CONTROL, sender, register)
        kept.append(program)
        if random.random() < 0.5:
            network.send(CONTROL, sender, msg.ReleaseProgram(kept.pop(random.randrange(len(kept)))))
        if random.random() < 1 / _IN_A_FRAME:
            network.flush()
    for program in kept:
        network.send(CONTROL, sender, msg.ReleaseProgram(program))
    network.flush()


class Fairness:
    """Checks what other clients may notice of floods, in worlds where clients flood."""

    def __init__(self, cluster: SimCluster) -> None:
        self._world = cluster.world
        self._compiling: defaultdict[tuple[str, int, int], set[tuple[int, int]]]
        self._compiling = defaultdict(set)
        """Programs and their installations that hosts have to compile in an epoch for a client."""
        if self._world.profile.floods:
            self._world.waited = self._waited
            self._world.watch_sent(msg.Install, self._to_compile)
            self._world.watch_sent(msg.Installed, self._compiled)

    def _to_compile(self, sender: Address, to: Address, message: msg.Install) -> None:
        client = client_of(message.program)
        compiling = self._compiling[to.node, message.epoch, client]
        compiling.add((message.program, message.install))
        self._world.checked["fair"] += 1
        if len(compiling) > COMPILING:
            words = f"{to.node} has to compile {len(compiling)} programs of client {client} at once"
            raise Violation("fair", words)

    def _compiled(self, sender: Address, to: Address, message: msg.Installed) -> None:
        what = sender.node, message.epoch, client_of(message.program)
        self._compiling[what].discard((message.program, message.install))

    def _waited(self, node: SimProcess, peer: str, arrived_s: float, now_s: float) -> None:
        world = self._world
        flooded = peer in world.floods or node.name in world.floods  # by its answers
        if flooded or node.paused_until_s >= arrived_s:
            return
        world.checked["fair"] += 1
        waited_s = now_s - arrived_s
        if waited_s > FAIR_S * node.slowness:
            words = f"a message of {peer} waited {waited_s * 1e3:.1f} ms at {node.name}"
            raise Violation("fair", words)
