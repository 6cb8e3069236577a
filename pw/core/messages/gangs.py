"""Between the controller, the schedulers and the executors: the life of a run."""

from __future__ import annotations

import msgspec

from pw.core.compact import Compact
from pw.core.errors import ErrorReport
from pw.core.messages.base import ControllerToExecutor, HostToScheduler, Local
from pw.core.messages.clients import Artifact
from pw.core.programs.peak import IslandMemory
from pw.core.programs.plan import HostPlan
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress, Placement
from pw.core.tenants import OPERATOR


class AddClient(Local, frozen=True, tag=60):
    """Controller to IslandScheduler (local): a client, with its weight and priority; again when they change."""

    client: int
    share: float
    priority: int
    tenant: str = OPERATOR
    tenant_share: float = 1.0
    node: str = ""
    """Node of the client's session."""
    line: str = ""
    """Node of the client's lines to hosts; empty if it has none."""
    device_memory_bytes: int | None = None
    """Bytes that the tenant may have on a device; None for no bound."""


class Submit(Local, frozen=True, tag=61):
    """Controller to every IslandScheduler of a run (local): queue these segments of the run.

    `segments` are this island's; `depends` runs parallel to it and names (island, segment) pairs.
    """

    run: int
    program: int
    segments: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    reporters: tuple[int, ...]
    """Number of hosts of each segment, the first ones, that report its end."""
    depends: tuple[tuple[tuple[str, int], ...], ...]
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]
    notify: tuple[tuple[str, ...], ...]
    """Names of the other islands that wait for each segment."""
    awaits: tuple[int, ...]
    """Arguments whose upload has not ended."""
    islands: tuple[str, ...] = ()
    """Names of all islands of a run that needs memory on several; each must admit it before it starts."""
    is_timed: bool = False
    """True to tell the controller when the run is launched."""
    is_whole: bool = False
    """True if the run has no segments on other islands."""
    has_gaps: bool = False
    """True if arrays of the client are lost, or earlier runs wait for islands that are away."""


class SegmentLaunched(Local, frozen=True, tag=62):
    """IslandScheduler to the waiting IslandSchedulers (local): a producer has been launched."""

    run: int
    segment: int


class SegmentDone(Local, frozen=True, tag=63):
    """IslandScheduler to the waiting IslandSchedulers and Controller (local): a segment has ended."""

    run: int
    segment: int
    device_time_us: int
    lost: ErrorReport | None = None
    """Error of a lost host, if its loss and not the program has made the launch fail."""


class UploadEnded(Local, frozen=True, tag=64):
    """Controller to IslandScheduler (local): all hosts have this awaited array."""

    array: int


class Release(Local, frozen=True, tag=65):
    """Controller to IslandScheduler (local): delete these arrays, after all earlier work of the client."""

    client: int
    arrays: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    """Hosts of each array."""
    late: bool = False
    """True if the client deleted the arrays before their upload ended: only earlier work that names them can
    need them."""


class RemoveClient(Local, frozen=True, tag=66):
    """Controller to IslandScheduler (local): drop a client's queue, and all that it owns on hosts."""

    client: int


class CancelRun(Local, frozen=True, tag=67):
    """Controller to IslandScheduler (local): drop the queued segments of this run."""

    run: int
    reason: str = ""
    """Reason for which launched segments must end too: if they have not after `grace_s`, the epoch ends."""
    grace_s: float = 0.0
    """Seconds that launched segments may take to end."""


class InstallProgram(Local, frozen=True, tag=68):
    """Controller to IslandScheduler (local): have the island's hosts compile this program."""

    program: int
    body: Program
    plans: tuple[HostPlan, ...]
    artifacts: tuple[Artifact, ...]
    memory: IslandMemory | None = None
    """Memory of a run on this island; None where neither devices have a limit nor its slices a bound."""
    install: int = 0
    """Number of this installation: a program that is lowered again is installed again."""
    tenant: str = ""
    """Tenant of the client."""
    again: bool = False
    """True if all but `install` is as in the installation before."""


class ProgramInstalled(Local, frozen=True, tag=69):
    """IslandScheduler to Controller (local): all hosts have compiled the program, or one has failed."""

    island: str
    program: int
    error: ErrorReport | None
    install: int = 0


class UninstallProgram(Local, frozen=True, tag=70):
    """Controller to IslandScheduler (local): hosts forget this program after its earlier work."""

    program: int
    hosts: tuple[str, ...]


