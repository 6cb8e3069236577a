"""What must hold at every step, whatever goes wrong.

| monitor | what it watches |
|---|---|
| G1 | any two gangs reach all hosts that they share in the same order (launches here, meetings in `gangs`) |
| G4 | nothing is launched before the producers of its remote inputs |
| once | no segment is launched twice on a host in one epoch |
| epochs | a host takes no launch of another epoch than its own |
| epochs last | no island leaves its epoch unless something was injected |
| credits | a client gets back what it has spent, no more, and in the end no less (in `workload`) |
| values | read before made, made twice, wrong parts (in `devices`) |
| memory | devices with little memory never hold much more than they have (in `devices`) |
| oracle | every answer is right, or an error that a fault excuses (in `oracle`, `workload`) |
| census | a client that has deleted all it had holds nothing; when all have gone, nothing is held anywhere |
| liveness | when faults have stopped, everything asked for is answered and all islands are formed |

G1 at launch and G4 together keep the wait-for graph without circles: launches are numbered across all
islands, and whatever a launch waits for (the launch before it on each of its hosts, the producers of its
inputs) has a smaller number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from pw.core.ids import Address
from pw.core.messages import CANCELLED, IslandLost, Launch, Run, RunsSettled, Submit
from pw.devices.executor import HostExecutor
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.world import Violation


class Monitors:
    """Watches the messages of a world."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._depends: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
        self._gangs: dict[tuple[int, int], tuple[str, ...]] = {}
        self._launched: dict[tuple[int, int], int] = {}
        """Serial number of each segment's launch."""
        self._on_hosts: dict[tuple[str, int], list[int]] = {}
        self._seen: set[tuple[str, int, int, int]] = set()
        self._spent: Counter[str] = Counter()
        self._settled: Counter[str] = Counter()
        world.watch_sent(Submit, self._submitted)
        world.watch_sent(Launch, self._launching)
        world.watch_handled(Launch, self._launch_arrived)
        world.watch_sent(Run, self._run_sent)
        world.watch_sent(RunsSettled, self._credits_back)
        world.watch_sent(IslandLost, self._island_lost)

    # --- launches ------------------------------------------------------------------------------------

    def _submitted(self, sender: Address, to: Address, message: Submit) -> None:
        for index, segment in enumerate(message.segments):
            self._depends[message.run, segment] = message.depends[index]
            self._gangs[message.run, segment] = message.hosts[index]

    def _launching(self, sender: Address, to: Address, message: Launch) -> None:
        """A launch leaves the scheduler."""
        if message.segment == CANCELLED:
            return
        world, key = self._world, (message.run, message.segment)
        world.checked["G4"] += 1
        serial = self._launched.get(key)
        if serial is None:
            serial = self._launched[key] = len(self._launched) + 1
            for island, producer in self._depends.get(key, ()):
                if (message.run, producer) not in self._launched:
                    raise Violation(
                        "G4",
                        f"segment {message.segment} of run {message.run:x} was launched on "
                        f"{to.node} before segment {producer} on {island}",
                    )
        order = self._on_hosts.setdefault((to.node, message.epoch), [])
        if order and order[-1] > serial:
            raise Violation("G1", f"launch order on {to.node}: {order[-1]} before {serial}")
        order.append(serial)

    def _launch_arrived(
        self, sender: Address, to: Address, message: Launch
    ) -> Callable[[], None] | None:
        """A launch comes to its host."""
        node = self._world.nodes[to.node]
        executor: Any = node.actors.get(to.actor)
        if not isinstance(executor, HostExecutor) or executor._broken:
            return None
        if message.epoch != executor._epoch:
            return partial(self._not_taken, executor, executor._expected)
        if message.segment == CANCELLED or message.sequence != executor._expected:
            return None
        self._world.checked["once"] += 1
        seen = (f"{to.node}#{node.incarnation}", message.epoch, message.run, message.segment)
        if seen in self._seen:
            what = f"segment {message.segment} of run {message.run:x} twice on {to.node}"
            raise Violation("once", what)
        self._seen.add(seen)
        gang = self._gangs.get((message.run, message.segment))
        if gang is not None and to.node not in gang:
            raise Violation("gangs", f"{to.node} got a launch of {', '.join(gang)}")
        return None

    def _not_taken(self, executor: Any, expected: int) -> None:
        if executor._expected != expected and not executor._broken:
            raise Violation("epochs", f"{executor._host} took a launch of another epoch")

    # --- credits -------------------------------------------------------------------------------------

    def _run_sent(self, sender: Address, to: Address, message: Run) -> None:
        self._spent[sender.node] += 1

    def _credits_back(self, sender: Address, to: Address, message: RunsSettled) -> None:
        self._settled[to.node] += message.count
        if self._settled[to.node] > self._spent[to.node]:
            raise Violation("credits", f"{to.node} got more back than it has spent")

    # --- epochs --------------------------------------------------------------------------------------

    def _island_lost(self, sender: Address, to: Address, message: IslandLost) -> None:
        """An epoch ends; whatever was there has been touched by what ended it."""
        ledger = self._world.ledger
        if not ledger.any:
            raise Violation("epochs last", f"{message.error.message}, and nothing was injected")
        ledger.touch(*self._cluster.hosts_of(message.island))

    # --- the end -------------------------------------------------------------------------------------

    def check_census(self) -> None:
        """Nothing is left."""
        self._world.checked["census"] += 1
        held = self._cluster.census()
        if held:
            what = ", ".join(f"{name}: {count}" for name, count in sorted(held.items()))
            raise Violation("census", f"held when all clients have gone: {what}")
