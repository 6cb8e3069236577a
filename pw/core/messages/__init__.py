"""The whole protocol: every message between actors.

Each message is a frozen struct that travels as a tagged msgpack array. Its docstring names the
sender and the receiver, and what the message promises. A message marked *local* never leaves the
controller process. Tags are
part of the protocol: append, never reuse, and raise `PROTOCOL_VERSION` when the meaning of an old tag changes.

Other modules import all messages from this package.
"""

from __future__ import annotations

from pw.core.messages.base import *
from pw.core.messages.clients import *
from pw.core.messages.compiling import *
from pw.core.messages.edges import *
from pw.core.messages.files import *
from pw.core.messages.gangs import *
from pw.core.messages.islands import *
from pw.core.messages.links import *
from pw.core.messages.memory import *
from pw.core.messages.observing import *
from pw.core.messages.plans import *
from pw.core.messages.reports import *
from pw.core.messages.status import *
from pw.core.messages.stores import *
from pw.core.messages.timelines import *

Message = (
    Hello | Refused | Heartbeat | Goodbye | RegisterHost | HostRejected | FormIsland | IslandJoined
    | IslandJoinFailed | LeaveIsland | Directory | Attach | Attached | Identify | Evicted
    | AllocateSlice | SliceBound | SliceRefused | ReleaseSlice | SliceLost | RegisterProgram
    | ReleaseProgram | Run | RunFailed | RunsSettled | CreateArray | Delete | GetStatus | Status
    | GetStats | Stats | Install | Installed | Launch | Discard | Progress | LaunchGap | EdgeCredit
    | EdgeData | EdgeFailed | Upload | UploadLanding | Uploaded | Fetch | Fetched | Wait | Ready
    | RequestFailed | CancelRequest | UploadAborted | DrainHost | Leave | Checkpoint | Inquire
    | Answered | UploadAgain | InputGone | ForgetInputs | ForgetRuns | Resumed | GangBroken | Replicate
    | Copied | Holdings | HoldsNoMore
    | CallEnded | PassedLaunches | Cancel | CancelRuns
    | ArraysLost | DropUploads | EdgeProbe | EdgeGone | LinkLost
    | Restore | FetchReplica | ReplicaData | ReplicaRefused | OfferReplica | DropReplicas
    | SaveArrays | FileWritten | CommitFiles | FilesCommitted | AbandonFiles | Describe | Described
    | ReadArray | Offer | Printed | Compile | Compiled | CallClient | CallReturned | CallLanding
    | Explain | ExplainHost | HostReport | Explanation
    | GetMemory | Memory | MeasureHost | HostMeasured | Observe | Observed | ReadRecords | Records
    | GetPlan | ProgramPlan
)  # fmt: skip
"""All messages that may arrive from another process."""
