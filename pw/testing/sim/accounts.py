"""Accounts in a simulation: a sink that outlives controllers, and the promise that its sums are exact.

All device time of which a controller learns is in one entry, or is not written yet when the controller is
killed (`accounts`). The next controller goes on from the sums of the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pw.core.accounts import AccountEntry, Spent
from pw.testing.sim.world import Violation

NO_ROOM = 0.1
"""Share of writes for which the disk has no room."""


class SimAccounts:
    """The file of accounts of a simulated cluster (`pw.core.accounts.AccountSink`)."""

    def __init__(self, cluster: Any) -> None:
        self.settle: Callable[[], object] = lambda: None
        self.entries: list[AccountEntry] = []
        self._cluster = cluster
        self._random = cluster.world.streams("accounts")
        self._before = 0
        """Number of entries of earlier controllers."""
        cluster.on_start["controller"].append(self._started)

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
        for tenant, sums in self.sums().items():
            if controller.accounts.sums()[tenant] != sums:
                raise Violation(
                    "accounts", f"a controller does not go on from the sums of {tenant}"
                )

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

    def check_end(self) -> None:
        """Check that nothing is left to be written after all clients have left."""
        self.settle()
        self.check()
        if left := self._cluster.controller.accounts.unwritten:
            raise Violation("accounts", f"{len(left)} entries are not written in the end")
