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
    Local,
)
from pw.core.messages.bounds import Count, ManyArrays, RunArguments
from pw.core.messages.gangs import Submit

STEPS = 256
"""The most steps of a leased launch on one host."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A segment that a host launches in a run."""

    segment: int
    report: bool
    """The host reports its end."""


class LentProgram(msgspec.Struct, frozen=True, array_like=True):
    """A program that the holder of a lease may launch."""

    program: int
    install: int
    """The installation that hosts must have."""
    steps: tuple[tuple[Step, ...], ...]
    """What each host of the lease launches."""

    def on(self, at: int) -> LentProgram:
        """Return the program with the steps of the host at this place only."""
        return LentProgram(self.program, self.install, (self.steps[at],))


class Lent(ControllerToSession, frozen=True, tag=190):
    """IslandScheduler to ClientSession: a lease of these hosts is yours.

    It is void if the client has sent a run without a lease after `last_run`.
    """

    lease: int
    epoch: int
    hosts: tuple[str, ...]
    programs: tuple[LentProgram, ...]
    first: int
    """The index of the next launch."""
    until: int
    """The first index that the client may not use yet."""
    last_run: int


class LeaseWindow(ControllerToSession, frozen=True, tag=191):
    """IslandScheduler to ClientSession: launches have ended, the lease goes on `until` this index."""

    lease: int
    until: int


class Lend(ControllerToExecutor, frozen=True, tag=192):
    """IslandScheduler to HostExecutor, in launch order: take leased launches of this client."""

    epoch: int
    sequence: int
    lease: int
    client: int
    node: str
    """The node of the client."""
    programs: tuple[LentProgram, ...]
    """With the steps of this host only."""
    first: int


class LeasedLaunch(ClientToExecutor, frozen=True, tag=193):
    """ClientSession, or IslandScheduler in its place, to HostExecutor: the launch `index` of a lease."""

    epoch: int
    lease: int
    index: int
    run: int
    program: int
    install: int
    steps: Annotated[tuple[Step, ...], Meta(max_length=STEPS)]
    args: RunArguments
    results: ManyArrays
    request: Count = 0
    """The client waits for `awaited`, as with a `Wait` of this number; 0 if it does not."""
    awaited: int = 0


class CloseLease(ControllerToExecutor, frozen=True, tag=194):
    """IslandScheduler to HostExecutor, in no order: take no more launches of the client, and answer."""

    epoch: int
    lease: int
    noticed: Count
    """The scheduler knows the launches before this index."""


class LeaseClosed(HostToScheduler, frozen=True, tag=195):
    """HostExecutor to IslandScheduler: the lease is closed here.

    Also without a `CloseLease`: the link to the client was lost, or it sent what may not be.
    """

    epoch: int
    lease: int
    taken: int
    """The index of the first launch that has not been taken."""
    launches: tuple[LeasedLaunch, ...]
    """The taken ones that the scheduler does not know."""


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


def steps_of(submit: Submit, host: str) -> tuple[Step, ...]:
    """Return what a host launches in a run."""
    return tuple(
        Step(segment, hosts.index(host) < reporters)
        for segment, hosts, reporters in zip(
            submit.segments, submit.hosts, submit.reporters, strict=True
        )
        if host in hosts
    )


def number_of(index: int, step: int) -> int:
    """Return the number of a step of a leased launch: below zero, where the scheduler's own are not."""
    return -1 - index * STEPS - step


def index_of(number: int) -> int:
    """Return the index of the launch to which a number below zero belongs."""
    return (-1 - number) // STEPS
