"""Deliberate bugs of re-shards by XLA (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pw.core.compact import Compact
from pw.core.ids import Address
from pw.core.messages import Install
from pw.core.programs.program import Computation, Kind
from pw.testing.sim.breaking import mutation, rehandle
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


@mutation("re-shard-in-another-order", "moves", "oracle", "replicas are equal")
def _disordered(cluster: SimCluster) -> None:
    """The planner takes the same devices in another order for the same placement."""

    def careless(host: SimHost) -> None:
        def wrap(handler: Callable[..., None]) -> Any:
            def install(sender: Address, message: Install) -> None:
                body = message.body.whole()
                computations = tuple(map(_reversed, body.computations))
                body = replace(body, computations=computations)
                handler(sender, replace(message, body=Compact.of(body)))

            return install

        rehandle(host.executor, Install, wrap)

    cluster.alterations.append(careless)


def _reversed(computation: Computation) -> Computation:
    if computation.kind is not Kind.RESHARD:
        return computation
    (spec,) = computation.inputs
    placement = replace(spec.placement, devices=spec.placement.devices[::-1])
    return replace(computation, inputs=(replace(spec, placement=placement),))
