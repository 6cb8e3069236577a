"""The faults of a run, planned before it begins.

Losses of frames, failed transfers and failed computations are drawn where they happen; here are the
faults that have a place and a duration: partitions, pauses, crashes of processes and machines, and
clients that die. `heal` ends them all: from then on everything must come right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from pw.core import messages as msg
from pw.core.errors import ErrorReport, PlacementError
from pw.core.ids import CONTROLLER, Address, scheduler_of
from pw.core.messages.roles import Role, role_of
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.floods import flood, flood_of_programs
from pw.testing.sim.host import SUPERVISOR_STOPPED, SimHost
from pw.testing.sim.network import HEARTBEAT_S
from pw.testing.sim.node import INTRUDER
from pw.testing.sim.trespasses import Trespasses
from pw.testing.sim.workload import SimClient
from pw.testing.sim.world import SimProcess

WATCHDOG_S = 10.0
"""Seconds after which a supervisor kills a runtime that does not answer."""

_ERROR = ErrorReport.of(PlacementError("forged"))


class Faults:
    """Plans the faults of a run and undoes them in the end."""

    def __init__(self, cluster: SimCluster, clients: list[SimClient]) -> None:
        self._cluster = cluster
        self._clients = clients
        self._world = cluster.world
        self._trespasses = Trespasses(cluster) if cluster.world.profile.trespasses else None
        profile = self._world.profile
        if profile.late_leases:
            self._world.watch_sent(msg.Lend, self._delay_lease)
            self._world.watch_sent(msg.WidenLease, self._delay_lease)
        scale = max(1.0, profile.hosts / 12)
        kinds: tuple[tuple[str, float, Callable[[Random], None]], ...] = (
            ("partition", profile.partitions * scale, self._partition),
            ("pause", profile.pauses * scale, self._pause),
            ("silence", profile.silences, self._silence),
            ("crash", profile.crashes * scale, self._crash),
            ("supervisor", profile.supervisor_stops * scale, self._stop_supervisor),
            ("machine", profile.machine_crashes * scale, self._crash_machine),
            ("notice", profile.notices * scale, self._give_notice),
            ("island", profile.island_losses, self._lose_island),
            ("controller", profile.restarts, self._restart_controller),
            ("client", profile.client_deaths, self._kill_client),
            ("intruder", profile.intrusions, self._intrude),
            ("trespass", profile.trespasses, self._trespass),
            ("flood", profile.floods, self._flood),
            ("sick", profile.sick, cluster.sickness.fall_ill),
        )
        for name, expected, action in kinds:
            random = self._world.streams(f"faults/{name}")
            count = int(expected) + (random.random() < expected % 1.0)
            for _ in range(random.randint(0, 2 * count) if count else 0):
                at_s = 0.2 + random.random() ** 2 * profile.span_s
                self._world.at(at_s, self._inject, action, random)

    def _inject(self, action: Callable[[Random], None], random: Random) -> None:
        if not self._world.calm:
            action(random)

    def _note(self, fault: str, *nodes: str) -> None:
        self._world.ledger.note(fault, *nodes)
        self._trace(f"{fault}: {', '.join(nodes)}")

    def _trace(self, what: str) -> None:
        self._world.trace.add((self._world.now_s, "FAULT", None, what))

    # --- faults --------------------------------------------------------------------------------------

    def _partition(self, random: Random) -> None:
        """Some nodes do not reach some others for a while, in one direction or both."""
        world = self._world
        names = sorted(world.nodes)
        some = sorted(random.sample(names, min(len(names), random.choice((1, 1, 1, 2, 3)))))
        targets = [name for name in names if name not in some]
        if random.random() < 0.4 and targets:
            targets = [random.choice(targets)]
        until_s = world.now_s + random.choice((0.05, 0.5, 2.0, 5.0, 15.0)) * random.uniform(
            0.5, 1.5
        )
        inwards, outwards = random.choice(((True, True), (True, False), (False, True)))
        self._note("partition" if inwards and outwards else "one-way partition", *some, *targets)
        for one in some:
            for other in targets:
                if outwards:
                    self._block(one, other, until_s)
                if inwards:
                    self._block(other, one, until_s)

    def _block(self, source: str, target: str, until_s: float) -> None:
        blocked = self._world.blocked
        blocked[source, target] = max(until_s, blocked.get((source, target), 0.0))
        node = self._world.nodes.get(target)
        if node is not None:
            self._world.after(HEARTBEAT_S, node.network.probe, source)

    def _delay_lease(
        self, sender: Address, to: Address, message: msg.Lend | msg.WidenLease
    ) -> None:
        """Delay the messages of the controller to a host by some milliseconds from here on."""
        random = self._world.streams("faults/late lease")
        if not self._world.calm and random.random() < self._world.profile.late_leases:
            self._world.ledger.injected["late lease"] += 1
            self._block(sender.node, to.node, self._world.now_s + random.uniform(0.001, 0.02))

    def _pause(self, random: Random) -> None:
        """A process stops and goes on later without noticing."""
        node = self._random_node(random)
        if node is not None:
            self._note("pause", *[one.name for one in self._of_process(node)])
            length_s = random.choice((0.1, 2.0, 6.0, 20.0)) * random.uniform(0.5, 1.5)
            self._stop(node, length_s)
            if random.random() < 0.5:  # only the runtime has stopped, and its supervisor watches it
                self._world.after(WATCHDOG_S, self._watched, node)

    def _silence(self, random: Random) -> None:
        """A process stops for so long that peers notice, and lose nothing: no error is excused by it."""
        names = sorted(self._world.nodes)
        node = self._world.nodes[random.choice(names)]
        length_s = random.choice((2.0, 6.0, 20.0, 60.0)) * random.uniform(0.5, 1.5)
        if role_of(node.name) is Role.WORKER:
            length_s = min(length_s, 1.0)
        if node.name == CONTROLLER and self._world.ledger.injected["controller killed"]:
            length_s = min(length_s, 8.0)  # right after its start it gives up who has tried twice
        length_s = min(length_s, 30.0)  # it counts its own silence when it waits for others
        if node.paused:
            return
        self._world.ledger.injected["silence"] += 1
        self._trace(f"silence: {node.name} for {length_s:.1f} s")
        self._stop(node, length_s)

    def _stop(self, node: SimProcess, length_s: float) -> None:
        """Stop a process."""
        for one in self._of_process(node):
            self._stop_node(one, length_s)

    def _of_process(self, node: SimProcess) -> Sequence[SimProcess]:
        """Return the nodes of a process: that of a client has two."""
        for client in self._clients:
            beside = (client.node, client.wires.node)
            if node in beside and node.name != CONTROLLER:
                return beside
        return (node,)

    def _stop_node(self, node: SimProcess, length_s: float) -> None:
        world = self._world
        node.paused_until_s = max(node.paused_until_s, world.now_s + length_s)
        for peer in node.network.links:
            other = world.nodes.get(peer)
            if other is not None:
                world.after(HEARTBEAT_S, other.network.probe, node.name)

    def _watched(self, node: SimProcess) -> None:
        for host in self._cluster.hosts:
            if host.node is node and node.paused:
                self._world.ledger.note("hung runtime killed", host.name)
                host.crash(machine=False)
                host.restart_later(0.1)

    def _random_node(self, random: Random) -> SimProcess | None:
        names = [name for name in sorted(self._world.nodes) if name != CONTROLLER]
        return self._world.nodes[random.choice(names)] if names else None

    def _crash(self, random: Random) -> None:
        """The runtime of a host dies; its supervisor starts it again, at once or later."""
        host = random.choice(self._cluster.hosts)
        if host.node is not None:
            self._note("crash", host.name)
            host.crash(machine=False)
            host.restart_later(random.choice((0.1, 1.0, 5.0)) * random.uniform(0.5, 1.5))

    def _stop_supervisor(self, random: Random) -> None:
        """The supervisor of a host stops for a while, and often the runtime beside it dies meanwhile."""
        host = random.choice(self._cluster.hosts)
        if host.node is not None:
            self._note(SUPERVISOR_STOPPED, host.name)
            length_s = random.choice((0.1, 2.0, 8.0, 25.0)) * random.uniform(0.5, 1.5)
            host.stop_supervisor(length_s)
            if random.random() < 0.5:
                self._world.after(length_s * random.random(), self._crash_beside, host)

    def _crash_beside(self, host: SimHost) -> None:
        if host.node is not None and not self._world.calm:
            self._note("crash", host.name)
            host.crash(machine=False)
            host.restart_later(0.1)

    def _crash_machine(self, random: Random) -> None:
        """A machine dies and comes back much later, or only when all faults have ended."""
        host = random.choice(self._cluster.hosts)
        if host.node is not None:
            self._note("machine crash", host.name)
            host.crash(machine=True)
            if random.random() < 0.7:
                host.restart_later(random.uniform(3.0, 20.0))

    def _give_notice(self, random: Random) -> None:
        """A host, all of its island, or all are told to end, and come back later, with what they have left.

        That excuses no error, unless the time for it is too short.
        """
        host = random.choice(self._cluster.hosts)
        island = [one for one in self._cluster.hosts if one.island == host.island]
        ending = random.choice(((host,), (host,), island, self._cluster.hosts))
        within_s = random.choice((0.02, 30.0, 60.0)) * random.uniform(0.5, 1.5)
        back_s = random.choice((0.5, 5.0, 40.0)) * random.uniform(0.5, 1.5)
        for one in ending:
            if one.node is not None and one.back_s is None:
                self._world.ledger.note("notice")
                self._trace(f"notice: {one.name} is to end within {within_s:.2f} s")
                one.tell_to_end(within_s, back_s)

    def _lose_island(self, random: Random) -> None:
        """All machines of an island die, and come back together, when its clients may have given it up."""
        island = random.choice(self._cluster.status() or (None,))
        hosts = [one for one in self._cluster.hosts if island and one.island == island.name]
        if any(host.node is None for host in hosts):
            return
        self._world.ledger.injected["island lost"] += 1
        restart_s = random.choice((4.0, 20.0, 80.0)) * random.uniform(0.5, 1.5)
        for host in hosts:
            self._note("machine crash", host.name)
            host.crash(machine=True)
            host.restart_later(restart_s + random.uniform(0.0, 0.5))

    def _restart_controller(self, random: Random) -> None:
        """The controller dies or stops; hosts and clients go on, and look for the next one."""
        cluster = self._cluster
        if not cluster.node.alive or cluster.node.paused:
            return
        hosts = [host.name for host in cluster.hosts]
        if random.random() < 0.25:  # for less than a client's lease
            self._note("controller stopped", *hosts)
            self._stop(cluster.node, random.choice((0.5, 4.0, 8.0)))
            return
        self._note("controller killed", *hosts)
        cluster.kill_controller()
        pause_s = random.choice((0.01, 0.3, 2.0, 8.0)) * random.uniform(0.5, 1.5)
        self._world.after(pause_s, cluster.restart_controller)

    def _kill_client(self, random: Random) -> None:
        client = random.choice(self._clients)
        if client.node.alive and not client.finished:
            self._note("client killed", client.name)
            client.die()

    def _intrude(self, random: Random) -> None:
        """A client sends each of its peers a message that only hosts or the controller may send."""
        node = random.choice(self._clients).node
        if not node.alive or node.paused:
            return
        self._note("intrusion", node.name)
        cluster = self._cluster
        clients = cluster.controller.sessions.clients
        slices = sorted(number for client in clients for number in client.slices.owned)
        arrays = sorted(number for client in clients for number, _ in client.arrays.all())
        for peer in sorted(node.network.links):
            to, message = _forged(random, peer, cluster.status(), slices, arrays)
            node.network.send(to, Address(node.name, INTRUDER), message)
        node.request_turn()

    def _trespass(self, random: Random) -> None:
        """A client asks for what a client of another tenant has."""
        assert self._trespasses is not None
        self._trespasses.trespass(random, self._clients)

    def _flood(self, random: Random) -> None:
        """A client sends thousands of requests at once to all its peers, or hundreds of programs."""
        flooder = random.choice(self._clients)
        node = flooder.node
        if node.alive and not node.paused:
            if random.random() < 0.5:
                self._note("flood", node.name)
                flood(random, node)
            else:
                self._note("flood of programs", node.name)
                flood_of_programs(random, flooder)
            for client in self._clients:
                if client.node is not node:
                    self._world.after(random.uniform(1e-3, 6e-3), self._call_beside, client)

    def _call_beside(self, client: SimClient) -> None:
        if client.node.alive and not client.closing and not client.final:
            client.fetch()

    # --- the end -------------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all faults: links carry again, dead processes restart, stopped ones go on when they wake."""
        world = self._world
        world.calm = True
        world.blocked.clear()
        world.trace.add((world.now_s, "FAULT", None, "all faults have ended"))
        self._cluster.restart_controller()
        for host in self._cluster.hosts:
            if host.node is None:
                host.restart_later(0.5)


