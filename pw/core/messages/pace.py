"""Between hosts and the scheduler of their island: how long gangs take on each host, and which host is slow."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from pw.core.messages.base import ControllerToExecutor, HostToScheduler
from pw.core.messages.bounds import Count, Fraction, Name

TIMES_TOLD = 16
"""Number of launches in one report of a host, at most."""

_HOSTS, _LONGEST_S = 64, 16
"""Hosts of an island up to which each reports once a second, and the longest time between two reports."""


def report_period_s(hosts: int) -> int:
    """Return the seconds between two reports of a host of an island with so many hosts."""
    return min(max(1, hosts // _HOSTS), _LONGEST_S)


class SlowCause(StrEnum):
    """Cause for which a host is slow, as far as its times show it."""

    DEVICE = "device"
    """Cause if computations take longer on the devices, or end later."""
    PROCESSOR = "processor"
    """Cause if devices have nothing to do while the host prepares the next computation."""
    PAUSED = "paused"
    """Cause if the process of the host does not run for a part of the time."""
    NETWORK = "network"
    """Cause if launches arrive late."""
    PEER = "peer"
    """Cause if values of another host arrive late, which arrive in time elsewhere."""
    STREAM = "stream"
    """Cause if Python functions of the host make the inputs late."""
    COMPILATION = "compilation"
    """Cause if the host prepares computations late while it compiles a program."""


_WORDS = {
    SlowCause.DEVICE: "its device computes longer",
    SlowCause.PROCESSOR: "its processor enqueues computations late",
    SlowCause.PAUSED: "its process does not run all the time",
    SlowCause.NETWORK: "launches reach it late over the network",
    SlowCause.PEER: "values of host {peer} reach it late over the network",
    SlowCause.STREAM: "its input stream makes values late",
    SlowCause.COMPILATION: "its processor compiles a program",
}


class SlowHost(msgspec.Struct, frozen=True, array_like=True):
    """A host for which the other hosts of its gangs wait."""

    host: str
    island: str
    factor: float
    """Time of the gangs with this host, divided by the time without what this host adds."""
    for_s: float
    """Seconds for which the host has been slow."""
    cause: SlowCause
    peer: str = ""
    """Name of the host whose values arrive late; empty for other causes."""

    @property
    def words(self) -> str:
        """One line about the host."""
        return (
            f"host {self.host} of island {self.island} is {self.factor:.1f} × as slow as the median of its "
            f"gangs for {self.for_s:.0f} s: {_WORDS[self.cause].format(peer=self.peer)}"
        )


class LaunchTimes(msgspec.Struct, frozen=True, array_like=True):
    """Times of one launch of a gang on one host, in microseconds."""

    run: int
    segment: int
    began_us: int
    """Time at which the devices began with it, on the clock of the host."""
    ended_us: int
    """Time at which the host saw its end, on the same clock."""
    inputs_us: Count
    """Microseconds for which work here, up to this launch, waited for values."""
    idle_us: Count
    """Microseconds for which it did not begin, though devices had ended all earlier work, and it and its inputs
    were here."""
    was_idle: bool
    """True if the devices had ended all earlier work when the launch and its inputs were here."""
    peer: Name = ""
    """Name of the other host whose values the launch reads; empty if there is none, or several."""
    has_stream: bool = False
    """True if it waited for values of Python functions of this host."""


class PaceReport(HostToScheduler, frozen=True, tag=270):
    """HostExecutor to IslandScheduler, again and again while its gangs compute: how long that took here."""

    epoch: int
    sent_us: int
    """Time of the report, in microseconds on the clock of the host."""
    heard_us: int
    """Time in the newest `PaceHeard`, in microseconds on the clock of the controller; 0 without a new one."""
    held_us: Count
    """Microseconds since that arrived."""
    late_us: Count
    """Mean microseconds by which timers of this host were late."""
    paused: Fraction
    """Part of the time since the last report in which the process did not run, though it should have."""
    times: Annotated[tuple[LaunchTimes, ...], Meta(max_length=TIMES_TOLD)]


class PaceHeard(ControllerToExecutor, frozen=True, tag=271):
    """IslandScheduler to HostExecutor: the answer to a `PaceReport`, from which the next one gets its age."""

    epoch: int
    sent_us: int
    """Time of the answer, in microseconds on the clock of the controller."""
