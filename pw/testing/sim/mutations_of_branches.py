"""Deliberate bugs of branches (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from pw.core.ids import Address
from pw.core.messages import EdgeFailed
from pw.core.programs.guards import is_skipped
from pw.core.programs.plan import Execute
from pw.devices.host.interpreter import _Advance
from pw.testing.sim.breaking import mutation, rehandle, tamper
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


def _on_decisions(cluster: SimCluster, is_wrong: Callable[[SimHost, Any], bool]) -> None:
    """Turn the predicates around that some hosts read for some computations."""

    def careless(host: SimHost) -> None:
        guards: Any = host.executor.interpreter._guards
        decide = guards._decision

        def turned(run: Any, slot: int, computation: Any) -> Any:
            decision = decide(run, slot, computation)
            wrong = isinstance(decision, bool) and is_wrong(host, computation)
            return not decision if wrong else decision

        guards._decision = turned

    cluster.alterations.append(careless)


@mutation("take-a-branch-on-one-host", "branches", "G1")
def _alone(cluster: SimCluster) -> None:
    """Some hosts of a gang take the branch that the others skip."""
    names = sorted(host.name for host in cluster.hosts)
    _on_decisions(cluster, lambda host, one: not one.is_merge and host.name in names[::2])


@mutation("merge-the-other-branch", "branches", "oracle")
def _contrary(cluster: SimCluster) -> None:
    """A merge gives the results of the branch that was not taken."""
    _on_decisions(cluster, lambda host, one: bool(one.is_merge))


@mutation("skip-in-silence", "branches", "liveness", "oracle", "epochs last")
def _silent(cluster: SimCluster) -> None:
    """A host does not tell the others that it sends no value of a branch that it skips."""

    def alter(random: Random, to: Address, message: EdgeFailed) -> list[Any] | None:
        return [] if is_skipped(message.error) else None

    tamper(cluster, EdgeFailed, alter)


@mutation("take-over-what-is-held-back", "branches", "oracle")
def _taken_over(cluster: SimCluster) -> None:
    """A computation behind a hold takes the buffer over that the value before the hold still needs."""

    def careless(host: SimHost) -> None:
        guards: Any = host.executor.interpreter._guards
        go = guards.go

        def taking(launch: Any, instruction: Execute) -> bool:
            behind = {
                one.results[0]
                for one in launch.segment.instructions
                if isinstance(one, Execute) and one.guard >= 0 and one.args[1:2] == one.args[2:]
            }
            if not behind.isdisjoint(instruction.args):
                launch.segment.kept.pop(launch.position, None)
            return bool(go(launch, instruction))

        guards.go = taking

    cluster.alterations.append(careless)


@mutation("go-on-once", "branches", "liveness", "oracle", "epochs last")
def _once(cluster: SimCluster) -> None:
    """A host goes on with work that waits for a value only the first time that one arrives."""

    def careless(host: SimHost) -> None:
        interpreter: Any = host.executor.interpreter
        go_on = interpreter.advance_soon

        def once() -> None:
            go_on()
            interpreter._is_advancing = True

        interpreter.advance_soon = once
        rehandle(host.executor, _Advance, lambda handler: lambda *note: interpreter.advance())

    cluster.alterations.append(careless)


@mutation("gang-without-its-poisoned-host", "reads", "G1", "liveness", "credits")
def _silent_leaver(cluster: SimCluster) -> None:
    """A host that alone could not read a predicate leaves its gang without a word."""

    def leave(host: SimHost) -> None:
        guards: Any = host.executor.interpreter._guards
        poison = guards.poison
        guards.poison = lambda launch, instruction, error, *, alone=False: poison(
            launch, instruction, error
        )

    cluster.alterations.append(leave)
