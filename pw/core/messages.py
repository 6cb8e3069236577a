"""The whole protocol: every message that crosses between actors, in one place.

Each message is a frozen struct that travels as a tagged msgpack array. Its docstring is one sentence:
who sends it, to whom, what it promises. A message between two actors of one process is the same
struct and skips the codec. Tags are part of the protocol: append, never reuse, and raise
`PROTOCOL_VERSION` when the meaning of an old one changes.
"""

from __future__ import annotations

import msgspec

from pw.core.errors import ErrorReport
from pw.core.landing import Landing
from pw.core.peak import IslandMemory
from pw.core.plan import HostPlan
from pw.core.program import Program
from pw.core.sharding import ArraySpec, Box, DeviceAddress

PROTOCOL_VERSION = 2

INLINE_BYTES = 8192
"""Host values up to this size travel inside a control message; larger ones take the bulk plane."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# --- links -------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=1):
    """Each end of a link to the other, first of all: who I am and what I speak."""

    protocol: int
    pw_version: str
    jax_version: str
    node: str
    incarnation: int
    silence_s: float = 0.0
    """After so long a silence you may take me for dead; 0: after as long as you like."""


class Refused(_Message, frozen=True, tag=2):
    """One end of a link to the other instead of a hello: why we cannot talk (an error's kind and words)."""

    error: ErrorReport


class Heartbeat(_Message, frozen=True, tag=3):
    """Each end of an idle link to the other: I am alive."""


class Goodbye(_Message, frozen=True, tag=4):
    """One end of a link to the other: I leave on purpose, do not wait for me."""


class PeerLost(_Message, frozen=True, tag=5):
    """The transport to every local actor: nothing more will come from `node` in this incarnation."""

    node: str
    reason: str

    @property
    def may_return(self) -> bool:
        """Whether it is the process that has ended, and not the machine that is cut off or hangs."""
        return self.reason in ("closed", "connection lost", "replaced by a newer incarnation")


class PeerRefused(_Message, frozen=True, tag=6):
    """The transport to every local actor: `node` does not want to talk to us, or we not to it."""

    node: str
    error: ErrorReport


# --- hosts and islands -------------------------------------------------------------------------------


class RegisterHost(_Message, frozen=True, tag=10):
    """HostExecutor to ResourceManager: this host is up and wants to join its island."""

    island: str
    island_hosts: int
    """0: this host, a spare, does not know."""
    local_devices: int
    platform: str
    endpoint: str
    process: int
    """Operating system process id, for people who look for it."""
    spare: bool = False
    """Takes a free place in `island` (in any island when that is empty), and waits if there is none."""
    epoch: int = 0
    """The epoch of `island` that I am in, with `members`: I have lost the controller meanwhile."""
    members: tuple[str, ...] = ()
    """All hosts of that epoch, in the order of their ranks."""


class HostRejected(_Message, frozen=True, tag=11):
    """ResourceManager to HostExecutor: you cannot join, stop."""

    error: ErrorReport


class FormIsland(_Message, frozen=True, tag=12):
    """ResourceManager to every HostExecutor of an island: join this epoch's group at your rank."""

    island: str
    epoch: int
    hosts: tuple[str, ...]
    rank: int
    group_address: str
    secret: bytes
    """Key with which the cluster signs client tickets."""


class IslandJoined(_Message, frozen=True, tag=13):
    """HostExecutor to ResourceManager: I am in the group, with these devices."""

    island: str
    epoch: int
    kind: str
    devices: int
    memory_bytes: int | None
    """Memory of one device, None where nothing limits it."""


class IslandJoinFailed(_Message, frozen=True, tag=14):
    """HostExecutor to ResourceManager: I could not join."""

    island: str
    epoch: int
    error: ErrorReport


class LeaveIsland(_Message, frozen=True, tag=15):
    """ResourceManager to HostExecutor: the epoch is over; come back as a new incarnation."""

    island: str
    epoch: int
    reason: str


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A host and the endpoint at which others reach it."""

    node: str
    endpoint: str
    member: bool = True
    """In an island that is ready; the others are here, and may have copies to give."""


class Directory(_Message, frozen=True, tag=16):
    """ResourceManager to all hosts and clients: these hosts exist now, and where."""

    peers: tuple[Peer, ...]


class IslandFormed(_Message, frozen=True, tag=17):
    """ResourceManager to Controller (local): an island is ready under a new epoch."""

    island: str
    epoch: int
    hosts: tuple[str, ...]
    device_memory_bytes: int | None = None
    """Memory of each device; None where nothing limits it."""


class IslandLost(_Message, frozen=True, tag=18):
    """ResourceManager to Controller (local): an island left its epoch, with all that was on it."""

    island: str
    epoch: int
    error: ErrorReport
    host: str = ""
    """Who was lost, if that is the reason."""


class CoordinationStarted(_Message, frozen=True, tag=19):
    """The coordination services to ResourceManager (local): an epoch's service is up, or is not."""

    island: str
    epoch: int
    address: str
    error: str


class StartCoordination(_Message, frozen=True, tag=20):
    """ResourceManager to the coordination services (local): a fresh service for this epoch's group."""

    island: str
    epoch: int
    hosts: int


class StopCoordination(_Message, frozen=True, tag=21):
    """ResourceManager to the coordination services (local): this epoch's group is over."""

    island: str
    epoch: int


class EndEpoch(_Message, frozen=True, tag=22):
    """IslandScheduler to ResourceManager (local): the gang's order is broken, form the island anew."""

    island: str
    epoch: int
    reason: str


class DrainHost(_Message, frozen=True, tag=24):
    """ClientSession to Controller and on to ResourceManager: move all work and data off this host."""

    request: int
    node: str
    client: str = ""
    """Node of the client, whom the resource manager answers; the controller fills it in."""


class Draining(_Message, frozen=True, tag=27):
    """ResourceManager to Controller (local): these hosts are here only to be emptied."""

    nodes: tuple[str, ...]


class HostEmptied(_Message, frozen=True, tag=26):
    """Controller to ResourceManager (local): nothing on this host is needed any more."""

    node: str


class Leave(_Message, frozen=True, tag=25):
    """ResourceManager to HostExecutor: you are drained and hold nothing any more, end for good."""

    reason: str


# --- clients -----------------------------------------------------------------------------------------


class Attach(_Message, frozen=True, tag=30):
    """ClientSession to Controller: let me in, with this weight and priority for my work."""

    name: str
    share: float
    priority: int
    resume: int = 0
    """My number with an earlier controller: I tell you all that it knew of me, and then `Resumed`."""


class Attached(_Message, frozen=True, tag=31):
    """Controller to ClientSession: your number, your ticket for the hosts, how far ahead you may run."""

    client: int
    ticket: bytes
    run_credits: int
    islands: tuple[str, ...]


class Identify(_Message, frozen=True, tag=32):
    """ClientSession to ObjectStore, first of all: I am this client, and this ticket proves it."""

    client: int
    ticket: bytes


class Evicted(_Message, frozen=True, tag=33):
    """Controller to ClientSession: you are not known here (any more), nothing of yours exists."""

    reason: str


class AllocateSlice(_Message, frozen=True, tag=34):
    """ClientSession to Controller and on to ResourceManager: bind this many virtual devices."""

    slice: int
    devices: int
    kind: str | None
    island: str | None
    topology: tuple[int, ...] | None
    resumed: bool = False
    """An earlier controller may have bound it: wait for the hosts, which are on their way."""
    formerly: str = ""
    """The island on which it was."""


class SliceBound(_Message, frozen=True, tag=35):
    """ResourceManager to Controller and ClientSession: the slice exists, on these devices."""

    slice: int
    island: str
    platform: str
    kind: str
    devices: tuple[DeviceAddress, ...]


class SliceRefused(_Message, frozen=True, tag=36):
    """ResourceManager to ClientSession (through Controller): no such slice can be had."""

    slice: int
    error: ErrorReport


class ReleaseSlice(_Message, frozen=True, tag=37):
    """ClientSession to Controller and on to ResourceManager: the slice is no longer used."""

    slice: int


class SliceLost(_Message, frozen=True, tag=38):
    """Controller to ClientSession: the slice's island is gone; its arrays fail with this error."""

    slice: int
    error: ErrorReport


class Artifact(msgspec.Struct, frozen=True, array_like=True):
    """A serialized computation under its SHA-256."""

    digest: bytes
    blob: bytes


class RegisterProgram(_Message, frozen=True, tag=40):
    """ClientSession to Controller: a program I will run, with the artifacts not sent before."""

    program: int
    body: Program
    artifacts: tuple[Artifact, ...]
    released: bool = False
    """I will not run it; it made what I still have (see `Resumed`)."""


class ReleaseProgram(_Message, frozen=True, tag=41):
    """ClientSession to Controller: I will not run this program any more."""

    program: int


class Run(_Message, frozen=True, tag=42):
    """ClientSession to Controller: run a program; arguments are arrays or small host values as bytes."""

    run: int
    program: int
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]


