"""The way of a run: from the controller to gang schedulers, and on to the executors of hosts."""

from __future__ import annotations

import msgspec

from pw.core.compact import Compact
from pw.core.errors import ErrorReport
from pw.core.messages.base import Base
from pw.core.messages.clients import Artifact
from pw.core.peak import IslandMemory
from pw.core.plan import HostPlan
from pw.core.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress, Placement


class AddClient(Base, frozen=True, tag=60):
    """Controller to IslandScheduler (local): a client's work may come, with this weight and priority."""

    client: int
    share: float
    priority: int


class Submit(Base, frozen=True, tag=61):
    """Controller to every IslandScheduler a run touches (local): queue these segments of the run.

    `segments` are this island's; `depends` runs parallel to it and names (island, segment) pairs.
    """

    run: int
    program: int
    segments: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    reporters: tuple[int, ...]
    """How many hosts of each segment, the first ones, say when it has ended."""
    depends: tuple[tuple[tuple[str, int], ...], ...]
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]
    notify: tuple[tuple[str, ...], ...]
    """For each segment the other islands that wait for it."""
    awaits: tuple[int, ...]
    """Argument arrays whose upload has not ended."""
    islands: tuple[str, ...] = ()
    """All islands of a run that must be admitted on each of them before it may start on any."""
    is_timed: bool = False
    """Tell the controller when the run is launched."""


class SegmentLaunched(Base, frozen=True, tag=62):
    """IslandScheduler to the IslandSchedulers that wait for it (local): a producer has been launched."""

    run: int
    segment: int


class SegmentDone(Base, frozen=True, tag=63):
    """IslandScheduler to those that wait for it, and to Controller (local): a segment has ended."""

    run: int
    segment: int
    device_time_us: int
    lost: ErrorReport | None = None
    """It has no value because a host was lost, not because of anything in the program."""


class UploadEnded(Base, frozen=True, tag=64):
    """Controller to IslandScheduler (local): an awaited array is there on all its hosts."""

    array: int


class Release(Base, frozen=True, tag=65):
    """Controller to IslandScheduler (local): drop these arrays, after all the client's earlier work."""

    client: int
    arrays: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    """Holders of each array."""
    late: bool = False
    """They were deleted before they had arrived: of the earlier work only what names them can need them."""


class RemoveClient(Base, frozen=True, tag=66):
    """Controller to IslandScheduler (local): drop a client's queue and, on hosts, all it owns."""

    client: int


class CancelRun(Base, frozen=True, tag=67):
    """Controller to IslandScheduler (local): forget the segments of this run that are still queued."""

    run: int
    reason: str = ""
    """Why the run must end, also what is launched: if it does not by itself, the epoch ends."""
    grace_s: float = 0.0
    """How long it may take to end by itself."""


class InstallProgram(Base, frozen=True, tag=68):
    """Controller to IslandScheduler (local): let your hosts compile this, in this order on each."""

    program: int
    body: Program
    plans: tuple[HostPlan, ...]
    artifacts: tuple[Artifact, ...]
    memory: IslandMemory | None = None
    """What a run takes on this island; None where nobody counts."""
    install: int = 0
    """Programs are installed again when they are lowered again, and each time has a number."""


class ProgramInstalled(Base, frozen=True, tag=69):
    """IslandScheduler to Controller (local): all hosts of the island have compiled it, or one could not."""

    island: str
    program: int
    error: ErrorReport | None
    install: int = 0


class UninstallProgram(Base, frozen=True, tag=70):
    """Controller to IslandScheduler (local): hosts may forget this program after its earlier work."""

    program: int
    hosts: tuple[str, ...]


class Install(Base, frozen=True, tag=71):
    """IslandScheduler to HostExecutor: compile your part of this program."""

    epoch: int
    program: int
    body: Compact[Program]
    plan: Compact[HostPlan]
    artifacts: tuple[Artifact, ...]
    install: int = 0


class Installed(Base, frozen=True, tag=72):
    """HostExecutor to IslandScheduler: compiled, or why not."""

    epoch: int
    program: int
    error: ErrorReport | None
    temporary_bytes: tuple[int, ...] = ()
    """Device memory that each computation takes while it runs, besides arguments and results."""
    install: int = 0


class Arguments(msgspec.Struct, frozen=True, array_like=True):
    """What a run reads and makes; comes with the run's first launch on a host."""

    args: tuple[int | bytes, ...]
    results: tuple[int, ...]


CANCELLED = -1
"""Segment number of a launch that ends a run on a host: what has not been launched never will be."""


class Launch(Base, frozen=True, tag=73):
    """IslandScheduler to every HostExecutor of a gang: your next piece of work, number `sequence`."""

    epoch: int
    sequence: int
    run: int
    program: int
    segment: int
    last: bool
    """No segment of this run follows on this host."""
    arguments: Arguments | None
    report: bool
    """This host leads the gang: tell the scheduler when the segment has ended."""


