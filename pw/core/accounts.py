"""Accounts: what clients have used, in entries that only add up.

The controller hands entries to a sink (`pw.cli.accounts` appends them to a file), and a later controller goes
on from the sums of what its sink has. So a use is in one entry, whichever controller learns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec


class Spent(msgspec.Struct):
    """Amounts of what a client, or a tenant, has used."""

    device_s: float = 0.0
    """Device time of launches that have ended, in seconds: of each device, in all."""
    launches: int = 0
    """Number of launches that have ended."""
    compile_s: float = 0.0
    """Seconds for which hosts compiled programs, of each host, in all."""
    memory_byte_s: float = 0.0
    """Bytes of arrays times the seconds for which they were there; taken once a minute."""
    uploaded_bytes: int = 0
    """Bytes that came from the client to devices."""
    stored_bytes: int = 0
    """Bytes of checkpoints that were written to disk."""
    moved_bytes: int = 0
    """Bytes that programs have sent from host to host."""

    def add(self, more: Spent) -> None:
        """Add other amounts to these."""
        for name in AMOUNTS:
            setattr(self, name, getattr(self, name) + getattr(more, name))

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in AMOUNTS)


AMOUNTS = Spent.__struct_fields__
"""Names of the amounts."""


class AccountEntry(Spent, kw_only=True):
    """What a client has used since its last entry; `leaves` if it will have no session any more."""

    tenant: str
    client: int
    name: str = ""
    """Name of the client; empty for what became known after it had left."""
    leaves: bool = False


class AccountSink(Protocol):
    """Keeps entries."""

    settle: Callable[[], object]
    """Has the controller write what it has not written yet; the controller sets it."""

    def sums(self) -> Mapping[str, Spent]:
        """Return the sums of all entries that are kept, by tenant."""

    def write(self, entries: Sequence[AccountEntry]) -> bool:
        """Keep entries; return whether they are kept."""
