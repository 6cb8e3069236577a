"""The whole protocol: every message that crosses between actors, in one package.

Each message is a frozen struct that travels as a tagged msgpack array. Its docstring is one sentence:
who sends it, to whom, what it promises. A message between two actors of one process is the same
struct and skips the codec. Tags are part of the protocol: append, never reuse, and raise
`PROTOCOL_VERSION` when the meaning of an old one changes.

The modules go by whom the messages concern; what others import, they import from here.
"""

from __future__ import annotations

from pw.core.messages.base import *
from pw.core.messages.clients import *
from pw.core.messages.edges import *
from pw.core.messages.files import *
from pw.core.messages.gangs import *
from pw.core.messages.islands import *
from pw.core.messages.links import *
from pw.core.messages.reports import *
from pw.core.messages.status import *
from pw.core.messages.stores import *

Message = (
    Hello | Refused | Heartbeat | Goodbye | RegisterHost | HostRejected | FormIsland | IslandJoined
    | IslandJoinFailed | LeaveIsland | Directory | Attach | Attached | Identify | Evicted
    | AllocateSlice | SliceBound | SliceRefused | ReleaseSlice | SliceLost | RegisterProgram
    | ReleaseProgram | Run | RunFailed | RunsSettled | CreateArray | Delete | GetStatus | Status
    | GetStats | Stats | Install | Installed | Launch | Discard | Progress | LaunchGap | EdgeCredit
    | EdgeData | EdgeFailed | Upload | UploadLanding | Uploaded | Fetch | Fetched | Wait | Ready
    | RequestFailed | CancelRequest | UploadAborted | DrainHost | Leave | Checkpoint | Inquire
    | Answered | UploadAgain | InputGone | ForgetInputs | ForgetRuns | Resumed | GangBroken | Replicate
    | Holdings | HoldsNoMore
    | CallEnded | Held | Cancel | CancelRuns
    | ArraysLost | DropUploads | EdgeProbe | EdgeGone | LinkLost
    | Restore | FetchReplica | ReplicaData | ReplicaRefused | OfferReplica | DropReplicas
    | SaveArrays | FileWritten | CommitFiles | FilesCommitted | AbandonFiles | Describe | Described
    | ReadArray | Printed
    | Explain | ExplainHost | HostReport | Explanation
)  # fmt: skip
"""Everything that may arrive from another process (local notes are not among them)."""
