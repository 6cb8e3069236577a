"""Mutations: deliberate bugs that the simulator must find.

Each breaks one promise of one actor from outside: it changes a message on its way, or a handler of an actor.
The simulator must find it within a few seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any

from msgspec.structs import replace

from pw.core.actors.actor import Actor
from pw.core.ids import CONTROLLER, Address
from pw.core.messages import (
    Attach,
    Compiled,
    Discard,
    EdgeCredit,
    EdgeData,
    EdgeFailed,
    Fetched,
    GangBroken,
    Launch,
    LeaveIsland,
    PeerLost,
    Resumed,
    Run,
    RunsSettled,
    SliceBound,
    Submit,
    UploadAgain,
)
from pw.core.programs.guards import is_skipped
from pw.devices.host import backend as ops
from pw.devices.host.replica_memory import Replica
from pw.sched.island.scheduler import IslandScheduler
from pw.testing.sim import (  # they register their own
    mutations_of_branches,  # noqa: F401
    mutations_of_compilers,  # noqa: F401
    mutations_of_floods,  # noqa: F401
    mutations_of_moves,  # noqa: F401
    mutations_of_pipelines,  # noqa: F401
    mutations_of_ragged,  # noqa: F401
    mutations_of_reductions,  # noqa: F401
    mutations_of_slices,  # noqa: F401
    mutations_of_streams,  # noqa: F401
    mutations_of_tenants,  # noqa: F401
    mutations_of_timelines,  # noqa: F401
    mutations_of_views,  # noqa: F401
)
from pw.testing.sim.breaking import MUTATIONS, Mutation, mutation, rehandle, tamper
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost

__all__ = ["MUTATIONS", "Mutation"]

# --- events ------------------------------------------------------------------------------------------


@mutation("publish-no-lost-runs", "events", "events")
def _silent(cluster: SimCluster) -> None:
    """The controller publishes no end of the runs that a host took with it."""
    runs: Any = cluster.controller.runs
    publish = runs.publish

    def forgetful() -> None:
        runs._news = [news for news in runs._news if news[0] != "lost"]
        publish()

    runs.publish = forgetful


@mutation("publish-recoveries-without-end", "events", "events")
def _restless(cluster: SimCluster) -> None:
    """A client that leaves while it recovers does so for ever."""
    publishing: Any = cluster.controller._publishing
    publishing.client_left = lambda client: None


# --- gang scheduling ---------------------------------------------------------------------------------


@mutation("reorder-launches", "calm", "G1", "liveness")
def _reorder(cluster: SimCluster) -> None:
    """Two launches reach one host of a gang in the opposite order."""
    held: dict[str, Launch] = {}

    def alter(random: Random, to: Address, message: Launch) -> list[Any] | None:
        first = held.pop(to.node, None)
        if first is not None:
            return [
                replace(message, sequence=first.sequence),
                replace(first, sequence=message.sequence),
            ]
        if message.arguments is not None and message.last and random.random() < 0.05:
            held[to.node] = message
            return []
        return None

    tamper(cluster, Launch, alter)


@mutation("duplicate-launch", "calm", "once")
def _duplicate(cluster: SimCluster) -> None:
    """A host gets one launch twice, under two numbers."""
    shift: dict[tuple[str, int], int] = {}

    def alter(random: Random, to: Address, message: Launch | Discard) -> list[Any] | None:
        key = (to.node, message.epoch)
        moved = replace(message, sequence=message.sequence + shift.get(key, 0))
        if isinstance(message, Launch) and key not in shift and random.random() < 0.2:
            shift[key] = 1
            return [moved, replace(moved, sequence=moved.sequence + 1)]
        return [moved]

    tamper(cluster, Launch | Discard, alter)  # type: ignore[arg-type]


@mutation("launch-before-producers", "calm", "G4")
def _unordered(cluster: SimCluster) -> None:
    """A segment is launched before the segments that make its inputs (G4)."""

    def spawned(actor: Actor) -> None:
        def wrap(handler: Callable[..., None]) -> Any:
            def submit(sender: Address, message: Submit) -> None:
                nothing: tuple[tuple[tuple[str, int], ...], ...] = tuple(
                    () for _ in message.depends
                )
                handler(sender, replace(message, depends=nothing))

            return submit

        rehandle(actor, Submit, wrap)

    cluster.on_spawn.append(spawned)


@mutation("forget-to-wait-for-an-upload", "calm", "values are made before they are used", "oracle")
def _impatient(cluster: SimCluster) -> None:
    """A run is launched before its arguments have arrived."""

    def spawned(actor: Actor) -> None:
        def wrap(handler: Callable[..., None]) -> Any:
            return lambda sender, message: handler(sender, replace(message, awaits=()))

        rehandle(actor, Submit, wrap)

    cluster.on_spawn.append(spawned)


@mutation("ignore-an-epoch", "crashes", "epochs")
def _timeless(cluster: SimCluster) -> None:
    """A host takes a launch that was meant for its island's last epoch."""
    replay_launches(cluster)

    def careless(host: SimHost) -> None:
        executor: Any = host.executor
        order = executor.order
        take = order.take
        order.take = lambda epoch, *rest: take(order.epoch, *rest)

    cluster.alterations.append(careless)


