"""Mutations of the rights of tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pw.core.messages import AddClient, Install
from pw.core.tenants import OPERATOR
from pw.testing.sim.breaking import mutation, rehandle, tamper
from pw.testing.sim.cluster import SimCluster


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


@mutation("shares-of-clients-alone", "divided", "shares")
def _one_level(cluster: SimCluster) -> None:
    """The scheduler divides devices among clients by what they ask for, whatever their tenants."""

    def wrap(handler: Callable[..., None]) -> Callable[..., None]:
        return lambda sender, message: handler(sender, replace(message, tenant=OPERATOR))

    cluster.on_spawn.append(lambda scheduler: rehandle(scheduler, AddClient, wrap))
