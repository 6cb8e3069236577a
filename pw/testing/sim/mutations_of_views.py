"""Deliberate bugs of views (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pw.core.ids import Address
from pw.core.messages import IslandFormed
from pw.devices.host import backend as ops
from pw.sched.island.memory import DeviceMemory
from pw.testing.sim.breaking import mutation
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


@mutation("free-viewed-shards", "views", "oracle", "replicas are equal")
def _rash(cluster: SimCluster) -> None:
    """When a source is deleted, a host frees its shards, although views name them."""

    def careless(host: SimHost) -> None:
        arrays: Any = host.store.arrays
        drop = arrays.drop

        def drop_all(array: int, why: str) -> None:
            entry = arrays.get(array)
            drop(array, why)
            freed: Any = (None if entry is None else entry.value.payload) or {}
            gone = {id(shard) for shard in freed.values()}
            for other in arrays.values():
                shards = other.value.payload or {}
                for ordinal in [at for at, shard in shards.items() if id(shard) in gone]:
                    shards[ordinal] = shards[ordinal] * 0

        arrays.drop = drop_all

    cluster.alterations.append(careless)


@mutation("donate-viewed-shards", "views", "views")
def _generous(cluster: SimCluster) -> None:
    """A computation overwrites a donated shard that a view names as well."""

    def careless(host: SimHost) -> None:
        backend: Any = host.backend
        submit = backend.submit

        def forgetful(batch: Sequence[ops.Op]) -> None:
            for op in batch:
                if isinstance(op, ops.View):
                    op.result.shared = False
                    for source in op.sources:
                        source.value.shared = False
            submit(batch)

        backend.submit = forgetful

    cluster.alterations.append(careless)


@mutation("uneven-views-are-not-settled", "views", "liveness", "oracle", "G1")
def _hasty(cluster: SimCluster) -> None:
    """A gang reads a view of which one host has an error, before the other hosts know of it."""

    def careless(host: SimHost) -> None:
        interpreter: Any = host.executor.interpreter

        def at_once(launch: Any, computation: Any, slots: Sequence[int], gang: Any) -> None:
            for slot in slots:
                interpreter.made(launch.run, slot)

        interpreter._await_outcome = at_once

    cluster.alterations.append(careless)


def _on_memory(cluster: SimCluster, alter: Callable[[Any], None]) -> None:
    """Alter how each scheduler counts memory."""

    def formed(sender: Address, to: Address, message: IslandFormed) -> Callable[[], None]:
        def then() -> None:
            scheduler = cluster.schedulers.get(to.actor.partition("/")[2])
            memory = None if scheduler is None else scheduler.admission.memory
            if memory is not None:
                alter(memory)

        return then

    cluster.world.watch_handled(IslandFormed, formed)


@mutation("count-viewed-shards-twice", "views-lost", "views")
def _avaricious(cluster: SimCluster) -> None:
    """The scheduler counts the memory of a shard for its array, and for each view of it."""

    def alter(memory: Any) -> None:
        view = memory._view

        def counted(output: Any, on: Any, given: Any) -> Any:
            return view(output, on, {})

        memory._view = counted

    _on_memory(cluster, alter)


@mutation("keep-viewed-shards", "views-lost", "memory")
def _clinging(cluster: SimCluster) -> None:
    """The scheduler counts the memory of a shard for ever, if a view has named it."""

    def alter(memory: Any) -> None:
        let_go = DeviceMemory._let_go

        def keep(buffer: Any) -> None:
            if buffer.shards is None:
                let_go(memory, buffer)

        memory._let_go = keep

    _on_memory(cluster, alter)


@mutation("delete-offered-arrays", "shares", "oracle")
def _eager(cluster: SimCluster) -> None:
    """The controller deletes offered arrays before they are taken."""
    shares: Any = cluster.controller.shares
    shares.keep = _all


@mutation("arrived-when-taken", "shares", "oracle", "liveness", "epochs last", "views")
def _early(cluster: SimCluster) -> None:
    """The controller counts a taken array as arrived before the giver has made it."""
    shares: Any = cluster.controller.shares
    ask = shares.ask

    def early(number: int, name: int) -> None:
        ask(number, name)
        shares.runs.handed.append((name, None))

    shares.ask = early


def _all(client: Any, arrays: tuple[int, ...]) -> tuple[int, ...]:
    return arrays