class Install(ControllerToExecutor, frozen=True, tag=71):
    """IslandScheduler to HostExecutor, in launch order: compile this host's part of the program."""

    epoch: int
    sequence: int
    program: int
    body: Compact[Program]
    plan: Compact[HostPlan]
    artifacts: tuple[Artifact, ...]
    install: int = 0
    tenant: str = ""
    """Tenant of the client; a host may run Python functions of some only."""


class Installed(HostToScheduler, frozen=True, tag=72):
    """HostExecutor to IslandScheduler: this host has compiled the program, or has failed."""

    epoch: int
    program: int
    error: ErrorReport | None
    temporary_bytes: tuple[int, ...] = ()
    """Bytes of device memory that each computation takes while it runs, besides arguments and results."""
    install: int = 0
    compile_s: float = 0.0
    """Seconds from the order until all was compiled."""


class Arguments(msgspec.Struct, frozen=True, array_like=True):
    """The arguments and results of a run; they travel with its first launch on a host."""

    args: tuple[int | bytes, ...]
    results: tuple[int, ...]


CANCELLED = -1
"""Segment number of a launch that ends a run on a host: no more segments follow."""


class Launch(ControllerToExecutor, frozen=True, tag=73):
    """IslandScheduler to every HostExecutor of a gang: this host's launch number `sequence`."""

    epoch: int
    sequence: int
    run: int
    program: int
    segment: int
    arguments: Arguments | None
    """Arguments of the first launch of a run on a host; later ones may have them, too."""
    report: bool
    """True if this host reports the end of the segment."""


class Discard(ControllerToExecutor, frozen=True, tag=74):
    """IslandScheduler to HostExecutor, in launch order: drop these arrays, programs and clients."""

    epoch: int
    sequence: int
    arrays: tuple[int, ...]
    programs: tuple[int, ...]
    clients: tuple[int, ...]
    after: int = 0
    """Number of launches of the lease that come first: those with a lower index."""


SMALL_UPLOAD_BYTES = 1 << 20
"""Size of a shard, in bytes, below which an upload goes to the devices at once, where arrays may leave them."""


class Spill(ControllerToExecutor, frozen=True, tag=87):
    """IslandScheduler to HostExecutor, in launch order: move these arrays to the next tier of memory."""

    epoch: int
    sequence: int
    arrays: tuple[int, ...]
    to_files: bool = False
    """True for moves from host memory to files, false for those from devices to host memory."""


class Spilled(HostToScheduler, frozen=True, tag=88):
    """HostExecutor to IslandScheduler: these arrays of a `Spill` have left the memory in which they were."""

    epoch: int
    arrays: tuple[int, ...]
    kept: tuple[int, ...] = ()
    """Arrays that are still there, because they could not be copied."""


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A launch that has ended on a host, and its device time."""

    sequence: int
    device_time_us: int
    lost: ErrorReport | None = None
    """Error of a lost host, if its loss and not the program has made the launch fail."""


class Progress(HostToScheduler, frozen=True, tag=75):
    """HostExecutor to IslandScheduler, at most once a loop turn: these launches have ended."""

    epoch: int
    finished: tuple[Finished, ...]


class LaunchGap(HostToScheduler, frozen=True, tag=76):
    """HostExecutor to IslandScheduler: a launch number is missing; this host has stopped."""

    epoch: int
    expected: int
    got: int


class GangBroken(HostToScheduler, frozen=True, tag=77):
    """HostExecutor to IslandScheduler: this host cannot go on with a gang, and the other hosts may.

    An input is missing here that they may have; or, with an `error`, this host has failed in a way
    that they may not, and would fail again.
    """

    epoch: int
    reason: str
    run: int = 0
    error: ErrorReport | None = None
    results: tuple[int, ...] = ()
    """Numbers of the run's results."""


