"""Deliberate bugs of slices (see `mutations`)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pw.testing.sim.breaking import mutation
from pw.testing.sim.cluster import SimCluster


@mutation("bind-to-the-spare", "slices", "named hosts")
def _forgetful(cluster: SimCluster) -> None:
    """When a spare has the place of a host that a slice names, the slice goes on there."""
    slices: Any = cluster.resources.slices
    bind_again = slices.bind_again

    def forget(island: Any) -> None:
        for piece in slices._on(island):
            piece.request = replace(piece.request, hosts=())
        bind_again(island)

    slices.bind_again = forget