class RunFailed(_Message, frozen=True, tag=43):
    """Controller to ClientSession: a run did not start, or its island died; these results never will be."""

    run: int
    results: tuple[int, ...]
    error: ErrorReport


class RunsSettled(_Message, frozen=True, tag=44):
    """Controller to ClientSession: so many runs have ended, you may send as many more."""

    count: int


class FileSource(msgspec.Struct, frozen=True, array_like=True):
    """An array in a checkpoint on disk."""

    path: str
    checkpoint: str
    """Which one: what is at the path may be replaced."""
    name: str


class CreateArray(_Message, frozen=True, tag=45):
    """ClientSession to Controller: I am uploading this array straight to its hosts."""

    array: int
    spec: ArraySpec
    bound: int = 1
    """How often I have seen its slice bound: 0 if I could not send anything yet."""
    source: FileSource | None = None
    """I upload nothing: its hosts are to read it from there."""


class Delete(_Message, frozen=True, tag=46):
    """ClientSession to Controller: I hold no more references to these arrays."""

    arrays: tuple[int, ...]


class GetStatus(_Message, frozen=True, tag=47):
    """ClientSession to Controller: describe the cluster."""

    request: int


class HostStatus(msgspec.Struct, frozen=True, array_like=True):
    """One host in a status report."""

    node: str
    process: int
    devices: int
    endpoint: str
    joined: bool