class ArrayCopy(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of an array on one host."""

    array: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    positions: tuple[int, ...]
    """Mesh positions of the shards."""
    place: int | None = None
    """Index of the place with the placement and the devices, in a message (`pw.core.messages.copying`)."""
    to_files: bool = False
    """True if the copy is to lie in a file, where the host has a folder for files."""


class BoundPlacement(msgspec.Struct, frozen=True, array_like=True):
    """A placement, and the physical device at each of its positions."""

    placement: Placement
    devices: tuple[DeviceAddress, ...]


class CopyFile(msgspec.Struct, frozen=True, array_like=True):
    """One host's file of a checkpoint on disk, and the boxes in it."""

    checkpoint: str
    """Random name of the checkpoint, which no other one has."""
    path: str
    overwrite: bool
    file: str
    names: tuple[str, ...]
    """Names of the copied arrays in the checkpoint."""
    copies: tuple[ArrayCopy, ...]


class CopyArrays(Local, frozen=True, tag=78):
    """Controller to IslandScheduler (local): have hosts copy these arrays after the client's earlier work."""

    client: int
    copies: tuple[tuple[str, ArrayCopy], ...]
    """Boxes that each host copies."""
    files: tuple[tuple[str, CopyFile], ...] = ()
    """File that each host writes."""
    first: bool = False
    """True to copy them before all queued work of the client."""


class Replicate(ControllerToExecutor, frozen=True, tag=79):
    """IslandScheduler to HostExecutor, in launch order: make these replicas, write these files."""

    epoch: int
    sequence: int
    copies: tuple[ArrayCopy, ...]
    files: tuple[CopyFile, ...] = ()
    places: tuple[BoundPlacement, ...] = ()
    """Places of the arrays in copies and files."""


class RunRefused(Local, frozen=True, tag=80):
    """IslandScheduler to Controller (local): fail this run, and cancel it on all islands.

    The run does not fit into memory: the client's queue on the island waits for the `CancelRun`. Or one host of
    a gang has failed, so its hosts do not agree on the values of `results`.
    """

    run: int
    error: ErrorReport
    results: tuple[int, ...] = ()
    holders: tuple[tuple[int, int], ...] = ()
    """Largest arrays where there is no room, with their bytes there."""


class ArrayPlaced(Local, frozen=True, tag=81):
    """Controller to IslandScheduler (local): this array takes memory from now on, until its release.

    It is an upload or a restored array. It replaces an older array of this number.
    """

    array: int
    devices: tuple[DeviceAddress, ...]
    """Physical device at every position of the slice's mesh."""
    shard_bytes: int
    is_back: bool = False
    """True if recovery brings the array back, which its tenant has had."""
    slice: int = 0
    """Number of the slice on which the array lies."""


class UploadRefused(Local, frozen=True, tag=85):
    """IslandScheduler to Controller (local): this array of `ArrayPlaced` takes its tenant, or its slice, beyond
    its bound.

    The array counts for the island until its release.
    """

    array: int
    error: ErrorReport
    holders: tuple[tuple[int, int], ...] = ()
    """Largest arrays of the tenant or the slice where there is no room, with their bytes there."""


class BoundMemory(Local, frozen=True, tag=89):
    """Controller to IslandScheduler (local): what a slice may have on each of its devices."""

    slice: int
    memory_bytes: int
    """Bytes on each device; 0 when the slice has been given back."""


class RunAtHead(Local, frozen=True, tag=82):
    """IslandScheduler to the first of a run's IslandSchedulers (local): the run is its client's next here."""

    run: int


class ReserveRun(Local, frozen=True, tag=83):
    """IslandScheduler to the next of a run's IslandSchedulers (local): this island has reserved memory."""

    run: int


class RunAdmitted(Local, frozen=True, tag=84):
    """The last of a run's IslandSchedulers to all others (local): every island has reserved memory."""

    run: int


class PassedLaunches(HostToScheduler, frozen=True, tag=134):
    """HostExecutor to IslandScheduler: these launches (run, segment) wait for inputs, and others pass them.

    `enqueued` are launches that were passed and have been enqueued, behind the others.
    """

    epoch: int
    passed: tuple[tuple[int, int], ...]
    enqueued: tuple[tuple[int, int], ...]


class CallEnded(ControllerToExecutor, HostToScheduler, frozen=True, tag=130):
    """HostExecutor to IslandScheduler and on to the gang: a host function has returned on this host.

    It may raise on one host only, so all hosts of the gang hear of it before a client sees a result.
    """

    epoch: int
    run: int
    slot: int
    """Slot of the call's first result."""
    host: str
    gang: tuple[str, ...]
    error: ErrorReport | None


class RunStarted(Local, frozen=True, tag=131):
    """IslandScheduler to Controller (local): a run with a timeout has been launched here."""

    run: int
