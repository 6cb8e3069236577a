"""Deliberate bugs of the mailbox (see `mutations`)."""

from __future__ import annotations

from typing import Any

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