class IslandStatus(msgspec.Struct, frozen=True, array_like=True):
    """One island in a status report."""

    island: str
    epoch: int
    state: str
    platform: str
    kind: str
    hosts: tuple[HostStatus, ...]
    expected_hosts: int
    slices: int
    queued: int
    launched: int
    missing: tuple[str, ...] = ()
    """Hosts that have a place in it and are not here."""


class WaitingHost(msgspec.Struct, frozen=True, array_like=True):
    """One host without a place in an island, in a status report."""

    node: str
    state: str
    """`spare`: it takes the place of one that is lost; `draining`: it ends when others have what it holds."""
    island: str
    """Where it may take a place; empty for any island."""
    process: int
    devices: int
    endpoint: str


class ClientStatus(msgspec.Struct, frozen=True, array_like=True):
    """One client in a status report."""

    client: int
    name: str
    arrays: int
    programs: int
    slices: int
    runs_in_flight: int


class RunStatus(msgspec.Struct, frozen=True, array_like=True):
    """One run in flight in a status report."""

    run: int
    """The number that its client gave it, also when it is being run again."""
    program: str
    islands: tuple[str, ...]
    segments_left: int
    age_s: float


class Status(_Message, frozen=True, tag=48):
    """Controller to ClientSession: the cluster as it stands."""

    request: int
    pw_version: str
    jax_version: str
    policy: str
    islands: tuple[IslandStatus, ...]
    clients: tuple[ClientStatus, ...]
    runs: tuple[RunStatus, ...] = ()
    """The oldest ones of each client."""
    waiting: tuple[WaitingHost, ...] = ()
    """Hosts without a place in an island."""


class GetStats(_Message, frozen=True, tag=49):
    """ClientSession to Controller or ObjectStore: your counters, please."""

    request: int


class Stats(_Message, frozen=True, tag=50):
    """Controller or ObjectStore to ClientSession: the counters of this process."""

    request: int
    node: str
    counters: dict[str, int]


class Checkpoint(_Message, frozen=True, tag=51):
    """ClientSession to Controller, in order with runs: copy these arrays to host memory, here and elsewhere."""

    request: int
    arrays: tuple[int, ...]


class Inquire(_Message, frozen=True, tag=52):
    """ClientSession to Controller: a host could not say what became of these arrays; can you?"""

    request: int
    arrays: tuple[int, ...]


class Answered(_Message, frozen=True, tag=53):
    """Controller to ClientSession: what you asked for is done, or why not.

    To an `Inquire`: the arrays are where your slices say now, or you have been told that they are lost.
    """

    request: int
    error: ErrorReport | None


