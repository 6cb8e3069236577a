"""What the controller publishes while it works: one type of event for each topic.

Actors give events to a `Sink`. A sink keeps none back for them and never makes them wait;
`pw.cli.publisher` has the one that sends events to other processes. docs/monitoring.md has the table of
topics and fields: fields may be added, but a field that changes its meaning needs another `VERSION`.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec

VERSION = 1


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all events; `what` says what has happened."""

    topic: ClassVar[str] = ""

    what: str


class EpochEvent(Event, frozen=True):
    """`ready`: its hosts have joined a new epoch. `lost`: it has left the epoch."""

    topic: ClassVar[str] = "island"

    island: str
    epoch: int
    hosts: tuple[str, ...] = ()
    reason: str = ""


class HostEvent(Event, frozen=True):
    """`registered`, `ready` (its island is), `waiting` (for its island, or as a spare), `draining`, `gone`."""

    topic: ClassVar[str] = "host"

    host: str


class DeviceEvent(Event, frozen=True):
    """`suspect`: an error names it. `failed`: its test failed. `passed`: it was one of these, but is well."""

    topic: ClassVar[str] = "device"

    host: str
    device: int
    reason: str = ""


class ClientEvent(Event, frozen=True):
    """`attached` or `left`; the runs in flight of a client that has left are dropped."""

    topic: ClassVar[str] = "client"

    client: int
    name: str
    reason: str = ""


class RunEvent(Event, frozen=True):
    """A run `began`, then `ended`, `failed`, or was `lost` and is repeated; `refused` runs never begin."""

    topic: ClassVar[str] = "run"

    run: str
    """Name of the run, as `pw status` shows it; a repeated run has the name of the first one."""
    attempt: str
    """Name of this attempt; of a run that is not repeated, the name of the run."""
    client: int
    program: str
    islands: tuple[str, ...] = ()
    seconds: float = 0.0
    """Seconds since the run began."""
    error: str = ""


class TransferEvent(Event, frozen=True):
    """`edge`: a value has come from other hosts; `failed`: it has not. `upload`: an array is on its hosts."""

    topic: ClassVar[str] = "transfer"

    name: str
    """Name of the run, or of the array."""
    edge: int
    """Number of the edge in the program; -1 for an upload."""
    sources: tuple[str, ...]
    """Names of the hosts that sent; for an upload the client's number."""
    destinations: tuple[str, ...]
    bytes: int
    seconds: float | None
    """Seconds from the receiver's launch until all bytes were there; None for an upload."""


class RecoveryEvent(Event, frozen=True):
    """`began`: a client waits until something that it lost is rebuilt. `ended`: it goes on."""

    topic: ClassVar[str] = "recovery"

    client: int
    name: str
    arrays: int
    """Number of lost arrays, when recovery began."""
    seconds: float = 0.0


class CountersEvent(Event, frozen=True):
    """`totals` of one process since it started, once a second (see `pw.stats`)."""

    topic: ClassVar[str] = "counters"

    process: str
    counters: dict[str, int]


KINDS: tuple[type[Event], ...] = (
    EpochEvent,
    HostEvent,
    DeviceEvent,
    ClientEvent,
    RunEvent,
    TransferEvent,
    RecoveryEvent,
    CountersEvent,
)
TOPICS = tuple(kind.topic for kind in KINDS)


def subject(topic: str) -> str:
    """Return a topic as the publisher names it: with the version, so that readers can subscribe to a prefix."""
    return f"pw.{VERSION}.{topic}"


class Batch(msgspec.Struct, frozen=True):
    """The payload of one published message, as JSON: events of one topic, in order."""

    publisher: str
    """Random number of the publisher; another one means that the controller was started again, and counts
    anew."""
    first: int
    """Number of the first event, counted for each topic: a gap says that events were lost."""
    time_s: float
    """Time at which the events were published, in seconds since 1970."""
    events: list[Event]


class Sink(Protocol):
    """Takes events from actors."""

    @property
    def endpoint(self) -> str:
        """Address where other processes can read the events; empty if there is none."""

    def publish(self, event: Event) -> None:
        """Take an event; waits for nothing."""