def _forged(
    random: Random,
    peer: str,
    islands: tuple[msg.IslandInfo, ...],
    slices: list[int],
    arrays: list[int],
) -> tuple[Address, object]:
    """Return a message that an intruder forges: of another role than a client's, to an actor of `peer`.

    Args:
        random: chooses.
        peer: a host, or the controller.
        islands: of the cluster.
        slices: of all clients.
        arrays: of all clients.
    """
    if peer != CONTROLLER:
        return Address(peer, "executor"), random.choice(
            (msg.Leave("forged"), msg.HostRejected(_ERROR))
        )
    resources = Address(CONTROLLER, "resources")
    choices: list[tuple[Address, object]] = [
        (resources, msg.RegisterHost("forged", 1, 1, "cpu", "", 0))
    ]
    for island in islands:
        scheduler = scheduler_of(island.name)
        choices += [
            (scheduler, msg.LaunchGap(island.formed, 0, 1)),
            (scheduler, msg.GangBroken(island.formed, "forged")),
            (resources, msg.IslandJoinFailed(island.name, island.formed, _ERROR)),
        ]
    if slices:
        choices.append((resources, msg.ReleaseSlice(random.choice(slices))))
    if arrays:
        choices.append(
            (Address(CONTROLLER, "controller"), msg.ArraysLost((random.choice(arrays),)))
        )
    return random.choice(choices)