class UploadAgain(_Message, frozen=True, tag=54):
    """Controller to ClientSession: this input was lost with its hosts and is needed, send it once more.

    It is to be uploaded as `name`, which is another array where nobody holds this one any more.
    """

    array: int
    name: int


class InputGone(_Message, frozen=True, tag=55):
    """ClientSession to Controller: I do not have the value that was to be uploaded as this array."""

    array: int


class ForgetInputs(_Message, frozen=True, tag=56):
    """Controller to ClientSession: these inputs will never be asked for again."""

    arrays: tuple[int, ...]


class ForgetRuns(_Message, frozen=True, tag=57):
    """Controller to ClientSession: no controller will ever have to know of these runs again."""

    runs: tuple[int, ...]


class KnownArray(msgspec.Struct, frozen=True, array_like=True):
    """An array that only copies of it can bring back."""

    array: int
    spec: ArraySpec


class FailedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array that never will be."""

    array: int
    error: ErrorReport


class Resumed(_Message, frozen=True, tag=58):
    """ClientSession to Controller: this is what I have; before it came my slices, programs, inputs and runs."""

    held: tuple[int, ...]
    known: tuple[KnownArray, ...]
    """Those held that no input and no run before was about."""
    failed: tuple[FailedArray, ...]
    copied: tuple[int, ...]
    """Arrays that were checkpointed."""


# --- gang scheduling ---------------------------------------------------------------------------------


class AddClient(_Message, frozen=True, tag=60):
    """Controller to IslandScheduler (local): a client's work may come, with this weight and priority."""

    client: int
    share: float
    priority: int


class Submit(_Message, frozen=True, tag=61):
    """Controller to every IslandScheduler a run touches (local): queue these segments of the run.

    `segments` are this island's; `depends` runs parallel to it and names (island, segment) pairs.
    """

    run: int
    program: int
    segments: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
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


class SegmentLaunched(_Message, frozen=True, tag=62):
    """IslandScheduler to the IslandSchedulers that wait for it (local): a producer has been launched."""

    run: int
    segment: int


class SegmentDone(_Message, frozen=True, tag=63):
    """IslandScheduler to those that wait for it, and to Controller (local): a segment has ended."""

    run: int
    segment: int
    device_time_us: int
    lost: ErrorReport | None = None
    """It has no value because a host was lost, not because of anything in the program."""


class UploadEnded(_Message, frozen=True, tag=64):
    """Controller to IslandScheduler (local): an awaited array is there on all its hosts."""

    array: int


class Release(_Message, frozen=True, tag=65):
    """Controller to IslandScheduler (local): drop these arrays, after all the client's earlier work."""

    client: int
    arrays: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    """Holders of each array."""


class RemoveClient(_Message, frozen=True, tag=66):
    """Controller to IslandScheduler (local): drop a client's queue and, on hosts, all it owns."""

    client: int


class CancelRun(_Message, frozen=True, tag=67):
    """Controller to IslandScheduler (local): forget the segments of this run that are still queued."""

    run: int
    reason: str = ""
    """Why the run must end, also what is launched: if it does not by itself, the epoch ends."""
    grace_s: float = 0.0
    """How long it may take to end by itself."""


class InstallProgram(_Message, frozen=True, tag=68):
    """Controller to IslandScheduler (local): let your hosts compile this, in this order on each."""

    program: int
    body: Program
    plans: tuple[HostPlan, ...]
    artifacts: tuple[Artifact, ...]
    memory: IslandMemory | None = None
    """What a run takes on this island; None where nobody counts."""
    install: int = 0
    """Programs are installed again when they are lowered again, and each time has a number."""


class ProgramInstalled(_Message, frozen=True, tag=69):
    """IslandScheduler to Controller (local): all hosts of the island have compiled it, or one could not."""

    island: str
    program: int
    error: ErrorReport | None
    install: int = 0


class UninstallProgram(_Message, frozen=True, tag=70):
    """Controller to IslandScheduler (local): hosts may forget this program after its earlier work."""

    program: int
    hosts: tuple[str, ...]


class Install(_Message, frozen=True, tag=71):
    """IslandScheduler to HostExecutor: compile your part of this program."""

    epoch: int
    program: int
    body: Program
    plan: HostPlan
    artifacts: tuple[Artifact, ...]
    install: int = 0


