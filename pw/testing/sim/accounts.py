"""Accounts in a simulation: a sink that outlives controllers, and the promise that its sums are exact.

All device time of which a controller learns is in one entry, or is not written yet when the controller is
killed (`accounts`). So are all bytes of which hosts tell it, and they tell of all that they send to each
other. The next controller goes on from the sums of the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pw.core.accounts import AccountEntry, Spent
from pw.core.ids import Address
from pw.core.messages import BytesMoved, EdgeData
from pw.testing.sim.world import Violation

NO_ROOM = 0.1
"""Share of writes for which the disk has no room."""


class _Pushes:
    """The bulk plane of a host, with another way to push."""

    def __init__(self, bulk: Any, push: Callable[..., None]) -> None:
        self._bulk, self.push = bulk, push

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bulk, name)


class SimAccounts:
    """The file of accounts of a simulated cluster (`pw.core.accounts.AccountSink`)."""

    def __init__(self, cluster: Any) -> None:
        self.settle: Callable[[], object] = lambda: None
        self.entries: list[AccountEntry] = []
        self._cluster = cluster
        self._random = cluster.world.streams("accounts")
        self._before = 0
        """Number of entries of earlier controllers."""
        self._told_bytes = 0
        """Bytes of which hosts have told this controller."""
        cluster.on_start["controller"].append(self._started)
        cluster.on_start["host"].append(self._watch_edges)
        cluster.world.watch_handled(BytesMoved, self._hosts_tell)

    def sums(self) -> Mapping[str, Spent]:
        """Return the sums of all entries, by tenant."""
        sums: dict[str, Spent] = {}
        for entry in self.entries:
            sums.setdefault(entry.tenant, Spent()).add(entry)
        return sums

    def write(self, entries: Sequence[AccountEntry]) -> bool:
        """Keep entries, unless there is no room."""
        if self._random.random() < NO_ROOM and not self._cluster.world.calm:
            return False
        self.entries += entries
        self.check()
        return True

    def _started(self, controller: Any) -> None:
        self._before = len(self.entries)
        self._told_bytes = 0
        for tenant, sums in self.sums().items():
            if controller.accounts.sums()[tenant] != sums:
                raise Violation(
                    "accounts", f"a controller does not go on from the sums of {tenant}"
                )

    def _watch_edges(self, host: Any) -> None:
        """Compare what a host sends of edges with what it tells of, as long as it lives."""
        edges, env = host.coordinator.sending, host.coordinator.env
        bulk, send, sent_bytes = edges.bulk, env.send, 0

        def push(landing: Any, parts: Any, done: Callable[[Exception | None], None]) -> None:
            nonlocal sent_bytes

            def ended(error: Exception | None) -> None:
                nonlocal sent_bytes
                sent_bytes += 0 if error is not None else sum(part.nbytes for _, part in parts)
                done(error)

            bulk.push(landing, parts, ended)

        def sends(to: Address, message: Any) -> None:
            nonlocal sent_bytes
            if isinstance(message, EdgeData):
                sent_bytes += len(message.data)
            elif isinstance(message, BytesMoved):
                self._cluster.world.checked["accounts of bytes"] += 1
                reported_bytes = sum(size_bytes for _, size_bytes in message.moved)
                if reported_bytes != sent_bytes:
                    words = (
                        f"{host.name} has sent {sent_bytes} bytes, and tells of {reported_bytes}"
                    )
                    raise Violation("accounts", words)
                sent_bytes = 0
            send(to, message)

        edges.bulk, env.send = _Pushes(bulk, push), sends

    def _hosts_tell(self, sender: Address, to: Address, message: BytesMoved) -> None:
        self._told_bytes += sum(size_bytes for _, size_bytes in message.moved)

    def check(self) -> None:
        """Compare what this controller has written, and what it has not, with what devices did."""
        cluster = self._cluster
        schedulers = cluster.schedulers.values()
        ended_s = math.fsum(one.device_s for one in schedulers)
        untaken_s = math.fsum(one.spending.untaken_s for one in schedulers)
        written = {id(entry): entry for entry in self.entries[self._before :]}
        unwritten = {id(entry): entry for entry in cluster.controller.accounts.unwritten}
        entries_s = math.fsum(entry.device_s for entry in (written | unwritten).values())
        cluster.world.checked["accounts"] += 1
        if not math.isclose(ended_s, entries_s + untaken_s, rel_tol=1e-9, abs_tol=1e-9):
            words = f"devices worked for {ended_s} s, and {entries_s + untaken_s} s are in accounts"
            raise Violation("accounts", words)
        control = cluster.controller
        counted = sum(entry.moved_bytes for entry in (written | unwritten).values())
        counted += sum(client.usage.moved_bytes for client in control.sessions.clients)
        counted += cluster.node.counters["moved_bytes_of_strangers"]
        if counted != self._told_bytes:
            words = f"hosts have told of {self._told_bytes} bytes, and {counted} are in accounts"
            raise Violation("accounts", words)

    def check_end(self) -> None:
        """Check that nothing is left to be written after all clients have left."""
        self.settle()
        self.check()
        if left := self._cluster.controller.accounts.unwritten:
            raise Violation("accounts", f"{len(left)} entries are not written in the end")