class Discard(Base, frozen=True, tag=74):
    """IslandScheduler to HostExecutor, in launch order: drop these arrays, programs, clients."""

    epoch: int
    sequence: int
    arrays: tuple[int, ...]
    programs: tuple[int, ...]
    clients: tuple[int, ...]


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """One launch that has ended on a host, and the device time it took."""

    sequence: int
    device_time_us: int
    lost: ErrorReport | None = None
    """It has no value because a host was lost, not because of anything in the program."""


class Progress(Base, frozen=True, tag=75):
    """HostExecutor to IslandScheduler, once a loop turn: these launches have ended."""

    epoch: int
    finished: tuple[Finished, ...]


class LaunchGap(Base, frozen=True, tag=76):
    """HostExecutor to IslandScheduler: a launch number is missing, I have stopped."""

    epoch: int
    expected: int
    got: int


class GangBroken(Base, frozen=True, tag=77):
    """HostExecutor to IslandScheduler: I cannot go on with a gang whose other hosts may go on.

    An input is missing here that they may have; or, with an `error`, I have failed at something that they
    may not fail at, and would fail again.
    """

    epoch: int
    reason: str
    run: int = 0
    error: ErrorReport | None = None
    results: tuple[int, ...] = ()
    """What the run was to make."""


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of an array that one host holds, to be kept in the host memory of `targets`."""

    array: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    positions: tuple[int, ...]
    """Mesh positions whose shards are copied."""
    targets: tuple[str, ...]
    place: int | None = None
    """While it travels (`pw.core.copying`): the place that has the spec's placement and the devices."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where arrays lie: virtual devices, and the device behind each."""

    placement: Placement
    devices: tuple[DeviceAddress, ...]


class CopyFile(msgspec.Struct, frozen=True, array_like=True):
    """One host's file of a checkpoint on disk, and the boxes that are to be in it."""

    checkpoint: str
    """Which one: as many random letters and digits as make it the only one of that name."""
    path: str
    overwrite: bool
    file: str
    names: tuple[str, ...]
    """Of the copied arrays, as the checkpoint has them."""
    copies: tuple[Copy, ...]


class CopyArrays(Base, frozen=True, tag=78):
    """Controller to IslandScheduler (local): have these copied after the client's earlier work."""

    client: int
    copies: tuple[tuple[str, Copy], ...]
    """What each host is to copy."""
    files: tuple[tuple[str, CopyFile], ...] = ()
    """What each host is to write to disk."""


class Replicate(Base, frozen=True, tag=79):
    """IslandScheduler to HostExecutor, in launch order: copy these to host memory, write these to disk."""

    epoch: int
    sequence: int
    copies: tuple[Copy, ...]
    files: tuple[CopyFile, ...] = ()
    places: tuple[Place, ...] = ()
    """Of the arrays in both."""


class RunRefused(Base, frozen=True, tag=80):
    """IslandScheduler to Controller (local): this run cannot be; fail it, and cancel it everywhere.

    There is no room for it: the client's queue on the island stands still until its `CancelRun` comes back.
    Or one host of a gang has failed, so that the gang's hosts have different things in `results`.
    """

    run: int
    error: ErrorReport
    results: tuple[int, ...] = ()


class ArrayPlaced(Base, frozen=True, tag=81):
    """Controller to IslandScheduler (local): this array takes memory from now on, until its release.

    For what no run makes: uploads and restored arrays. An older array of this number is gone.
    """

    array: int
    devices: tuple[DeviceAddress, ...]
    """The physical device at every position of its mesh."""
    shard_bytes: int


class RunAtHead(Base, frozen=True, tag=82):
    """IslandScheduler to the first of a run's IslandSchedulers (local): it is next of its client here."""

    run: int


class ReserveRun(Base, frozen=True, tag=83):
    """IslandScheduler to the next of a run's IslandSchedulers (local): I have room for it, your turn."""

    run: int


class RunAdmitted(Base, frozen=True, tag=84):
    """The last of a run's IslandSchedulers to all others (local): every island has memory for it."""

    run: int


class Held(Base, frozen=True, tag=134):
    """HostExecutor to IslandScheduler: these launches (run, segment) wait for inputs, and others pass them.

    And those that have been passed, and wait no longer: they are behind the others now.
    """

    epoch: int
    passed: tuple[tuple[int, int], ...]
    handed_over: tuple[tuple[int, int], ...]


class CallEnded(Base, frozen=True, tag=130):
    """HostExecutor to IslandScheduler, who passes it on to the gang: a Python function has returned here.

    It may raise on one host only, so its hosts agree on what became of it before anybody sees a result.
    """

    epoch: int
    run: int
    slot: int
    """Of the call's first result."""
    host: str
    gang: tuple[str, ...]
    error: ErrorReport | None


class RunStarted(Base, frozen=True, tag=131):
    """IslandScheduler to Controller (local): a run with a timeout has been launched here."""

    run: int