class Installed(_Message, frozen=True, tag=72):
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


class Launch(_Message, frozen=True, tag=73):
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


class Discard(_Message, frozen=True, tag=74):
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


class Progress(_Message, frozen=True, tag=75):
    """HostExecutor to IslandScheduler, once a loop turn: these launches have ended."""

    epoch: int
    finished: tuple[Finished, ...]


class LaunchGap(_Message, frozen=True, tag=76):
    """HostExecutor to IslandScheduler: a launch number is missing, I have stopped."""

    epoch: int
    expected: int
    got: int


class GangBroken(_Message, frozen=True, tag=77):
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


class CopyArrays(_Message, frozen=True, tag=78):
    """Controller to IslandScheduler (local): have these copied after the client's earlier work."""

    client: int
    copies: tuple[tuple[str, Copy], ...]
    """What each host is to copy."""
    files: tuple[tuple[str, CopyFile], ...] = ()
    """What each host is to write to disk."""


class Replicate(_Message, frozen=True, tag=79):
    """IslandScheduler to HostExecutor, in launch order: copy these to host memory, write these to disk."""

    epoch: int
    sequence: int
    copies: tuple[Copy, ...]
    files: tuple[CopyFile, ...] = ()


class RunRefused(_Message, frozen=True, tag=80):
    """IslandScheduler to Controller (local): this run cannot be; fail it, and cancel it everywhere.

    There is no room for it: the client's queue on the island stands still until its `CancelRun` comes back.
    Or one host of a gang has failed, so that the gang's hosts have different things in `results`.
    """

    run: int
    error: ErrorReport
    results: tuple[int, ...] = ()


class ArrayPlaced(_Message, frozen=True, tag=81):
    """Controller to IslandScheduler (local): this array takes memory from now on, until its release.

    For what no run makes: uploads and restored arrays. An older array of this number is gone.
    """

    array: int
    devices: tuple[DeviceAddress, ...]
    """The physical device at every position of its mesh."""
    shard_bytes: int


class RunAtHead(_Message, frozen=True, tag=82):
    """IslandScheduler to the first of a run's IslandSchedulers (local): it is next of its client here."""

    run: int


class ReserveRun(_Message, frozen=True, tag=83):
    """IslandScheduler to the next of a run's IslandSchedulers (local): I have room for it, your turn."""

    run: int


class RunAdmitted(_Message, frozen=True, tag=84):
    """The last of a run's IslandSchedulers to all others (local): every island has memory for it."""

    run: int


# --- runs that are ended -----------------------------------------------------------------------------


class CallEnded(_Message, frozen=True, tag=130):
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


class RunStarted(_Message, frozen=True, tag=131):
    """IslandScheduler to Controller (local): a run with a timeout has been launched here."""

    run: int


class Cancel(_Message, frozen=True, tag=132):
    """ClientSession to Controller: end the runs that are to make these arrays."""

    arrays: tuple[int, ...]


class CancelRuns(_Message, frozen=True, tag=133):
    """ClientSession to Controller: end a run of any client (`run` 0: all that this client has in flight)."""

    request: int
    client: int
    run: int = 0


# --- data --------------------------------------------------------------------------------------------


class EdgeCredit(_Message, frozen=True, tag=90):
    """Receiving ShardCoordinator to the sending one: put the bytes of this edge here.

    Without a landing: I have no room for them, do not send.
    """

    run: int
    edge: int
    landing: Landing | None


class EdgeData(_Message, frozen=True, tag=91):
    """Sending ShardCoordinator to the receiving one: the bytes of a small edge."""

    run: int
    edge: int
    data: bytes


class EdgeFailed(_Message, frozen=True, tag=92):
    """Sending ShardCoordinator to the receiving one: this edge has no value, its producer failed."""

    run: int
    edge: int
    error: ErrorReport
    alone: bool = False
    """There is a value, only it cannot be sent to this host; others may get theirs."""


class EdgeProbe(_Message, frozen=True, tag=113):
    """Receiving ShardCoordinator to the sending one: I have waited long for this edge, is it still to come?"""

    run: int
    edge: int


class EdgeGone(_Message, frozen=True, tag=114):
    """Sending ShardCoordinator to the receiving one: I have sent that, and will not send it again."""

    run: int
    edge: int


