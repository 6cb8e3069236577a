"""Monitors: the promises that hold at every step, under all faults.

| monitor | promise |
|---|---|
| G1 | any two gangs reach all hosts that they share in the same order (launches here, meetings in `gangs`) |
| G4 | nothing is launched before the producers of its remote inputs |
| once | no segment is launched twice on a host in one epoch |
| waits | the queued launch that `pw why --queue` has first is the first to go there (in `waits`) |
| leases | one numbers the launches of a host at a time; all hosts of a lease take the same (`leasing`) |
| epochs | a host takes no launch of another epoch than its own |
| repeats | no run is repeated unless something was injected |
| epochs last | no island leaves its epoch unless something was injected |
| credits | a client gets back the credits of its runs, no more, and in the end no less (in `workload`) |
| values | read before made, made twice, wrong parts (in `devices`) |
| kept | a host reports only replicas that its next runtime would find after a crash; whole arrays are counted |
| survives | the arrays of an answered checkpoint would survive a crash of all runtimes now |
| prompt | a host answers questions about ready values soon, whatever it computes |
| fair | a peer's message waits for its turn no longer because others flood (in `floods`) |
| program order | a host computes the parts of a run in the order of its program, as a schedule may ask |
| named hosts | a slice that names hosts has as many devices of each, and of no other, whatever is lost |
| shapes | blocks are contiguous, exclusive slices share no device, what fits is not refused (in `shapes`) |
| start | while the cluster starts, requests for devices are not refused; none waits if its island is ready |
| memory | devices never hold much more than their memory (in `shards`); in the end schedulers count none;
|  | no run is refused for which arrays could have left the devices (in `memory_monitor`) |
| files | what counts as in files is there on all hosts, and the rest in host memory (in `memory_monitor`) |
| views | a view takes no memory at its scheduler; a shard of two arrays is not donated (in `shards`) |
| others go on | what waits for an island that is away needs it (in `away`) |
| given up | an island is given up when its client's time is over, and not before (in `away`) |
| events | each client, run and recovery that was published has one end, islands alternate (in `events`) |
| watches | a client that watches islands hears each change once, and knows all in the end (in `watching`) |
| timelines | a timeline has all that was recorded, or says why not; none outlives its client (in `timelines`) |
| clocks | two clocks differ as a timeline says, within its error (in `timelines`) |
| tenants | a client gets and sees nothing of another tenant, nor its number (in `trespasses`) |
| shares | clients that always have work get their parts of device time (in `tenants`, `many`) |
| deadlines | requests at 0.9 of what a client's share pays for are answered in time (in `many`) |
| starvation | a client that has work makes progress (in `many`) |
| stragglers | the slow host is named, soon and with its cause, and no other one (in `stragglers`) |
| suspended | a suspended client launches nothing, and has nothing on devices (in `suspending`) |
| compiled ahead | a client moves when its programs are compiled at its new place (in `migrating`) |
| copies ahead | nothing that was copied for a move is left after it (in `migrating`) |
| moves | moves that are planned make room, with the fewest bytes (in `rebalancing`) |
| run once | a suspension has nothing run again (in `suspending`) |
| sick | what is said to have failed is sick, what passes is well (in `sick`) |
| left out | no computation runs on a device that its island goes on without (in `sick`) |
| sick in the end | the controller says of each host what the last test there has shown (in `sick`) |
| quotas | no tenant has more than it may have (in `quotas`, and on devices in `memory_bounds`) |
| bounds | no slice has more bytes on a device than it may have (in `memory_bounds`) |
| ledger | what a tenant has is what is counted; nothing stays counted after all have left (in `quotas`) |
| accounts | all device time is in accounts once, and controllers go on from them (in `accounts`) |
| replicas | hosts give and take replicas as the controller says, and believe no other host (in `rogues`) |
| oracle | every answer is right, or an error that a fault excuses (in `oracle`, `workload`) |
| census | hosts hold nothing of a client that has deleted all; no actor holds anything when all have left |
| liveness | when faults have stopped, all requests are answered and all islands are formed |

G1 at launch and G4 together keep the wait-for graph without circles: launches are numbered across
all islands, and a launch waits only for smaller numbers (the launch before it on each host, the
producers of its inputs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from pw.core import messages as msg
from pw.core.ids import CONTROLLER, RESOURCES, Address
from pw.core.programs.guards import is_skipped
from pw.core.programs.plan import Execute
from pw.core.sharding import Box
from pw.core.waits import CLUSTER_START_S
from pw.devices.host.store import ObjectStore
from pw.testing.sim.away import AwayMonitor
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost
from pw.testing.sim.leasing import LeaseMonitor
from pw.testing.sim.memory_bounds import MemoryBoundsMonitor
from pw.testing.sim.memory_monitor import counted_bytes, watch_memory
from pw.testing.sim.migrating import MigrationMonitor
from pw.testing.sim.quotas import QuotaMonitor
from pw.testing.sim.rebalancing import RebalancingMonitor
from pw.testing.sim.shapes import ShapeMonitor
from pw.testing.sim.sick import SickMonitor
from pw.testing.sim.suspending import SuspensionMonitor
from pw.testing.sim.timelines import check_idle, watch_launches
from pw.testing.sim.waits import WaitMonitor
from pw.testing.sim.world import SimProcess, Violation

PROMPT_S = 2e-3
"""Seconds within which a host answers: a busy one has some hundred messages to handle first."""


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
        watch_launches(cluster)
        LeaseMonitor(cluster)
        AwayMonitor(cluster)
        QuotaMonitor(cluster)
        WaitMonitor(cluster)
        self._bounds = MemoryBoundsMonitor(cluster)
        ShapeMonitor(cluster)
        SuspensionMonitor(cluster)
        MigrationMonitor(cluster)
        RebalancingMonitor(cluster)
        self._sick = SickMonitor(cluster)
        world.watch_sent(msg.Submit, self._submitted)
        world.watch_sent(msg.Launch, self._launching)
        world.watch_sent(msg.GangOrder, self._all_launching)
        cluster.on_start["host"].append(self._watch_launches)
        world.watch_handled(msg.Wait, self._asked)
        world.watch_handled(msg.Fetch, self._asked)
        world.watch_sent(msg.Run, self._run_sent)
        world.watch_sent(msg.RunsSettled, self._credits_back)
        world.watch_sent(msg.EpochEnded, self._island_lost)
        world.watch_sent(msg.ClientsLeft, self._clients_left)
        world.watch_handled(msg.IslandFormed, self._island_formed)
        self._checkpoints: dict[tuple[str, int], tuple[int, ...]] = {}
        self._emptied: set[str] = set()
        """Names of hosts that had to end, and whose clients have left their islands."""
        world.watch_sent(msg.Holdings, self._told_of_copies)
        world.watch_handled(msg.Holdings, self._counted)
        world.watch_sent(msg.Checkpoint, self._checkpoint_asked)
        world.watch_sent(msg.Answered, self._answered)
        self._slices: dict[int, msg.AllocateSlice] = {}
        self._asked_s: dict[int, float] = {}
        """Time at which each slice was last asked for, of which controller, in seconds of the world."""
        world.watch_sent(msg.AllocateSlice, self._asked_for)
        world.watch_sent(msg.SliceBound, self._bound)
        world.watch_sent(msg.SliceRefused, self._refused)
        cluster.on_start["host"].append(self._watch_order)
        self._ran: dict[tuple[int, int, int], bool] = {}
        """True if the computation that makes a slot of a run was enqueued, false if it was skipped."""
        cluster.on_start["host"].append(self._watch_guards)

    # --- launches ------------------------------------------------------------------------------------

    def _submitted(self, sender: Address, to: Address, message: msg.Submit) -> None:
        for index, segment in enumerate(message.segments):
            self._depends[message.run, segment] = message.depends[index]
            self._gangs[message.run, segment] = message.hosts[index]

    def _launching(self, sender: Address, to: Address, message: msg.Launch) -> None:
        """A launch leaves the scheduler."""
        if message.segment != msg.CANCELLED:
            self._launched_on(to.node, message)

    def _all_launching(self, sender: Address, to: Address, message: msg.GangOrder) -> None:
        """A launch of a large gang leaves the scheduler."""
        launch = message.order
        for host in self._cluster.receivers(sender, to, message):
            self._world.checked["trees"] += 1
            if isinstance(launch, msg.Launch) and launch.segment != msg.CANCELLED:
                self._launched_on(host, launch)

    def _launched_on(self, host: str, message: msg.Launch) -> None:
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
                        f"{host} before segment {producer} on {island}",
                    )
        order = self._on_hosts.setdefault((host, message.epoch), [])
        if order and order[-1] > serial:
            raise Violation("G1", f"launch order on {host}: {order[-1]} before {serial}")
        order.append(serial)

    def _watch_launches(self, host: SimHost) -> None:
        """Look at each launch that a new incarnation of a host takes."""
        executor: Any = host.executor
        executor._do = partial(self._taken_by, host, executor._do)

    def _taken_by(self, host: SimHost, do: Any, message: msg.Launch) -> None:
        """A host takes a launch of the scheduler."""
        assert host.node is not None
        name = host.name
        if message.epoch != host.executor.order.epoch:
            raise Violation("epochs", f"{name} takes a launch of another epoch")
        if message.segment != msg.CANCELLED:
            self._world.checked["once"] += 1
            key = (message.run, message.segment)
            seen = (f"{name}#{host.node.incarnation}", message.epoch, *key)
            if seen in self._seen:
                words = f"segment {message.segment} of run {message.run:x} twice on {name}"
                raise Violation("once", words)
            self._seen.add(seen)
            gang = self._gangs.get(key)
            if gang is not None and name not in gang:
                raise Violation("gangs", f"{name} got a launch of {', '.join(gang)}")
        do(message)

    def _watch_order(self, host: SimHost) -> None:
        """Look at each computation that a new incarnation of a host enqueues."""
        interpreter: Any = host.executor.interpreter
        execute = interpreter._execute
        last: dict[tuple[int, Any], int] = {}

        def watched(launch: Any, instruction: Execute) -> bool:
            done = bool(execute(launch, instruction))
            if done and instruction.results:
                # Slots are numbered in program order.
                run, slot = (launch.run, instruction.results[0])
                key = run.run, run.began
                before = last.get(key, -1)
                self._world.checked["program order"] += 1
                if slot < before:
                    what = f"{host.name} computes slot {slot} of run {run.run:x} after {before}"
                    raise Violation("program order", what)
                last[key] = slot
            return done

        interpreter._execute = watched

    def _watch_guards(self, host: SimHost) -> None:
        """See that all hosts of a gang skip alike."""
        guards: Any = host.executor.interpreter.guards
        go = guards.go

        def watched(launch: Any, instruction: Execute) -> bool:
            done = bool(go(launch, instruction))
            run = launch.run
            computation = run.program.body.computations[instruction.computation]
            if not done or not instruction.results or computation.traits.predicates:
                return done
            error = run.slots[instruction.results[0]].error
            if error is None or is_skipped(error):
                self._world.checked["branches"] += 1
                # An epoch whose predicate failed skips nothing, and the next one may have its value.
                key = host.executor.order.epoch, run.run, instruction.results[0]
                first = self._ran.setdefault(key, error is None)
                if first is not (error is None):
                    what = f"{computation.name!r} of run {run.run:x}"
                    raise Violation("G1", f"{host.name} and another host do not skip {what} alike")
            return done

        guards.go = watched

    # --- answers -------------------------------------------------------------------------------------

    def _asked(
        self, sender: Address, to: Address, message: msg.Wait | msg.Fetch
    ) -> Callable[[], None] | None:
        """A client asks a host about arrays; the promise does not cover the bulk plane."""
        node = self._world.nodes[to.node]
        store = node.unwatched.get(to.actor)
        arrays = message.arrays if isinstance(message, msg.Wait) else (message.array,)
        if not isinstance(store, ObjectStore) or getattr(message, "landing", None) is not None:
            return None
        entries = [store.arrays.get(array) for array in arrays]
        values = [entry.value for entry in entries if entry is not None and entry.submitted]
        if sender.node in self._world.floods:
            return None  # it waits behind its own messages
        ready = [v for v in values if v.payload is not None and v.error is None]
        if len(ready) < len(arrays) or any(value.building is not None for value in ready):
            return None
        return partial(self._promise, node, store, (sender.node, message.request))

    def _promise(self, node: SimProcess, store: Any, key: tuple[str, int]) -> None:
        request = store.requests.find(*key)
        if request is not None:
            within_s = PROMPT_S * node.slowness
            args = node, store, key, request, self._world.now_s
            self._world.after(within_s, self._check_answered, *args)

    def _check_answered(
        self, node: SimProcess, store: Any, key: tuple[str, int], request: Any, asked_s: float
    ) -> None:
        self._world.checked["prompt"] += 1
        if node.alive and node.paused_until_s < asked_s and store.requests.find(*key) is request:
            what = (
                f"{node.name} has not answered {key[0]} about arrays that were ready at {asked_s}"
            )
            raise Violation("prompt", what)

    # --- credits -------------------------------------------------------------------------------------

    def _run_sent(self, sender: Address, to: Address, message: msg.Run) -> None:
        self._spent[sender.node] += 1

    def _credits_back(self, sender: Address, to: Address, message: msg.RunsSettled) -> None:
        self._settled[to.node] += message.count
        if self._settled[to.node] > self._spent[to.node]:
            raise Violation("credits", f"{to.node} got more back than it has spent")

    # --- copies --------------------------------------------------------------------------------------

    def _told_of_copies(self, sender: Address, to: Address, message: msg.Holdings) -> None:
        kept = self._kept(sender.node)
        for holding in message.holdings:
            for box in holding.boxes:
                self._world.checked["kept"] += 1
                if (holding.array, box) not in kept:
                    what = f"a copy of {holding.array:x} that a crash would take away"
                    raise Violation("kept", f"{sender.node} told of {what}")

    def _counted(self, sender: Address, to: Address, message: msg.Holdings) -> Callable[[], None]:
        """The controller counts replicas: an array has them when each of its boxes has one."""

        def check() -> None:
            control, hosts = self._cluster.controller, self._cluster.hosts
            for array in {holding.array for holding in message.holdings}:
                client = control.sessions.owner(array)
                origin = client.lineage.origins.get(array) if client else None
                if origin is None or not origin.replicated:
                    continue
                for box, _ in origin.spec.distinct_boxes():
                    self._world.checked["boxes"] += 1
                    if not any(control.replicas.has(host.name, array, box) for host in hosts):
                        what = f"{array:x} counts as replicated, and no host has its box {box}"
                        raise Violation("kept", what)

        return check

    def _kept(self, *names: str) -> set[tuple[int, Box]]:
        """Return the replicas of the supervisors of these hosts, or of all."""
        hosts = [host for host in self._cluster.hosts if not names or host.name in names]
        return {(one.array, one.box) for host in hosts for one in host.replicas}

    def _checkpoint_asked(self, sender: Address, to: Address, message: msg.Checkpoint) -> None:
        self._checkpoints[sender.node, message.request] = message.arrays

    def _answered(self, sender: Address, to: Address, message: msg.Answered) -> None:
        arrays = self._checkpoints.pop((to.node, message.request), ())
        if message.error is not None or self._world.ledger.injected["machine crash"]:
            return
        kept = self._kept()
        for array in arrays:
            client = self._cluster.controller.sessions.owner(array)
            origin = client.lineage.origins.get(array) if client else None
            for box, _ in origin.spec.distinct_boxes() if origin else ():
                self._world.checked["survives"] += 1
                if (array, box) not in kept:
                    what = f"{array:x}, which a crash of all runtimes would take away"
                    raise Violation("survives", f"a checkpoint was answered for {what}")

    # --- epochs --------------------------------------------------------------------------------------

    def _clients_left(self, sender: Address, to: Address, message: msg.ClientsLeft) -> None:
        """A host ends: the clients of its island have left."""
        self._emptied.add(message.node)
        island = self._cluster.resources.inventory.island_of(message.node)
        suspensions = self._cluster.controller.suspensions
        for client in suspensions.leaving.values():
            self._world.checked["left before"] += 1
            if island is not None and island.name in suspensions.islands_of(client):
                words = f"{message.node} ends before {client.name} has left {island.name}"
                raise Violation("suspended", words)

    def _island_lost(self, sender: Address, to: Address, message: msg.EpochEnded) -> None:
        """An epoch ends: its fault has touched all hosts of the island."""
        ledger = self._world.ledger
        if not ledger.any:
            raise Violation("epochs last", f"{message.error.message}, and nothing was injected")
        if any(message.error.message.endswith(f"host {node} is drained") for node in self._emptied):
            return  # clients have left the island before, so they lose nothing with it
        ledger.touch(*self._cluster.hosts_of(message.island))

    # --- slices --------------------------------------------------------------------------------------

    def _asked_for(self, sender: Address, to: Address, message: msg.AllocateSlice) -> None:
        if to.node == CONTROLLER:
            self._slices[message.slice] = message
            self._asked_s[message.slice] = self._world.now_s

    def _check_parked(self) -> None:
        """When an island is ready, a slice waits only for hosts that it does not have."""
        resources = self._cluster.resources
        for piece in resources.slices.parked:
            request = piece.request
            if request.topology is not None or request.memory_bytes or self._world.profile.shapes:
                continue  # the monitor of shapes looks at it
            names, home = set(request.hosts), request.formerly
            for island in resources.inventory.islands.values():
                if island.state != "ready" or request.like or request.apart:
                    continue
                allowed = request.island in (None, island.name) and home in ("", island.name)
                well = [at for at in island.positions() if not island.has_failed(at)]
                hosts = {island.ranks[rank] for rank, _ in well}
                is_there = names <= hosts and request.devices <= len(well)
                if allowed and is_there:
                    monitor = "named hosts" if names else "start"
                    raise Violation(
                        monitor, f"slice {request.slice} waits, and its devices are there"
                    )
                if names and piece.island == island.name:
                    self._world.ledger.injected["named host replaced"] += 1

    def _refused(self, sender: Address, to: Address, message: msg.SliceRefused) -> None:
        """While islands have yet to form for the first time, a request waits for them."""
        cluster, world = self._cluster, self._world
        request = self._slices.get(message.slice)
        if sender != RESOURCES or request is None or request.resumed:
            return
        members = {
            host for one in cluster.resources.inventory.islands.values() for host in one.ranks
        }
        if not members.issuperset(request.hosts):  # a slice that was given back is asked for again
            world.ledger.injected["named host replaced"] += 1
        if message.slice not in self._asked_s:
            return  # it had devices, and has lost them
        formed = sum(island.formed > 0 for island in cluster.status())
        waited_s = world.now_s - self._asked_s[message.slice]
        world.checked["start"] += 1
        if formed < cluster.expected_islands and waited_s < CLUSTER_START_S:
            raise Violation(
                "start",
                f"slice {message.slice} is refused after {waited_s:g} s, and {formed} of "
                f"{cluster.expected_islands} islands have formed",
            )

    def _bound(self, sender: Address, to: Address, message: msg.SliceBound) -> None:
        """A slice has devices: of the hosts that it names, in their order."""
        self._asked_s.pop(message.slice, None)
        request = self._slices.get(message.slice)
        if request is None or not request.hosts:
            return
        self._world.checked["named hosts"] += 1
        each = request.devices // len(request.hosts)
        hosts = [device.host for device in message.devices]
        if hosts != [host for host in request.hosts for _ in range(each)]:
            raise Violation(
                "named hosts",
                f"slice {message.slice} is bound to {', '.join(hosts)}, and names "
                f"{', '.join(request.hosts)}",
            )

    # --- memory --------------------------------------------------------------------------------------

    def _island_formed(
        self, sender: Address, to: Address, message: msg.IslandFormed
    ) -> Callable[[], None]:
        if not to.actor.startswith("scheduler"):
            return self._check_parked

        def formed() -> None:
            watch_memory(self._cluster, to.actor.partition("/")[2])
            self._bounds.watch(to.actor.partition("/")[2])

        return formed

    # --- the end -------------------------------------------------------------------------------------

    def check_repeats(self) -> None:
        """Check that no run was repeated unless something was injected.

        Or unless an offer has waited for long: its arrays may be deleted, and taken after that. Queued runs of
        a client that was suspended are run as repeated ones (`suspending` looks that they run once).
        """
        counters = self._cluster.node.counters
        may_repeat = counters["offers_unguarded"] or counters["suspensions"]
        if not self._world.ledger.any and not may_repeat:
            self._world.checked["repeats"] += 1
            if repeated := counters["runs_repeated"]:
                raise Violation(
                    "repeats", f"{repeated} runs were repeated, and nothing was injected"
                )

    def check_census(self) -> None:
        """Raise Violation if an actor still holds anything."""
        self._world.checked["census"] += 1
        for island, scheduler in self._cluster.schedulers.items():
            memory = scheduler.admission.memory
            if memory is not None and counted_bytes(memory):
                raise Violation(
                    "memory", f"{island} counts {counted_bytes(memory)} bytes in the end"
                )
        if self._cluster.events is not None:
            self._cluster.events.check_end(
                {c.number for c in self._cluster.controller.sessions.clients}
            )
        self._cluster.accounts.check_end()
        self._sick.check_end()
        check_idle(self._world)
        held = self._cluster.census()
        if held:
            what = ", ".join(f"{name}: {count}" for name, count in sorted(held.items()))
            raise Violation("census", f"held when all clients have gone: {what}")
