"""Mutations of the rights of tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pw.core.ids import Address, store_of
from pw.core.messages import (
    AddClient,
    ArraysLost,
    FetchReplica,
    Install,
    Offer,
    OfferReplica,
    Uploaded,
)
from pw.core.messages.routes import permits
from pw.core.tenants import OPERATOR
from pw.sched.island.scheduler import IslandScheduler
from pw.testing.sim.breaking import mutation, rehandle, tamper
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


@mutation("believe-every-claim", "trespasses", "tenants")
def _gullible(cluster: SimCluster) -> None:
    """A client gets whichever number it says that it had."""
    claims: Any = cluster.claims
    claims.is_valid = lambda claim, client, tenant: True


@mutation("rights-not-checked", "trespasses", "tenants", "oracle")
def _everybody(cluster: SimCluster) -> None:
    """Every client has the rights of the operator."""
    cluster.world.tenants = lambda node: OPERATOR


@mutation("names-for-all", "trespasses", "tenants")
def _open_book(cluster: SimCluster) -> None:
    """Hosts take all programs for those of one tenant, and give it the names of all computations."""
    tamper(cluster, Install, lambda random, to, message: [replace(message, tenant="tenant-0")])


@mutation("believe-every-sender", "intruders", "liveness", "epochs last", "oracle", "census")
def _credulous(cluster: SimCluster) -> None:
    """Actors take every message that they have a handler for, whatever its sender is."""
    cluster.world.permits = lambda node, actor, kind: True


@mutation("permits-not-checked", "trespasses", "replicas")
def _generous(cluster: SimCluster) -> None:
    """A host gives its replicas to every host that asks."""

    def generous(host: SimHost) -> None:
        def serve(handler: Any) -> Any:
            def served(sender: Address, message: FetchReplica) -> None:
                permit = cluster.claims.permit(message.array, host.name, sender.node)
                handler(sender, replace(message, permit=permit))

            return served

        rehandle(host.store, FetchReplica, serve)

    cluster.alterations.append(generous)


@mutation("take-every-offer", "trespasses", "replicas")
def _greedy(cluster: SimCluster) -> None:
    """A host takes replicas that another host offers."""
    cluster.world.permits = lambda node, actor, kind: (
        kind is OfferReplica or permits(node, actor, kind)
    )


@mutation("believe-every-holding", "trespasses", "replicas")
def _trusting(cluster: SimCluster) -> None:
    """The controller believes every host that says that it has replicas."""
    claims: Any = cluster.claims
    claims.may_keep = lambda shown, array, host: True


@mutation("believe-every-loss", "trespasses", "replicas")
def _worried(cluster: SimCluster) -> None:
    """The controller believes every host that says that an array is lost."""
    control = cluster.controller

    def believe(handler: Any) -> Any:
        def believed(sender: Address, message: ArraysLost) -> None:
            owner = control.sessions.owner(message.arrays[0])
            array = None if owner is None else owner.arrays.get(message.arrays[0])
            hosts = () if array is None else array.hosts
            handler(store_of(hosts[0]) if hosts else sender, message)

        return believed

    rehandle(control, ArraysLost, believe)


@mutation("believe-every-upload", "trespasses", "replicas")
def _hopeful(cluster: SimCluster) -> None:
    """The controller notes uploads to hosts that have no slice of the client."""
    control = cluster.controller

    def believe(handler: Any) -> Any:
        def believed(sender: Address, message: Uploaded) -> None:
            if (owner := control.sessions.owner(message.array)) is not None:
                slices: Any = owner.slices
                slices.are_on = lambda host: True
            handler(sender, message)

        return believed

    rehandle(control, Uploaded, believe)


@mutation("offers-not-guarded", "shares", "repeats")
def _careless(cluster: SimCluster) -> None:
    """The giver may delete and donate what it has offered before the taker has it."""
    control = cluster.controller

    def unguard(handler: Any) -> Any:
        def unguarded(sender: Address, message: Offer) -> None:
            handler(sender, message)
            for client in control.sessions.clients:
                client.offered.clear()

        return unguarded

    rehandle(control, Offer, unguard)


@mutation("later-launches-first", "parts", "shares")
def _crowded(cluster: SimCluster) -> None:
    """A launch without room on some of its devices keeps none of them free."""

    def crowd(scheduler: IslandScheduler) -> None:
        launching: Any = scheduler._launcher
        launching._keep_free = lambda taken, groups: None

    cluster.on_spawn.append(crowd)


@mutation("shares-of-clients-alone", "divided", "shares")
def _one_level(cluster: SimCluster) -> None:
    """The scheduler divides devices among clients by what they ask for, whatever their tenants."""

    def wrap(handler: Callable[..., None]) -> Callable[..., None]:
        return lambda sender, message: handler(sender, replace(message, tenant=OPERATOR))

    cluster.on_spawn.append(lambda scheduler: rehandle(scheduler, AddClient, wrap))