class Upload(_Message, frozen=True, tag=93):
    """ClientSession to ObjectStore: take your shards of this array (inline, or tell me where)."""

    array: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    data: bytes | None


class UploadLanding(_Message, frozen=True, tag=94):
    """ObjectStore to ClientSession: put the bytes of this array's shards here."""

    array: int
    landing: Landing


class Uploaded(_Message, frozen=True, tag=95):
    """ObjectStore to Controller: my shards of this array are in device memory."""

    array: int
    error: ErrorReport | None


class Fetch(_Message, frozen=True, tag=96):
    """ClientSession to ObjectStore: send me these shards (mesh positions) when they are ready."""

    request: int
    array: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    positions: tuple[int, ...]
    landing: Landing | None


class Fetched(_Message, frozen=True, tag=97):
    """ObjectStore to ClientSession: the bytes of a small fetch."""

    request: int
    data: bytes


class Wait(_Message, frozen=True, tag=98):
    """ClientSession to ObjectStore: tell me when your shards of these arrays are ready."""

    request: int
    arrays: tuple[int, ...]


class Ready(_Message, frozen=True, tag=99):
    """ObjectStore to ClientSession: your shards on this host are ready."""

    request: int


class RequestFailed(_Message, frozen=True, tag=100):
    """Controller or ObjectStore to ClientSession: a fetch, wait or query has failed."""

    request: int
    error: ErrorReport


class UploadAborted(_Message, frozen=True, tag=102):
    """ClientSession to ObjectStore: the bytes of this upload will not come."""

    array: int
    error: ErrorReport


class CancelRequest(_Message, frozen=True, tag=101):
    """ClientSession to ObjectStore: I no longer wait for this fetch or wait."""

    request: int


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of one array."""

    array: int
    boxes: tuple[Box, ...]


class Holdings(_Message, frozen=True, tag=103):
    """ObjectStore to Controller: I have these boxes in host memory, until you say otherwise.

    From a new incarnation it comes before anything else, with what the last one handed over.
    """

    holdings: tuple[Holding, ...]


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A box of an array, and a host that has it in host memory."""

    box: Box
    host: str


class Restore(_Message, frozen=True, tag=104):
    """Controller to ObjectStore: make your shards of `array` from copies; answered by `Uploaded`."""

    array: int
    copied: int
    """The array that the copies are of."""
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    sources: tuple[Source, ...]


class DropUploads(_Message, frozen=True, tag=115):
    """Controller to ObjectStore: whoever uploaded these does not hold them any more."""

    arrays: tuple[int, ...]


class FetchReplica(_Message, frozen=True, tag=105):
    """ObjectStore to ObjectStore: send me these boxes (packed, at the landing if there is one)."""

    request: int
    array: int
    dtype: str
    boxes: tuple[Box, ...]
    landing: Landing | None


class ReplicaData(_Message, frozen=True, tag=106):
    """ObjectStore to ObjectStore: the bytes of a small fetch."""

    request: int
    data: bytes


class ReplicaRefused(_Message, frozen=True, tag=107):
    """ObjectStore to ObjectStore: I do not have these boxes, or cannot send them."""

    request: int
    error: ErrorReport


class OfferReplica(_Message, frozen=True, tag=108):
    """ObjectStore or Controller to ObjectStore: fetch these boxes of this array from `host`, keep them."""

    array: int
    dtype: str
    boxes: tuple[Box, ...]
    host: str


class DropReplicas(_Message, frozen=True, tag=109):
    """Controller to ObjectStore: forget the copies of these arrays in host memory."""

    arrays: tuple[int, ...]


class LinkLost(_Message, frozen=True, tag=111):
    """ClientSession to Controller: I cannot tell what of my last words has reached this host."""

    host: str


class ArraysLost(_Message, frozen=True, tag=110):
    """ObjectStore to Controller: somebody asks for these, and here they failed because a host was lost."""

    arrays: tuple[int, ...]


# --- checkpoints on disk -----------------------------------------------------------------------------


class SaveArrays(_Message, frozen=True, tag=140):
    """ClientSession to Controller, in order with runs: have these arrays written to disk, as one checkpoint."""

    request: int
    checkpoint: str
    path: str
    overwrite: bool
    arrays: tuple[int, ...]
    names: tuple[str, ...]
    tree: bytes
    """The client's own part of the manifest."""


