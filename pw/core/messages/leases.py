"""Launch leases: a client that is alone on hosts numbers its launches there itself.

The scheduler lends (`Lend` to the hosts, `Lent` to the client), the client launches (`LeasedLaunch`) and tells
the controller of each run as always, marked with its index (`Run`). The scheduler ends a lease at the hosts
(`CloseLease`, `LeaseClosed`, `EndLease`), whatever the client does. See `docs/internals/scheduling.md`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pw.core.messages.base import (
    ClientToExecutor,
    ControllerToExecutor,
    ControllerToSession,
    HostToScheduler,
    HostToSession,
    Local,
)
from pw.core.messages.bounds import Count, ManyArrays, RunArguments
from pw.core.messages.gangs import Submit
from pw.core.programs.spec_checks import DEVICES

STEPS = 256
"""Number of steps of a leased launch on one host, at most."""


class LaunchStep(msgspec.Struct, frozen=True, array_like=True):
    """A segment that a host launches in a run."""

    segment: int
    report: bool
    """True if the host reports the end of the step."""


class LentProgram(msgspec.Struct, frozen=True, array_like=True):
    """A program that the holder of a lease may launch."""

    program: int
    install: int
    """Number of the installation that hosts must have."""
    steps: tuple[tuple[LaunchStep, ...], ...]
    """Steps that each host of the lease launches."""
    room_bytes: int = 0
    """Bytes of the lease's memory that a run takes; 0 where nothing limits it."""

    def on(self, at: int) -> LentProgram:
        """Return the program with the steps of the host at this place only."""
        return LentProgram(self.program, self.install, (self.steps[at],), self.room_bytes)


class Lent(ControllerToSession, frozen=True, tag=190):
    """IslandScheduler to ClientSession: a lease of these hosts is yours.

    It is void if the client has sent a run without a lease after `last_run`.
    """

    lease: int
    epoch: int
    hosts: tuple[str, ...]
    programs: tuple[LentProgram, ...]
    first: int
    """Index of the next launch."""
    until: int
    """First index that the client may not use yet."""
    last_run: int
    room_bytes: int = 0
    """Bytes that all launches of the lease may take, on each device."""
    shared: ManyArrays = ()
    """Numbers of arrays that launches of the lease may not read: one that is donated would be copied."""


class LeaseWindow(ControllerToSession, frozen=True, tag=191):
    """IslandScheduler to ClientSession: launches have ended, the lease goes on `until` this index."""

    lease: int
    until: int
    room_bytes: int = 0
    """Bytes as in `Lent`; launches that need more than the room before wait for `WidenLease` at the hosts."""


class Lend(ControllerToExecutor, frozen=True, tag=192):
    """IslandScheduler to HostExecutor, in launch order: take leased launches of this client."""

    epoch: int
    sequence: int
    lease: int
    client: int
    node: str
    """Node of the client's lines: launches come from there."""
    programs: tuple[LentProgram, ...]
    """Programs with the steps of this host only."""
    first: int
    room_bytes: int = 0
    """Bytes that the launches of the lease may take, on each device."""


class LeasedLaunch(ClientToExecutor, frozen=True, tag=193):
    """ClientSession, or IslandScheduler in its place, to HostExecutor: the launch `index` of a lease."""

    epoch: int
    lease: int
    index: int
    run: int
    program: int
    install: int
    steps: Annotated[tuple[LaunchStep, ...], Meta(max_length=STEPS)]
    args: RunArguments
    results: ManyArrays
    request: Count = 0
    """Number of the question for the result `awaited`; 0 without one."""
    awaited: int = 0
    positions: Annotated[tuple[int, ...], Meta(max_length=DEVICES)] = ()
    """Mesh positions of the shards that the client wants, as in `Fetch`; none if it only waits."""


class WidenLease(ControllerToExecutor, frozen=True, tag=199):
    """IslandScheduler to HostExecutor, in launch order: all launches of a lease may take so much memory.

    What has freed it comes before, so launches that need it come behind.
    """

    epoch: int
    sequence: int
    lease: int
    room_bytes: Count


class CloseLease(ControllerToExecutor, frozen=True, tag=194):
    """IslandScheduler to HostExecutor, in no order: take no more launches of the client, and answer."""

    epoch: int
    lease: int
    noticed: Count
    """Index before which the scheduler knows all launches."""


class LeaseClosed(HostToScheduler, frozen=True, tag=195):
    """HostExecutor to IslandScheduler: the lease is closed here.

    Also without a `CloseLease`: the link to the client was lost, or it sent what may not be.
    """

    epoch: int
    lease: int
    taken: int
    """Index of the first launch that has not been taken."""
    launches: tuple[LeasedLaunch, ...]
    """Launches that were taken and that the scheduler does not know."""


class LeaseOver(HostToSession, frozen=True, tag=202):
    """HostExecutor to the holder's node of lines: no more launches of this lease are taken here."""

    lease: int


class EndLease(ControllerToExecutor, frozen=True, tag=196):
    """IslandScheduler to HostExecutor, in launch order: all launches of the lease have been taken."""

    epoch: int
    sequence: int
    lease: int
    taken: int


class SubmitLeased(Local, frozen=True, tag=197):
    """Controller to IslandScheduler (local): a client has launched this run under a lease."""

    submit: Submit
    lease: int
    index: int


class HolderCutOff(Local, frozen=True, tag=198):
    """Controller to IslandScheduler (local): a client has lost its link to a host, and launches with it."""

    client: int
    host: str


def steps_of(submit: Submit, host: str) -> tuple[LaunchStep, ...]:
    """Return what a host launches in a run."""
    return tuple(
        LaunchStep(segment, hosts.index(host) < reporters)
        for segment, hosts, reporters in zip(
            submit.segments, submit.hosts, submit.reporters, strict=True
        )
        if host in hosts
    )


def number_of(index: int, step: int) -> int:
    """Return the launch number of a step; negative, so that it cannot equal one of the scheduler's."""
    return -1 - index * STEPS - step


def index_of(number: int) -> int:
    """Return the index of the launch to which a number below zero belongs."""
    return (-1 - number) // STEPS
