"""What mutations are, and the tools to make them (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from pw.core.actors.actor import Actor
from pw.core.ids import Address
from pw.testing.sim.cluster import SimCluster


@dataclass(frozen=True, slots=True)
class Mutation:
    """One breakage."""

    what: str
    """The broken promise."""
    profile: str
    """The mildest profile in which that matters."""
    caught_by: frozenset[str]
    """Monitors that may notice."""
    install: Callable[[SimCluster], None]


MUTATIONS: dict[str, Mutation] = {}


def mutation(name: str, profile: str, *caught_by: str) -> Callable[[Any], Any]:
    def register(install: Callable[[SimCluster], None]) -> Callable[[SimCluster], None]:
        what = (install.__doc__ or "").strip()
        MUTATIONS[name] = Mutation(what, profile, frozenset(caught_by), install)
        return install

    return register


def tamper(
    cluster: SimCluster,
    kind: type,
    alter: Callable[[Random, Address, Any], list[Any] | None],
) -> None:
    """Have messages of one kind altered on their way."""
    random = cluster.world.streams("mutation")

    def tampered(sender: Address, to: Address, message: Any) -> list[Any] | None:
        return alter(random, to, message) if isinstance(message, kind) else None

    cluster.world.tamper = tampered


def rehandle(actor: Actor, kind: type, wrap: Callable[[Callable[..., None]], Any]) -> None:
    """Replace an actor's handler of one kind of message."""
    actor._handlers[kind] = wrap(actor._handlers[kind])