def replay_launches(cluster: SimCluster) -> None:
    """When a host gets its first launch of an epoch, have it get its first one of the last epoch before."""
    first: dict[str, tuple[Address, Launch]] = {}

    def alter(random: Random, to: Address, message: Launch) -> list[Any] | None:
        sender = Address(CONTROLLER, f"scheduler/{to.node.rpartition('-')[0]}")
        old = first.get(to.node)
        if old is None or old[1].epoch < message.epoch:
            first[to.node] = (sender, message)
            node = cluster.world.nodes.get(to.node)
            if old is not None and node is not None:
                node.post(to.actor, old[1], old[0])
        return None

    tamper(cluster, Launch, alter)


@mutation("gangs-pass-gangs", "slow", "G1", "liveness")
def _unruly(cluster: SimCluster) -> None:
    """A gang of one client passes another's that waits for an input on this host."""

    def careless(host: SimHost) -> None:
        lanes: Any = host.executor.interpreter.lanes
        put = lanes.put
        lanes.put = lambda client, work, together=False: put(client, work)

    cluster.alterations.append(careless)


@mutation("work-passes-work", "calm", "values are made before they are used", "oracle")
def _no_lanes(cluster: SimCluster) -> None:
    """Work of a client passes its earlier work, which waits for an input on this host."""

    def careless(host: SimHost) -> None:
        lanes: Any = host.executor.interpreter.lanes
        put, serial = lanes.put, count()
        lanes.put = lambda client, work, together=False: put(next(serial), work, together)

    cluster.alterations.append(careless)


@mutation("gang-not-broken", "devices", "liveness", "G1")
def _brave(cluster: SimCluster) -> None:
    """A host that has lost an input of its gang is not heard."""
    tamper(cluster, GangBroken, lambda random, to, message: [])


@mutation("lose-leave", "crashes", "liveness")
def _stay(cluster: SimCluster) -> None:
    """A host is not told that its island's epoch is over."""
    tamper(cluster, LeaveIsland, lambda random, to, message: [])


# --- data --------------------------------------------------------------------------------------------


@mutation("drop-handshake", "calm", "liveness")
def _no_credit(cluster: SimCluster) -> None:
    """A sender is not told where the bytes of an edge go."""
    tamper(cluster, EdgeCredit, lambda random, to, message: [] if random.random() < 0.3 else None)


@mutation("cross-edges", "calm", "oracle", "replicas are equal")
def _cross(cluster: SimCluster) -> None:
    """An edge brings what another edge should have brought."""
    last: dict[int, bytes] = {}

    def alter(random: Random, to: Address, message: EdgeData) -> list[Any] | None:
        data = last.get(len(message.data), message.data)
        last[len(message.data)] = message.data
        return [replace(message, data=data)] if random.random() < 0.1 else None

    tamper(cluster, EdgeData, alter)


@mutation("lose-poison", "calm", "liveness", "oracle")
def _no_poison(cluster: SimCluster) -> None:
    """A receiver is not told that its sender has failed."""

    def alter(random: Random, to: Address, message: EdgeFailed) -> list[Any] | None:
        return None if is_skipped(message.error) else []

    tamper(cluster, EdgeFailed, alter)


@mutation("wrong-client", "calm", "oracle")
def _mixed_up(cluster: SimCluster) -> None:
    """A client gets what another client has asked for."""
    last: dict[int, tuple[str, bytes]] = {}

    def alter(random: Random, to: Address, message: Fetched) -> list[Any] | None:
        node, data = last.get(len(message.data), (to.node, message.data))
        last[len(message.data)] = (to.node, message.data)
        return [replace(message, data=data)] if node != to.node else None

    tamper(cluster, Fetched, alter)


@mutation("stale-binding", "crashes", "oracle", "liveness")
def _stale(cluster: SimCluster) -> None:
    """After an island is formed again, a client looks for its arrays on the wrong hosts."""
    seen: set[int] = set()

    def alter(random: Random, to: Address, message: SliceBound) -> list[Any] | None:
        if to.node == CONTROLLER:
            return None
        again = message.slice in seen
        seen.add(message.slice)
        return [replace(message, devices=message.devices[::-1])] if again else None

    tamper(cluster, SliceBound, alter)


@mutation("lose-upload-again", "crashes", "liveness")
def _no_second_time(cluster: SimCluster) -> None:
    """A client is not asked for an input that was lost."""
    tamper(cluster, UploadAgain, lambda random, to, message: [])


@mutation("spoil-replicas", "crashes", "oracle", "replicas are equal")
def _spoil(cluster: SimCluster) -> None:
    """A host hands over other bytes than its devices had."""

    def careless(host: SimHost) -> None:
        def hand_over(replicas: Iterable[Replica]) -> None:
            SimHost.hand_over(host, [one._replace(data=one.data[::-1]) for one in replicas])

        setattr(host, "hand_over", hand_over)  # noqa: B010  (a method of one object)

    cluster.alterations.append(careless)


