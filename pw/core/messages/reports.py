"""What holds up a client: the questions of the controller to schedulers and hosts, and their reports."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import (
    ClientToController,
    ControllerToExecutor,
    ControllerToSession,
    HostToController,
    Local,
)
from pw.core.messages.bounds import Hosts
from pw.core.messages.owners import ClientId, ClientNumber
from pw.core.messages.status import IslandInfo


class WorkReport(msgspec.Struct, frozen=True, array_like=True):
    """One segment of a run, as the scheduler of its island sees it."""

    run: ClientId
    segment: int
    program: str
    computations: tuple[str, ...]
    hosts: tuple[str, ...]
    shards: tuple[tuple[int, ...], ...]
    """Mesh positions of each host in the last computation; empty without a computation."""
    launched_s: float
    """Seconds since the scheduler launched the work; negative while it is queued."""
    waits_for: tuple[str, ...] = ()
    uploads: tuple[int, ...] = ()
    """Arrays whose upload the work waits for."""


class InstallReport(msgspec.Struct, frozen=True, array_like=True):
    """A program that some hosts of an island have not compiled yet."""

    program: ClientId
    name: str
    hosts: tuple[str, ...]


class LaunchReport(msgspec.Struct, frozen=True, array_like=True):
    """One launch on one host.

    `state` is `missing` (it has not arrived), `queued` behind another one, `waiting` for values
    that it reads, `submitted` to the execute thread, `entered` by it, `enqueued` on the devices,
    or `finished`.
    """

    run: ClientId
    segment: int
    program: str
    computations: tuple[str, ...]
    state: str
    waits_for: tuple[tuple[int, int], ...] = ()
    """Runs and edges of the missing values that the launch needs next."""
    unsettled: tuple[str, ...] = ()
    """Host functions whose gang has not agreed on their outcome yet, and whose values it needs next."""


class EdgeReport(msgspec.Struct, frozen=True, array_like=True):
    """One end of one route of an edge that has not ended.

    `state` of the receiving end is `awaited` (the bytes come in a message), `credit sent` or
    `assembled`; of the sending end `no value` (it does not exist yet), `no credit` (the receiver
    has sent no landing), `sending`, or `credit early` (the launch has not arrived here).
    """

    run: ClientId
    edge: int
    peer: str
    incoming: bool
    state: str
    shards: tuple[int, ...] = ()
    """Mesh positions of the shards, in the mesh of the sender."""
    size_bytes: int = 0
    received_bytes: int = 0
    open_s: float = 0.0
    """Seconds since the transfer began."""


class ThreadReport(msgspec.Struct, frozen=True, array_like=True):
    """A busy thread, its work, and where in the code it is."""

    thread: str
    doing: str
    busy_s: float
    stack: tuple[str, ...]
    """Calls on the stack, the innermost one last."""
    client: ClientNumber = 0
    """Number of the client that the thread works for; 0 for none, or if the host does not say so."""


class ClientReport(msgspec.Struct, frozen=True, array_like=True):
    """Reasons for which a client waits at the controller."""

    client: ClientNumber
    name: str
    runs_in_flight: int
    held: int
    """Messages of the client that the controller has not handled yet."""
    waits_for: tuple[str, ...]
    silent_s: float = 0.0
    """Seconds for which nothing has come from the client; 0 unless that is long."""
    suspended: str = ""
    """Who has suspended the client, and since when, in words; empty if it is not suspended."""
    lacks_hosts: bool = False
    """True if the client waits for hosts that were lost, or have not come."""


class Stalled(Local, frozen=True, tag=120):
    """IslandScheduler to Controller (local): this island makes no progress; log the reason."""

    island: str


class Explain(ClientToController, frozen=True, tag=121):
    """ClientSession to Controller: explain what holds up this client, which waits for these hosts."""

    request: int
    hosts: Hosts = ()


class ExplainIsland(Local, frozen=True, tag=122):
    """Controller to IslandScheduler (local): report the oldest launches, and those that are next."""

    request: int
    run: int
    """Number of a run whose launches are reported in any case."""


class IslandReport(Local, frozen=True, tag=123):
    """IslandScheduler to Controller (local): the oldest launches, and those that are next."""

    request: int
    island: str
    hosts: tuple[str, ...]
    quiet_s: float
    """Seconds since the last launch began or ended."""
    launched: int
    queued: int
    oldest: tuple[WorkReport, ...]
    heads: tuple[WorkReport, ...]
    installing: tuple[InstallReport, ...]


class ExplainHost(ControllerToExecutor, frozen=True, tag=124):
    """Controller to HostExecutor: report how far these launches (run, segment) are, and what the host does."""

    request: int
    work: tuple[tuple[int, int], ...]


class HostReport(HostToController, frozen=True, tag=125):
    """HostExecutor to Controller: the launches, transfers and threads of this host."""

    request: int
    host: str
    state: str
    """State of the host; empty if it is in its island and can work."""
    quiet_s: float
    """Seconds since the last launch arrived here or ended."""
    queued: int
    launches: tuple[LaunchReport, ...]
    edges: tuple[EdgeReport, ...]
    threads: tuple[ThreadReport, ...]
    calls: tuple[tuple[int, float], ...] = ()
    """Clients whose functions computations wait for, with the seconds since the oldest was called."""


class HostSilence(msgspec.Struct, frozen=True, array_like=True):
    """A host that has not answered in time."""

    host: str
    silent_s: float
    """Seconds since the last message of the host came; negative if that is not known."""


class Explanation(ControllerToSession, frozen=True, tag=126):
    """Controller to ClientSession: what holds up the client, in words and as reports."""

    request: int
    text: str
    islands: tuple[IslandInfo, ...]
    work: tuple[IslandReport, ...]
    hosts: tuple[HostReport, ...]
    silent: tuple[HostSilence, ...]
    clients: tuple[ClientReport, ...]
    left: tuple[tuple[str, int], ...] = ()
    """Steps of the client's long work that are left: words such as "replicas are made", and a number."""
