"""Which role may send which message to which actor: one table, checked before a handler runs.

A process is the controller, a worker, or a client, and its name says which. Where links have
certificates, the transport has checked that the certificate says the same. So an actor need not ask
whether a message may come from such a process at all; it asks only whose the things are that the
message names.

An embedded cluster has the controller and a client in one process, called `controller`. So the
controller may also send what clients send.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

from pw.core.ids import CONTROLLER
from pw.core.messages import (
    AbandonFiles,
    AllocateSlice,
    Answered,
    ArraysLost,
    Attach,
    Attached,
    CallClient,
    CallEnded,
    CallLanding,
    CallReturned,
    Cancel,
    CancelRequest,
    CancelRuns,
    Checkpoint,
    CommitFiles,
    Compile,
    Compiled,
    Copied,
    CreateArray,
    Delete,
    Describe,
    Described,
    Directory,
    Discard,
    DrainHost,
    DropReplicas,
    DropUploads,
    EdgeCredit,
    EdgeData,
    EdgeFailed,
    EdgeGone,
    EdgeProbe,
    Evicted,
    Explain,
    ExplainHost,
    Explanation,
    Fetch,
    Fetched,
    FetchReplica,
    FilesCommitted,
    FileWritten,
    ForgetInputs,
    ForgetRuns,
    FormIsland,
    GangBroken,
    GetMemory,
    GetPlan,
    GetStats,
    GetStatus,
    Holdings,
    HoldsNoMore,
    HostMeasured,
    HostRejected,
    HostReport,
    Identify,
    InputGone,
    Inquire,
    Install,
    Installed,
    IslandJoined,
    IslandJoinFailed,
    Launch,
    LaunchGap,
    Leave,
    LeaveIsland,
    LinkLost,
    MeasureHost,
    Memory,
    Observe,
    Observed,
    Offer,
    OfferReplica,
    PassedLaunches,
    Printed,
    ProgramPlan,
    Progress,
    ReadArray,
    ReadRecords,
    Ready,
    Records,
    RegisterHost,
    RegisterProgram,
    ReleaseProgram,
    ReleaseSlice,
    ReplicaData,
    ReplicaRefused,
    Replicate,
    RequestFailed,
    Restore,
    Resumed,
    Run,
    RunFailed,
    RunsSettled,
    SaveArrays,
    SliceBound,
    SliceLost,
    SliceRefused,
    Stats,
    Status,
    Upload,
    UploadAborted,
    UploadAgain,
    Uploaded,
    UploadLanding,
    Wait,
)

CLIENT_PREFIX = "client-"
"""Node names of clients begin with it."""

_NAMES_KEPT = 1 << 14


class Role(StrEnum):
    """What a process is in its cluster."""

    CONTROLLER = "controller"
    WORKER = "worker"
    CLIENT = "client"


def role_of(node: str) -> Role:
    """The role of the node with a name: clients are called `client-...`, and workers otherwise."""
    if node == CONTROLLER:
        return Role.CONTROLLER
    return Role.CLIENT if node.startswith(CLIENT_PREFIX) else Role.WORKER


_C, _W, _U = (Role.CONTROLLER,), (Role.WORKER,), (Role.CLIENT, Role.CONTROLLER)

TABLE: tuple[tuple[tuple[Role, ...], str, tuple[type, ...]], ...] = (
    # clients
    (_U, "controller", (Attach, AllocateSlice, ReleaseSlice)),
    (_U, "controller", (RegisterProgram, ReleaseProgram, Run, Cancel, CancelRuns)),
    (_U, "controller", (CreateArray, Offer, Delete, InputGone, Inquire, Resumed, LinkLost)),
    (_U, "controller", (Checkpoint, SaveArrays)),
    (_U, "controller", (GetStatus, GetStats, Explain, GetMemory, GetPlan, ReadRecords)),
    (_U, "controller", (DrainHost,)),
    (_U, "store", (Identify, Upload, UploadAborted, Fetch, Wait, CancelRequest)),
    (_U, "store", (Compile, CallReturned, CallLanding)),
    (_U, "store", (GetStats, Describe, ReadRecords)),
    # the controller
    (_C, "session", (Attached, Evicted, Directory)),
    (_C, "session", (SliceBound, SliceRefused, ReleaseSlice, SliceLost)),
    (_C, "session", (RunFailed, RunsSettled, Answered, UploadAgain, ForgetInputs, ForgetRuns)),
    (_C, "session", (Status, Stats, Explanation, Memory, ProgramPlan, Records, RequestFailed)),
    (_C, "executor", (HostRejected, FormIsland, LeaveIsland, Leave, Directory)),
    (_C, "executor", (Install, Launch, Discard, Replicate, CallEnded, ExplainHost)),
    (_C, "store", (Restore, ReadArray, DropUploads, OfferReplica, DropReplicas)),
    (_C, "store", (CommitFiles, AbandonFiles, MeasureHost)),
    (_C, "coordinator", (Observe,)),
    # workers
    (_W, "resources", (RegisterHost, IslandJoined, IslandJoinFailed)),
    (_W, "scheduler", (Installed, Progress, PassedLaunches, CallEnded, LaunchGap, GangBroken)),
    (_W, "controller", (Uploaded, ArraysLost, Copied, Holdings, HoldsNoMore)),
    (_W, "controller", (FileWritten, FilesCommitted, HostReport, HostMeasured, Observed)),
    (_W, "coordinator", (EdgeCredit, EdgeData, EdgeFailed, EdgeProbe, EdgeGone)),
    (_W, "store", (FetchReplica, ReplicaData, ReplicaRefused)),
    (_W, "session", (UploadLanding, Fetched, Ready, RequestFailed, Printed)),
    (_W, "session", (Compiled, CallClient, CallLanding, Stats, Described, Records)),
)
"""Roles that may send, the kind of actor that they may send to, and the messages."""

_PERMITTED: dict[tuple[Role, str], set[type]] = {}
for _roles, _actor, _kinds in TABLE:
    for _role in _roles:
        _PERMITTED.setdefault((_role, _actor), set()).update(_kinds)


@lru_cache(maxsize=_NAMES_KEPT)
def _permitted(node: str, actor: str) -> set[type]:
    return _PERMITTED.get((role_of(node), actor.partition("/")[0]), set())


def permits(node: str, actor: str, kind: type) -> bool:
    """Whether the node may send a message of this kind to an actor of this name on another node."""
    return kind in _permitted(node, actor)
