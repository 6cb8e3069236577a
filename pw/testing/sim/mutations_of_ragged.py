"""Deliberate bugs of counted edges (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from pw.core.programs.counted import NUMBER, unpacked
from pw.devices.host import backend as ops
from pw.devices.host.backend import relative
from pw.testing.sim.breaking import mutation
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost

Numbers = np.ndarray[Any, Any]


def _of_each_op(cluster: SimCluster, alter: Callable[[ops.Op], None]) -> None:
    """Alter the ops that hosts submit."""

    def careless(host: SimHost) -> None:
        backend: Any = host.backend
        submit = backend.submit

        def altered(batch: Sequence[ops.Op]) -> None:
            for op in batch:
                alter(op)
            submit(batch)

        backend.submit = altered

    cluster.alterations.append(careless)


def _of_counts(cluster: SimCluster, alter: Callable[[Numbers], Numbers]) -> None:
    """Alter the counts that hosts read."""

    def wrong(op: ops.Op) -> None:
        done: Any = getattr(op, "done", None)
        if isinstance(op, ops.Read) and isinstance(done, partial) and done.args == ("counts",):
            op.done = lambda answer: done(
                [alter(answer[0])] if isinstance(answer, list) else answer
            )

    _of_each_op(cluster, wrong)


@mutation("say-nothing-of-no-rows", "ragged", "liveness")
def _silent(cluster: SimCluster) -> None:
    """A sender without rows says nothing, and its receivers wait."""

    def silent(host: SimHost) -> None:
        sending: Any = host.coordinator.sending
        send = sending._send_inline

        def talks_of_rows(outgoing: Any, data: bytes) -> None:
            lead = None if outgoing.send.counts is None else len(outgoing.send.counts.spec.shape)
            if (
                lead is None
                or np.frombuffer(data[: NUMBER.itemsize * (len(data) // 4)], NUMBER).any()
            ):
                send(outgoing, data)

        sending._send_inline = talks_of_rows

    cluster.alterations.append(silent)


@mutation("count-by-another-cell", "ragged", "oracle", "replicas are equal")
def _crossed(cluster: SimCluster) -> None:
    """Rows travel by the counts of another cell."""
    _of_counts(cluster, lambda counts: np.roll(counts, 1))


@mutation("drop-rows-silently", "ragged", "oracle")
def _tolerant(cluster: SimCluster) -> None:
    """Rows beyond the fourth are dropped, and no error tells of it."""
    _of_counts(cluster, lambda counts: np.minimum(counts, 4))


@mutation("leave-old-bytes-as-padding", "ragged", "oracle", "replicas are equal")
def _dirty(cluster: SimCluster) -> None:
    """The padding of received rows is what was in the memory before."""

    def unclean(op: ops.Op) -> None:
        if isinstance(op, ops.Build) and op.over_zeros:
            whole = op.spec.sharding.shard_shape(op.spec.shape)
            here = tuple(sorted({at for positions, _, _ in op.parts for at in positions}))
            old = np.full(whole, 255, np.uint8)
            op.parts = [(here, relative(tuple((0, size) for size in whole)), old), *op.parts]

    _of_each_op(cluster, unclean)


@mutation("take-rows-for-none", "ragged", "oracle", "replicas are equal")
def _blind(cluster: SimCluster) -> None:
    """A receiver takes each third small route for one without rows."""

    def blind(host: SimHost) -> None:
        receiving: Any = host.coordinator.receiving
        take, seen = receiving._take, count()

        def zeros(incoming: Any, route: Any, buffer: Any) -> None:
            if incoming.receive.counts is not None and isinstance(buffer, bytes):
                cells = unpacked(buffer, route, incoming.receive.source, _lead(incoming))[0]
                if next(seen) % 3 == 2:
                    buffer = bytes(NUMBER.itemsize * sum(own.size for _, own, _ in cells))
            take(incoming, route, buffer)

        receiving._take = zeros

    cluster.alterations.append(blind)


def _lead(incoming: Any) -> int:
    return len(incoming.receive.counts.spec.shape)
