"""Deliberate bugs of reductions between islands (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pw.devices.host import backend as ops
from pw.testing.sim.breaking import mutation
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost
from pw.testing.sim.reductions import ADDS


def _before_adding(
    cluster: SimCluster, alter: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> None:
    """Alter the parts that each host adds."""

    def careless(host: SimHost) -> None:
        backend: Any = host.backend
        submit = backend.submit

        def altered(batch: Sequence[ops.Op]) -> None:
            for op in batch:
                if isinstance(op, ops.Execute):
                    installed = backend._installed.get(op.key)
                    if installed is not None and ADDS in installed.computation.name:
                        op.args = alter(op.args)
            submit(batch)

        backend.submit = altered

    cluster.alterations.append(careless)


@mutation("add-in-another-order", "islands", "oracle")
def _unordered(cluster: SimCluster) -> None:
    """The parts of a sum are added in another order than that of the islands."""
    _before_adding(cluster, lambda parts: (*parts[1:], *parts[:1]))


@mutation("add-a-part-twice", "islands", "oracle")
def _forgetful(cluster: SimCluster) -> None:
    """An island's part is lost, and another one is added in its place."""
    _before_adding(cluster, lambda parts: (*parts[:-1], parts[0]))
