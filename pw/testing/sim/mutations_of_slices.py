"""Deliberate bugs of slices (see `mutations`)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pw.sched.cluster.slice_states import Slice, State
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


@mutation("leave-it-parked", "slices", "named hosts")
def _lazy(cluster: SimCluster) -> None:
    """A slice whose host was lost is not bound again when the host has its place again."""
    restart = cluster.restart_controller

    def alter() -> None:
        slices: Any = cluster.resources.slices
        place = slices._place

        def leave(piece: Slice) -> None:
            if not (piece.request.hosts and piece.state is State.PARKED):
                place(piece)

        slices._place = leave

    def restart_altered() -> None:
        restart()
        alter()

    alter()
    setattr(cluster, "restart_controller", restart_altered)  # noqa: B010  (of one object)