class FileWritten(_Message, frozen=True, tag=141):
    """ObjectStore to Controller: my file of this checkpoint is on disk, or why not."""

    checkpoint: str
    path: str
    error: ErrorReport | None


class CommitFiles(_Message, frozen=True, tag=142):
    """Controller to one ObjectStore: all files of this checkpoint are written, make it the one at its path."""

    checkpoint: str
    path: str
    overwrite: bool
    files: tuple[str, ...]
    tree: bytes
    others: tuple[str, ...]
    """Checkpoints under way to the same path: what else was left there is of none."""


class FilesCommitted(_Message, frozen=True, tag=143):
    """ObjectStore to Controller: the checkpoint is at its path, or nothing of it is anywhere."""

    checkpoint: str
    error: ErrorReport | None


class AbandonFiles(_Message, frozen=True, tag=144):
    """Controller to one ObjectStore: this checkpoint will not be, remove what there is of it."""

    checkpoint: str
    path: str


class Describe(_Message, frozen=True, tag=145):
    """ClientSession to ObjectStore: what is in the checkpoint at this path?"""

    request: int
    path: str


class Described(_Message, frozen=True, tag=146):
    """ObjectStore to ClientSession: this checkpoint is, and here is what the client said that wrote it."""

    request: int
    checkpoint: str
    tree: bytes


class ReadArray(_Message, frozen=True, tag=147):
    """Controller to ObjectStore: make your shards of `array` from files; answered by `Uploaded`."""

    array: int
    source: FileSource
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]


# --- why it does not go on ---------------------------------------------------------------------------


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

    `state` is `missing` (it has not come), `queued` behind another one, `waiting` at the head of the queue,
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


class Stalled(_Message, frozen=True, tag=120):
    """IslandScheduler to Controller (local): nothing has gone on here for a while, log the reason."""

    island: str


class Explain(_Message, frozen=True, tag=121):
    """ClientSession to Controller: why does it not go on? I wait for these hosts."""

    request: int
    hosts: tuple[str, ...] = ()


class ExplainIsland(_Message, frozen=True, tag=122):
    """Controller to IslandScheduler (local): what is launched, and what does the rest wait for?"""

    request: int
    run: int
    """What is launched of this one is to be told in any case."""


class IslandReport(_Message, frozen=True, tag=123):
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


class ExplainHost(_Message, frozen=True, tag=124):
    """Controller to HostExecutor: how far are these launches (run, segment), and what do you do?"""

    request: int
    work: tuple[tuple[int, int], ...]


class HostReport(_Message, frozen=True, tag=125):
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


class Explanation(_Message, frozen=True, tag=126):
    """Controller to ClientSession: the story in words, and all that was found out for it."""

    request: int
    text: str
    islands: tuple[IslandStatus, ...]
    work: tuple[IslandReport, ...]
    hosts: tuple[HostReport, ...]
    silent: tuple[HostSilence, ...]
    clients: tuple[ClientReport, ...]


Message = (
    Hello | Refused | Heartbeat | Goodbye | RegisterHost | HostRejected | FormIsland | IslandJoined
    | IslandJoinFailed | LeaveIsland | Directory | Attach | Attached | Identify | Evicted
    | AllocateSlice | SliceBound | SliceRefused | ReleaseSlice | SliceLost | RegisterProgram
    | ReleaseProgram | Run | RunFailed | RunsSettled | CreateArray | Delete | GetStatus | Status
    | GetStats | Stats | Install | Installed | Launch | Discard | Progress | LaunchGap | EdgeCredit
    | EdgeData | EdgeFailed | Upload | UploadLanding | Uploaded | Fetch | Fetched | Wait | Ready
    | RequestFailed | CancelRequest | UploadAborted | DrainHost | Leave | Checkpoint | Inquire
    | Answered | UploadAgain | InputGone | ForgetInputs | ForgetRuns | Resumed | GangBroken | Replicate
    | Holdings
    | CallEnded | Cancel | CancelRuns
    | ArraysLost | DropUploads | EdgeProbe | EdgeGone | LinkLost
    | Restore | FetchReplica | ReplicaData | ReplicaRefused | OfferReplica | DropReplicas
    | SaveArrays | FileWritten | CommitFiles | FilesCommitted | AbandonFiles | Describe | Described
    | ReadArray
    | Explain | ExplainHost | HostReport | Explanation
)  # fmt: skip
"""Everything that may arrive from another process (local notes are not among them)."""
