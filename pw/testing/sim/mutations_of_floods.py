"""Deliberate bugs of fairness between clients (see `mutations`)."""

from __future__ import annotations

from typing import Any

from pw.sched.island.scheduler import IslandScheduler
from pw.testing.sim.breaking import mutation
from pw.testing.sim.cluster import SimCluster


@mutation("one-queue-for-all", "floods", "fair")
def _one_queue(cluster: SimCluster) -> None:
    """Nodes handle messages in the order in which they come, whatever peer sends them."""

    def alter(node: Any) -> None:
        mailbox = node.mailbox
        mailbox.deliver = lambda peer, entry: mailbox.own.append(entry)

    alter(cluster.node)
    cluster.alterations.append(lambda host: alter(host.node))


@mutation("send-every-program-at-once", "floods", "fair")
def _at_once(cluster: SimCluster) -> None:
    """Hosts get each program when it is registered, before the launches of others."""

    def spawned(scheduler: IslandScheduler) -> None:
        scheduler.programs.queues.at_once = 1 << 30

    cluster.on_spawn.append(spawned)


@mutation("await-programs-that-were-released", "floods", "liveness")
def _never_answered(cluster: SimCluster) -> None:
    """A host's answer for a program that was released meanwhile makes no room for the next one."""

    def spawned(scheduler: IslandScheduler) -> None:
        programs = scheduler.programs
        answered = programs.queues.answered

        def heeded(program: int, install: int, *by: str) -> None:
            if programs[program].install == install:
                answered(program, install, *by)

        programs.queues.answered = heeded  # type: ignore[method-assign]

    cluster.on_spawn.append(spawned)
