"""Deliberate bugs of compiling (see `mutations`)."""

from __future__ import annotations

from pw.testing.sim.breaking import mutation
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


@mutation("crash-with-the-compiler", "calm", "epochs last")
def _in_the_host(cluster: SimCluster) -> None:
    """Hosts compile themselves, so what crashes the compiler crashes its host."""

    def fragile(host: SimHost) -> None:
        def crashed(key: bytes) -> None:
            host.crash(machine=False)
            host.restart_later(0.1)

        host.backend.compilers.crashed = crashed

    cluster.alterations.append(fragile)


@mutation("blame-all-for-a-crash-of-the-compiler", "calm", "oracle")
def _unjust(cluster: SimCluster) -> None:
    """All clients share a process, and a crash of it fails all their tasks."""

    def shared(host: SimHost) -> None:
        compilers = host.backend.compilers

        def crashed(key: bytes) -> None:
            compilers.fail(lambda other: True, "the process ended")

        compilers.crashed = crashed

    cluster.alterations.append(shared)
