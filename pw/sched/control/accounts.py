"""Accounts of clients and tenants: collects what they use, and has it written once a minute.

Amounts are taken out where they are counted (`pw.sched.island.spending`), so that each is in one entry. An
entry that the sink cannot keep waits for the next minute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.accounts import AccountEntry, AccountSink, Spent
from pw.core.actors.ticker import Ticker
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_host

ENTRIES_S = 60.0
"""Seconds between two entries of a client."""

FORMER_KEPT = 4096
"""Number of clients that have left whose tenants are remembered."""

Take = Callable[[int], Iterable[tuple[int, str, Spent]]]
"""Function that takes what a client (0 for all) has used on islands, with its number and tenant."""


@dataclass(eq=False)
class Accounts(ControlPart):
    """What tenants have used since the first entry that the sink has."""

    take: Take
    sink: AccountSink | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._unwritten: dict[int, AccountEntry] = {}
        self._sums: dict[str, Spent] = {}
        if self.sink is not None:
            self._sums.update(self.sink.sums())
            self.sink.settle = self.settle
        self._sampled_s: dict[int, float] = {}
        """Time until which the memory of each client is counted, in seconds."""
        self._former: OrderedDict[int, str] = OrderedDict()
        """Tenants of clients that have left, by number: what hosts did for them may become known later."""
        self._ticker = Ticker(self._env, ENTRIES_S, self._write_again)

    def sums(self) -> Mapping[str, Spent]:
        """Return what each tenant has used; what is looked at once a minute as it was then."""
        self._collect()
        return self._sums

    @property
    def unwritten(self) -> Collection[AccountEntry]:
        """Entries that the sink does not have yet."""
        return self._unwritten.values()

    def attached(self, client: Client) -> None:
        """Begin the account of a client."""
        self._sampled_s[client.number] = self._env.now_s()
        self._ticker.start()

    def client_left(self, client: Client) -> None:
        """Write the last entry of a client; what becomes known later has an entry of its own."""
        self._collect(client.number)
        self._sample(client)
        self._sampled_s.pop(client.number, None)
        self._former[client.number] = client.tenant
        if len(self._former) > FORMER_KEPT:
            self._former.popitem(last=False)
        entry = self._unwritten.get(client.number)
        if entry is not None:
            entry.leaves = True
            self._write({client.number: entry})

    @handles_host(msg.BytesMoved)
    def _moved(self, host: str, message: msg.BytesMoved) -> None:
        """A host has sent bytes to other hosts for its clients."""
        for number, size_bytes in message.moved:
            client = self.sessions.get(number)
            if client is not None:
                client.usage.moved_bytes += size_bytes
            elif number in self._former:
                self.add(number, self._former[number], Spent(moved_bytes=size_bytes))
            else:
                self._env.count("moved_bytes_of_strangers", size_bytes)

    def settle(self) -> None:
        """Write all that was used until now."""
        self._collect()
        for client in self.sessions.clients:
            self._sample(client)
        self._write(self._unwritten)

    # --- entries ----------------------------------------------------------------------------------

    def _write_again(self) -> bool:
        """Go on while there are clients, and a minute longer: their last launches may end late."""
        is_news = self._collect()
        self.settle()
        return is_news or bool(self.sessions.clients or self._unwritten)

    def _collect(self, client: int = 0) -> bool:
        news = list(self.take(client))
        for number, tenant, spent in news:
            self.add(number, tenant, spent)
        return bool(news)

    def _sample(self, client: Client) -> None:
        """Take what the controller itself knows of a client since the last time."""
        now_s, usage = self._env.now_s(), client.usage
        passed_s = now_s - self._sampled_s.get(client.number, now_s)
        self._sampled_s[client.number] = now_s
        size_bytes = sum(array.spec.size_bytes for array in client.arrays.held.values())
        spent = Spent(
            memory_byte_s=size_bytes * passed_s,
            uploaded_bytes=usage.uploaded_bytes,
            stored_bytes=usage.stored_bytes,
            moved_bytes=usage.moved_bytes,
        )
        usage.uploaded_bytes = usage.stored_bytes = usage.moved_bytes = 0
        if spent:
            self.add(client.number, client.tenant, spent)

    def add(self, number: int, tenant: str, spent: Spent) -> None:
        """Add what a client has used to its entry, and to the sums of its tenant."""
        self._sums.setdefault(tenant, Spent()).add(spent)
        if self.sink is None:
            return
        entry = self._unwritten.get(number)
        if entry is None:
            client = self.sessions.get(number)
            name = "" if client is None else client.name
            entry = AccountEntry(tenant=tenant, client=number, name=name)
            self._unwritten[number] = entry
            self._ticker.start()
        entry.add(spent)

    def _write(self, entries: Mapping[int, AccountEntry]) -> None:
        if self.sink is not None and entries and self.sink.write(list(entries.values())):
            for number in list(entries):
                del self._unwritten[number]
