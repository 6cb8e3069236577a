"""Waiting in the cluster: the question which clients wait for which, and the reports that answer it."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import ClientToController, ControllerToSession, Local


class GetQueue(ClientToController, frozen=True, tag=240):
    """ClientSession to Controller: say which clients wait, and for which."""

    request: int


class ListWaits(Local, frozen=True, tag=241):
    """Controller to IslandScheduler (local): report the launches that wait, in the policy's order."""

    request: int


class LaunchWait(msgspec.Struct, frozen=True, array_like=True):
    """The oldest launch of one client that waits on an island."""

    run: int
    program: str
    is_launched: bool
    """True if the launch was sent to its hosts, and waits there behind earlier ones."""
    reasons: tuple[str, ...]
    """What the launch waits for besides its turn, in words."""
    in_front: tuple[tuple[int, int], ...]
    """Clients that the launch waits for, each with the unit's amount that it has in front of it."""
    unit: str
    """Unit of these amounts: `launches`, or `bytes` of device memory."""
    waited_s: float
    """Seconds since the run came to the scheduler."""
    left_s: float | None
    """Estimate of the seconds until the launch has its devices; None if that cannot be told."""
    more: int
    """Number of later launches of the client that wait on the island."""


class IslandWaits(Local, frozen=True, tag=242):
    """IslandScheduler to Controller (local): one launch of each client that waits, the next one first."""

    request: int
    island: str
    waits: tuple[LaunchWait, ...]
    clients_left_out: int
    """Number of clients that wait behind these."""


class InFront(msgspec.Struct, frozen=True, array_like=True):
    """One client that another one waits for; client 0 stands for all clients of other tenants."""

    client: int
    name: str
    amount: int
    """Amount that the client has in front, in the unit of the wait."""


class ClientWait(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a client waits for; client 0 is a client of another tenant."""

    client: int
    name: str
    tenant: str
    kind: str
    """Kind of what the client waits for: `launch`, `devices`, `programs`, `name`, `island` or `calls`."""
    where: str
    """Name of the island; empty if it is of no island."""
    what: str
    """Thing that the client waits for, in words."""
    run: str
    """Name of the run, for `pw cancel`; empty if it is of no run, or of another tenant."""
    in_front: tuple[InFront, ...]
    """Clients that it waits for; empty if that is not known."""
    unit: str
    """Unit of the amounts in front: `launches`, `bytes`, `devices`, `programs` or `versions`."""
    waited_s: float | None
    """Seconds for which the client waits; None if that is not known."""
    left_s: float | None
    """Estimate of the seconds until it goes on; None if that cannot be told."""
    more: int = 0
    """Number of later launches of the client that wait behind this one."""


class Queue(ControllerToSession, frozen=True, tag=243):
    """Controller to ClientSession: all that waits; on each island the next one comes first."""

    request: int
    policy: str
    waits: tuple[ClientWait, ...]
    hidden: int
    """Number of waits of other tenants that are of no island, which the asker may not see."""
    left_out: int
    """Number of clients that wait on islands behind those of the report."""
