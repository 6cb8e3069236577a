"""Why it does not go on: what the controller asks schedulers and hosts, and what they say."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import Base
from pw.core.messages.status import IslandStatus


class WorkReport(msgspec.Struct, frozen=True, array_like=True):
    """One segment of a run, as its island's scheduler sees it."""

    run: int
    segment: int
    program: str
    computations: tuple[str, ...]
    hosts: tuple[str, ...]
    shards: tuple[tuple[int, ...], ...]
    """For each host, the mesh positions that it has of the last computation; empty if there is none."""
    launched_s: float
    """How long ago it was launched; negative while it is queued."""
    waits_for: tuple[str, ...] = ()
    uploads: tuple[int, ...] = ()
    """Arrays that it waits for because they are not on their hosts yet."""


class InstallReport(msgspec.Struct, frozen=True, array_like=True):
    """A program that hosts of an island have not compiled yet."""

    program: int
    name: str
    hosts: tuple[str, ...]


class LaunchReport(msgspec.Struct, frozen=True, array_like=True):
    """One launch on one host.

    `state` is `missing` (it has not come), `queued` behind another one, `waiting` for values that it reads,
    `handed over` to the execute thread, `entered` by it, `enqueued` on the devices, or `finished`.
    """

    run: int
    segment: int
    program: str
    computations: tuple[str, ...]
    state: str
    waits_for: tuple[tuple[int, int], ...] = ()
    """Runs and edges whose values it needs next and does not have."""
    unsettled: tuple[str, ...] = ()
    """Computations of which it is not known yet whether they have failed, and whose values it needs next."""


class EdgeReport(msgspec.Struct, frozen=True, array_like=True):
    """One end of one route of an edge that has not ended.

    `state` of the receiving end is `awaited` (the bytes come in a message), `credit sent` or `assembled`;
    of the sending end `no value` (it is not made yet), `no credit` (nobody has said where to put it),
    `sending`, or `credit early` (nobody here has been asked to send it).
    """

    run: int
    edge: int
    peer: str
    incoming: bool
    state: str
    shards: tuple[int, ...] = ()
    """Mesh positions of the shards, in the mesh of the sender, that the bytes are of."""
    size_bytes: int = 0
    received_bytes: int = 0
    open_s: float = 0.0
    """For how long it has been open."""


class ThreadReport(msgspec.Struct, frozen=True, array_like=True):
    """A thread that is at work on something, what it is, and where in the code."""

    thread: str
    doing: str
    busy_s: float
    stack: tuple[str, ...]
    """The innermost call last."""


class ClientReport(msgspec.Struct, frozen=True, array_like=True):
    """What a client waits for at the controller."""

    client: int
    name: str
    runs_in_flight: int
    held: int
    """Messages of its stream that have not been looked at."""
    waits_for: tuple[str, ...]


class Stalled(Base, frozen=True, tag=120):
    """IslandScheduler to Controller (local): nothing has gone on here for a while, log the reason."""

    island: str


class Explain(Base, frozen=True, tag=121):
    """ClientSession to Controller: why does it not go on? I wait for these hosts."""

    request: int
    hosts: tuple[str, ...] = ()


class ExplainIsland(Base, frozen=True, tag=122):
    """Controller to IslandScheduler (local): what is launched, and what does the rest wait for?"""

    request: int
    run: int
    """What is launched of this one is to be told in any case."""


class IslandReport(Base, frozen=True, tag=123):
    """IslandScheduler to Controller (local): what was launched longest ago, and what is next."""

    request: int
    island: str
    hosts: tuple[str, ...]
    quiet_s: float
    """How long ago anything was launched or ended."""
    launched: int
    queued: int
    oldest: tuple[WorkReport, ...]
    heads: tuple[WorkReport, ...]
    installing: tuple[InstallReport, ...]


class ExplainHost(Base, frozen=True, tag=124):
    """Controller to HostExecutor: how far are these launches (run, segment), and what do you do?"""

    request: int
    work: tuple[tuple[int, int], ...]


class HostReport(Base, frozen=True, tag=125):
    """HostExecutor to Controller: where I am, and what I wait for."""

    request: int
    host: str
    state: str
    """Empty when it is in its island and can work."""
    quiet_s: float
    """How long ago anything was launched here or ended."""
    queued: int
    launches: tuple[LaunchReport, ...]
    edges: tuple[EdgeReport, ...]
    threads: tuple[ThreadReport, ...]


class HostSilence(msgspec.Struct, frozen=True, array_like=True):
    """A host that has not answered in time."""

    host: str
    silent_s: float
    """How long ago anything was heard of it; negative if that is not known."""


class Explanation(Base, frozen=True, tag=126):
    """Controller to ClientSession: the story in words, and all that was found out for it."""

    request: int
    text: str
    islands: tuple[IslandStatus, ...]
    work: tuple[IslandReport, ...]
    hosts: tuple[HostReport, ...]
    silent: tuple[HostSilence, ...]
    clients: tuple[ClientReport, ...]