@mutation("answer-before-it-is-kept", "crashes", "kept", "survives")
def _rash(cluster: SimCluster) -> None:
    """A checkpoint is answered before the supervisors have taken the copies."""

    def careless(host: SimHost) -> None:
        keep = host.keep

        def told_at_once(replicas: Sequence[Replica], kept: Callable[[Any], None]) -> None:
            kept(None)
            keep(replicas, lambda error: None)

        setattr(host.store.replicas.memory, "_keep", told_at_once)  # noqa: B010

    cluster.alterations.append(careless)


@mutation("questions-stand-in-line", "slow", "prompt")
def _in_line(cluster: SimCluster) -> None:
    """A host answers questions about values when it has computed all that it was told to before."""

    def careless(host: SimHost) -> None:
        backend: Any = host.backend
        submit = backend.submit

        def in_line(batch: Sequence[ops.Op]) -> None:
            submit(
                [
                    ops.Call(partial(submit, [op])) if isinstance(op, ops.Watch | ops.Read) else op
                    for op in batch
                ]
            )

        backend.submit = in_line

    cluster.alterations.append(careless)


# --- releases ----------------------------------------------------------------------------------------


@mutation("skip-free", "calm", "census")
def _hoard(cluster: SimCluster) -> None:
    """Hosts keep arrays that their clients have deleted."""

    def alter(random: Random, to: Address, message: Discard) -> list[Any] | None:
        return [replace(message, arrays=message.arrays[1:])]

    tamper(cluster, Discard, alter)


@mutation("lose-a-discard", "calm", "epochs last")
def _no_discard(cluster: SimCluster) -> None:
    """A host never hears that it may drop something."""
    tamper(cluster, Discard, lambda random, to, message: [] if random.random() < 0.2 else None)


@mutation("lease-never-ends", "clients", "census")
def _immortal(cluster: SimCluster) -> None:
    """The controller does not notice that a client has died."""

    def wrap(handler: Callable[..., None]) -> Any:
        def lost(sender: Address, message: PeerLost) -> None:
            if not message.node.startswith("client"):
                handler(sender, message)

        return lost

    rehandle(cluster.controller, PeerLost, wrap)


@mutation("runs-not-retold", "restarts", "oracle", "credits", "liveness")
def _untold(cluster: SimCluster) -> None:
    """A client does not tell the next controller which runs were in flight."""
    resuming: set[str] = set()

    def alter(random: Random, to: Address, message: Any) -> list[Any] | None:
        if isinstance(message, Attach) and message.resume:
            resuming.add(message.name)
        elif isinstance(message, Resumed):
            resuming.clear()
        elif isinstance(message, Run) and resuming:
            return []
        return None

    tamper(cluster, object, alter)


@mutation("numbers-given-again", "restarts", "oracle", "sessions last", "G1", "census")
def _same_numbers(cluster: SimCluster) -> None:
    """The next controller gives its clients numbers that the last one has given."""
    cluster.numbers_apart = 0


@mutation("lose-a-credit", "calm", "credits")
def _no_refund(cluster: SimCluster) -> None:
    """A client does not get back the credit of a run."""
    tamper(cluster, RunsSettled, lambda random, to, message: [] if random.random() < 0.1 else None)


@mutation("double-credit", "calm", "credits")
def _refund_twice(cluster: SimCluster) -> None:
    """A client gets back more credits than it had runs."""
    tamper(
        cluster,
        RunsSettled,
        lambda random, to, message: [replace(message, count=message.count + 1)],
    )


@mutation("silent-compiler", "calm", "liveness")
def _no_facts(cluster: SimCluster) -> None:
    """A client does not hear of what it has had compiled."""
    tamper(cluster, Compiled, lambda random, to, message: [])


# --- shares and priorities ---------------------------------------------------------------------------


@mutation("keep-no-place", "tenants", "shares")
def _impulsive(cluster: SimCluster) -> None:
    """The scheduler keeps no device for a client that is about to come back."""

    def spawned(scheduler: IslandScheduler) -> None:
        scheduler.policy.keeps_devices = False

    cluster.on_spawn.append(spawned)


@mutation("never-age", "tenants", "shares")
def _merciless(cluster: SimCluster) -> None:
    """Work of low priority never ages: others go first for ever."""

    def spawned(scheduler: IslandScheduler) -> None:
        order = scheduler.policy.order
        scheduler.policy.order = lambda queues, now_s: order(queues, -math.inf)  # type: ignore[method-assign]

    cluster.on_spawn.append(spawned)


@mutation("launch-far-ahead", "tenants", "response")
def _greedy(cluster: SimCluster) -> None:
    """The scheduler launches all queued work at once, however much is in flight."""

    def spawned(scheduler: IslandScheduler) -> None:
        scheduler.window.is_open = lambda footprint, contended: True  # type: ignore[method-assign]

    cluster.on_spawn.append(spawned)
