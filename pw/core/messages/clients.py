"""What a client and the controller say to each other: slices, programs, runs, arrays."""

from __future__ import annotations

import msgspec

from pw.core.compact import Compact, OnPlacement, OnSpec
from pw.core.errors import ErrorReport
from pw.core.messages.base import Base
from pw.core.messages.files import FileSource
from pw.core.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress


class Attach(Base, frozen=True, tag=30):
    """ClientSession to Controller: let me in, with this weight and priority for my work."""

    name: str
    share: float
    priority: int
    resume: int = 0
    """My number with an earlier controller: I tell you all that it knew of me, and then `Resumed`."""


class Attached(Base, frozen=True, tag=31):
    """Controller to ClientSession: your number, your ticket for the hosts, how far ahead you may run."""

    client: int
    ticket: bytes
    run_credits: int
    islands: tuple[str, ...]


class Identify(Base, frozen=True, tag=32):
    """ClientSession to ObjectStore, first of all: I am this client, and this ticket proves it."""

    client: int
    ticket: bytes
    output: bool = False
    """Send me what my programs write."""


class Evicted(Base, frozen=True, tag=33):
    """Controller to ClientSession: you are not known here (any more), nothing of yours exists."""

    reason: str
    may_attach: bool = False
    """Something came before any `Attach`; one that is on its way will be answered for itself."""


class AllocateSlice(Base, frozen=True, tag=34):
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


class SliceBound(Base, frozen=True, weakref=True, tag=35):
    """ResourceManager to Controller and ClientSession: the slice exists, on these devices."""

    slice: int
    island: str
    platform: str
    kind: str
    devices: tuple[DeviceAddress, ...]
    epoch: int
    """Of the island: what is sent to its hosts under this binding is for this epoch only."""


class SliceRefused(Base, frozen=True, tag=36):
    """ResourceManager to ClientSession (through Controller): no such slice can be had."""

    slice: int
    error: ErrorReport


class ReleaseSlice(Base, frozen=True, tag=37):
    """ClientSession to Controller and on to ResourceManager: the slice is no longer used.

    And back to the ClientSession: nothing more will be said of it.
    """

    slice: int


class SliceLost(Base, frozen=True, tag=38):
    """Controller to ClientSession: the slice's island is gone; its arrays fail with this error."""

    slice: int
    error: ErrorReport


class Artifact(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """A serialized computation under its SHA-256."""

    digest: bytes
    blob: bytes


class RegisterProgram(Base, frozen=True, tag=40):
    """ClientSession to Controller: a program I will run, with the artifacts not sent before."""

    program: int
    body: Compact[Program]
    artifacts: tuple[Artifact, ...]
    released: bool = False
    """I will not run it; it made what I still have (see `Resumed`)."""


class ReleaseProgram(Base, frozen=True, tag=41):
    """ClientSession to Controller: I will not run this program any more."""

    program: int


class Run(Base, frozen=True, tag=42):
    """ClientSession to Controller: run a program; arguments are arrays or small host values as bytes."""

    run: int
    program: int
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]


class RunFailed(Base, frozen=True, tag=43):
    """Controller to ClientSession: a run did not start, or its island died; these results never will be."""

    run: int
    results: tuple[int, ...]
    error: ErrorReport


class RunsSettled(Base, frozen=True, tag=44):
    """Controller to ClientSession: so many runs have ended, you may send as many more."""

    count: int


class CreateArray(Base, frozen=True, tag=45):
    """ClientSession to Controller: I am uploading this array straight to its hosts."""

    array: int
    spec: ArraySpec
    bound: int = 1
    """How often I have seen its slice bound: 0 if I could not send anything yet."""
    source: FileSource | None = None
    """I upload nothing: its hosts are to read it from there."""


class Delete(Base, frozen=True, tag=46):
    """ClientSession to Controller: I hold no more references to these arrays."""

    arrays: tuple[int, ...]


class Checkpoint(Base, frozen=True, tag=51):
    """ClientSession to Controller, in order with runs: copy these arrays to host memory, here and elsewhere."""

    request: int
    arrays: tuple[int, ...]


class Inquire(Base, frozen=True, tag=52):
    """ClientSession to Controller: a host could not say what became of these arrays; can you?"""

    request: int
    arrays: tuple[int, ...]


class Answered(Base, frozen=True, tag=53):
    """Controller to ClientSession: what you asked for is done, or why not.

    To an `Inquire`: the arrays are where your slices say now, or you have been told that they are lost.
    """

    request: int
    error: ErrorReport | None


class UploadAgain(Base, frozen=True, tag=54):
    """Controller to ClientSession: this input was lost with its hosts and is needed, send it once more.

    It is to be uploaded as `name`, which is another array where nobody holds this one any more.
    """

    array: int
    name: int


class InputGone(Base, frozen=True, tag=55):
    """ClientSession to Controller: I do not have the value that was to be uploaded as this array."""

    array: int


class ForgetInputs(Base, frozen=True, tag=56):
    """Controller to ClientSession: these inputs will never be asked for again."""

    arrays: tuple[int, ...]


class ForgetRuns(Base, frozen=True, tag=57):
    """Controller to ClientSession: no controller will ever have to know of these runs again."""

    runs: tuple[int, ...]


class KnownArray(msgspec.Struct, frozen=True, array_like=True):
    """An array that only copies of it can bring back."""

    array: int
    spec: ArraySpec


class KnownArrays(msgspec.Struct, frozen=True, array_like=True):
    """Several of them."""

    arrays: tuple[KnownArray, ...]

    def with_placed(self, spec: OnSpec, placement: OnPlacement) -> KnownArrays:
        """The same with another object for each of its specs."""
        return KnownArrays(tuple([KnownArray(one.array, spec(one.spec)) for one in self.arrays]))


class FailedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array that never will be."""

    array: int
    error: ErrorReport


class Resumed(Base, frozen=True, tag=58):
    """ClientSession to Controller: this is what I have; before it came my slices, programs, inputs and runs."""

    held: tuple[int, ...]
    known: Compact[KnownArrays]
    """Those held that no input and no run before was about."""
    failed: tuple[FailedArray, ...]
    copied: tuple[int, ...]
    """Arrays that were checkpointed."""


class LinkLost(Base, frozen=True, tag=111):
    """ClientSession to Controller: I cannot tell what of my last words has reached this host."""

    host: str


class Cancel(Base, frozen=True, tag=132):
    """ClientSession to Controller: end the runs that are to make these arrays."""

    arrays: tuple[int, ...]


class CancelRuns(Base, frozen=True, tag=133):
    """ClientSession to Controller: end a run of any client (`run` 0: all that this client has in flight)."""

    request: int
    client: int
    run: int = 0
