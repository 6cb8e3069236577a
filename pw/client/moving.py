"""Takes work off hosts and devices: drains a host, suspends clients and resumes them."""

from __future__ import annotations

from typing import Literal

from pw.client.arrays.devices import Slice
from pw.client.connection import current
from pw.client.connection.waiting import seconds
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError

COPY_PLACES = ("memory", "files")
"""Where the arrays of suspended clients may go."""


@checks_keywords
def drain(host: str, *, timeout_s: float | None = None) -> None:
    """Move all work and data off a host, so that it can be switched off.

    Computations on its island pause while another host takes its place, and go on with the same
    values. Returns when the host holds nothing any more.

    Args:
        host: its name, as in `pw status`.
        timeout_s: how long to wait, in seconds; the drain goes on afterwards.

    Raises:
        TimeoutError: it took longer.
        Error: there is no such host, or nothing that could take its place.
    """
    current.runtime().ask.drain(host).result(seconds(timeout_s))


@checks_keywords
def suspend(
    client: int | None = None,
    *,
    tenant: str | None = None,
    island: str | None = None,
    to: Literal["memory", "files"] = "memory",
    timeout_s: float | None = None,
) -> None:
    """Have clients leave their devices, with all that they have there, until they are resumed.

    Calls that have begun on devices end; later ones wait. Arrays go to the memory of hosts, or to files, from
    where they can be read. Returns when the devices are free. Names that a client has published stay.

    Args:
        client: number of the client, as in `pw status`; without any argument this script's own.
        tenant: name of a tenant, to mean all its other clients.
        island: name of an island, to mean all other clients with devices there.
        to: "memory", or "files" for the folders of workers with `--spill-files`; other workers, and those whose
            folder has no room, keep arrays in memory. Of clients that are suspended already, too.
        timeout_s: how long to wait, in seconds; the suspension goes on afterwards.

    Raises:
        TimeoutError: it took longer.
        AccessRefused: the client is of another tenant, and this one has no right to `may_suspend`.
        ArgumentError: there is no such client or island, or `to` is something else.
        Error: the client was resumed before, or could not leave.
    """
    if to not in COPY_PLACES:
        raise ArgumentError(f'arrays go to="memory" or to="files"; not to={to!r}')
    meant = _meant(client, tenant, island)
    answer = current.runtime().ask.suspend(*meant, to_files=to == "files")
    answer.result(seconds(timeout_s))


@checks_keywords
def resume(
    client: int | None = None, *, tenant: str | None = None, island: str | None = None
) -> None:
    """Have suspended clients go on, with the same values, as soon as there are devices for them.

    These may be other devices than before, also on another island. Returns at once.

    Args:
        client: number of the client, as in `pw status`; without any argument this script's own.
        tenant: name of a tenant, to mean all its other clients.
        island: name of an island, to mean all clients that had devices there.

    Raises:
        AccessRefused: the client is of another tenant, and this one has no right to `may_suspend`.
        ArgumentError: there is no such client or island.
    """
    current.runtime().ask.resume(*_meant(client, tenant, island)).result()


@checks_keywords
def migrate(
    what: Slice | int | None = None, *, island: str, timeout_s: float | None = None
) -> None:
    """Have work go on, with all it has, on another island.

    First its programs are compiled there and arrays travel, while calls go on. Then launched calls end where
    they are, and queued ones run there. Mesh and devices of scripts stay as they are, only `slice.island`
    changes. Returns when the old devices are free.

    Args:
        what: a slice; or the number of a client, as in `pw status`, for all its slices; without it those of
            this script.
        island: name of the island, as in `pw status`.
        timeout_s: how long to wait, in seconds; the work moves nevertheless.

    Raises:
        TimeoutError: it took longer.
        AccessRefused: the client is of another tenant, and this one has no right to `may_suspend`.
        ArgumentError: there is no such client or island, or the client is suspended or about to move.
        Error: the client was resumed before it moved.
        InsufficientDevices: the island has no room for a slice, which stays where it is.
    """
    number = slice_ = 0
    if isinstance(what, Slice):
        slice_ = what.id
    elif what is not None:
        number, _, _ = _meant(what, None, None)
    answer = current.runtime().ask.migrate(number, slice_, island)
    answer.result(seconds(timeout_s))


def _meant(client: int | None, tenant: str | None, island: str | None) -> tuple[int, str, str]:
    """Return whom a request means, as its message has it."""
    if sum(one is not None for one in (client, tenant, island)) > 1:
        raise ArgumentError("name a client, a tenant= or an island=, and only one of them")
    if client is not None and (not isinstance(client, int) or client < 1):
        raise ArgumentError(f"a client is a number, as in pw status; not {client!r}")
    return client or 0, tenant or "", island or ""
