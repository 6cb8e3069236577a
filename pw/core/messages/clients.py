"""Between a client and the controller: slices, programs, runs, arrays."""

from __future__ import annotations

import msgspec

from pw.core.compact import Compact, OnPlacement, OnSpec
from pw.core.errors import ErrorReport
from pw.core.messages.base import ClientToController, ClientToStore, ControllerToSession
from pw.core.messages.bounds import (
    Arrays,
    Count,
    DeviceBytes,
    DeviceCount,
    Devices,
    HostCount,
    Hosts,
    ManyArrays,
    Name,
    RunArguments,
    Seconds,
    Share,
    Specs,
    Topology,
)
from pw.core.messages.files import FileSource, OfferSource
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress


class Attach(ClientToController, frozen=True, tag=30):
    """ClientSession to Controller: attach this client, with its weight and priority."""

    name: Name
    share: Share
    priority: int
    resume: int = 0
    """Number of the client with an earlier controller; its journal follows, and then `Resumed`."""
    claim: bytes = b""
    """Claim to that number (see `Attached`)."""
    line: Name = ""
    """Node of the client's lines (`pw.client.session.lines`); empty if it has none."""
    recovery_s: Seconds | None = None
    """How long the client waits for a lost island, in seconds; None for as long as the cluster says."""
    suspended_by: Name = ""
    """Who had the client leave its devices at an earlier controller, in words; empty if it has them."""


class Attached(ControllerToSession, frozen=True, tag=31):
    """Controller to ClientSession: the client's number, its ticket for hosts, and its credits."""

    client: int
    ticket: bytes
    run_credits: int
    islands: tuple[str, ...]
    claim: bytes = b""
    """Claim with which the client gets its number back from a later controller (`pw.core.tenants`)."""
    line_ticket: bytes = b""
    """Ticket of the node of the client's lines; empty if it has none."""


class Identify(ClientToStore, frozen=True, tag=32):
    """ClientSession to ObjectStore, before all else: the client's number, and the ticket that proves it."""

    client: int
    ticket: bytes
    output: bool = False
    """True to send the output of host functions to this client."""
    is_line: bool = False
    """True if the message comes over the client's line to this host; its session is another node."""


class Evicted(ControllerToSession, frozen=True, tag=33):
    """Controller to ClientSession: this controller does not know the client; it owns nothing here."""

    reason: str
    may_attach: bool = False
    """True if a message came before any `Attach`; the controller answers an `Attach` that is on its way."""
    error: ErrorReport | None = None
    """Error that says what the client may not ask for, if that is why."""


class AllocateSlice(ClientToController, frozen=True, tag=34):
    """ClientSession to Controller and on to ResourceManager: bind this many virtual devices."""

    slice: int
    devices: DeviceCount
    kind: Name | None
    island: Name | None
    topology: Topology | None
    resumed: bool = False
    """True if an earlier controller may have bound the slice: wait until its hosts have registered."""
    formerly: Name = ""
    """Name of the slice's island under the earlier controller."""
    former_hosts: Hosts = ()
    """Names of the slice's hosts under the earlier controller: they may have its arrays."""
    like: int = 0
    """Number of another client's slice: bind this one to the same devices in the same order."""
    apart: Arrays = ()
    """Numbers of slices of the same client: bind this one to another island than theirs."""
    hosts: Hosts = ()
    """Names of hosts: bind the slice to as many devices of each, in this order, and to no others."""
    python: bool = False
    """True to bind the slice to hosts that run clients' Python functions."""
    python_hosts: Hosts = ()
    """Names of the only hosts that run Python functions of the tenant, from the controller; empty for all."""
    exclusive: bool = False
    """True to bind the slice to devices that no other slice has, and that none gets while it has them."""
    host_count: HostCount = 0
    """Number of hosts of one island that have the devices, each as many; 0 for any number."""
    former_devices: Devices = ()
    """Devices of the slice under the earlier controller, in order."""
    waits: bool = False
    """True, from the controller, to wait for devices however long: the client was suspended."""
    memory_bytes: DeviceBytes = 0
    """Bytes that arrays and runs of the slice may have on each of its devices; 0 for no bound."""
    together: bool = False
    """True, from the controller, to bind the slice only when all others of the client that say so have room."""
    attempt: int = 0
    """Number of times that the controller has asked for the slice anew."""


class SliceBound(ControllerToSession, frozen=True, weakref=True, tag=35):
    """ResourceManager to Controller and ClientSession: the slice is bound to these devices."""

    slice: int
    island: str
    platform: str
    kind: str
    devices: tuple[DeviceAddress, ...]
    epoch: int
    """Epoch of the island; hosts fence uploads for another epoch."""
    machine: str = ""
    """Machine of all hosts of the island; empty if they are on several."""
    coords: tuple[tuple[int, ...], ...] = ()
    """Coordinates of the devices in the grid of the island; an empty tuple for one that has none."""
    topology: tuple[int, ...] = ()
    """Number of devices along each axis of the slice's block; empty if the slice has no shape."""
    attempt: int = 0
    """That of the request; after another one, this says nothing any more."""


class SliceRefused(ControllerToSession, frozen=True, tag=36):
    """ResourceManager to ClientSession (through Controller): no island can provide the slice."""

    slice: int
    error: ErrorReport


class ReleaseSlice(ClientToController, ControllerToSession, frozen=True, tag=37):
    """ClientSession to Controller and on to ResourceManager: the client releases the slice.

    Back to the ClientSession: the last message about the slice.
    """

    slice: int


class SliceLost(ControllerToSession, frozen=True, tag=38):
    """Controller to ClientSession: the slice's island has left its epoch; the slice has no devices."""

    slice: int
    error: ErrorReport


class Artifact(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """A serialized computation under its SHA-256."""

    digest: bytes
    blob: bytes


class RegisterProgram(ClientToController, frozen=True, tag=40):
    """ClientSession to Controller: a new program, with the artifacts that the client has not sent yet."""

    program: int
    body: Compact[Program]
    artifacts: tuple[Artifact, ...]
    released: bool = False
    """True if the client does not run the program any more, but has arrays that it made (see `Resumed`)."""


class ReleaseProgram(ClientToController, frozen=True, tag=41):
    """ClientSession to Controller: the client does not run this program any more."""

    program: int


class Run(ClientToController, frozen=True, tag=42):
    """ClientSession to Controller: run a program; arguments are arrays or small host values as bytes.

    With a `lease`, the client has launched it on its hosts under that lease.
    """

    run: int
    program: int
    args: RunArguments
    results: ManyArrays
    lease: int = 0
    index: Count = 0
    """Index of the run among the launches of the lease."""


class RunFailed(ControllerToSession, frozen=True, tag=43):
    """Controller to ClientSession: a run failed; its results will never exist."""

    run: int
    results: tuple[int, ...]
    error: ErrorReport


class RunsSettled(ControllerToSession, frozen=True, tag=44):
    """Controller to ClientSession: so many runs have ended; the client gets their credits back."""

    count: int


class CreateArray(ClientToController, frozen=True, tag=45):
    """ClientSession to Controller: a new array, which the client uploads to its hosts."""

    array: int
    spec: ArraySpec
    bound: int = 1
    """Number of bindings of its slice that the client has seen: 0 if it could not send anything yet."""
    source: FileSource | OfferSource | None = None
    """Source of the array, if the client uploads nothing."""


class Offer(ClientToController, frozen=True, tag=59):
    """ClientSession to Controller, in order with runs: another client may take these arrays.

    It takes them with the token, once, each with a `CreateArray`, before or after this. Its arrays are views
    of these, and last when these are deleted.
    """

    run: int
    """Number like that of a run, under which the controller says that no later run needs the offer."""
    token: bytes
    """`OFFER_TOKEN_BYTES` random bytes."""
    arrays: Arrays
    """Numbers of the arrays, all on one slice."""
    specs: Specs
    error: ErrorReport | None = None
    """Error that says why there are no arrays."""


class Delete(ClientToController, frozen=True, tag=46):
    """ClientSession to Controller: the client has no more references to these arrays."""

    arrays: tuple[int, ...]


class Checkpoint(ClientToController, frozen=True, tag=51):
    """ClientSession to Controller, in order with runs: make replicas of these arrays."""

    request: int
    arrays: Arrays


class Inquire(ClientToController, frozen=True, tag=52):
    """ClientSession to Controller: a host does not have these arrays; answer when the client can ask again."""

    request: int
    arrays: Arrays
    slices: Arrays = ()
    """Numbers of the slices whose devices it asks: the answer waits for one that is away."""


class Answered(ControllerToSession, frozen=True, tag=53):
    """Controller to ClientSession: the request is done, or has failed.

    To an `Inquire`: the arrays are on the devices of their slices, or the client knows that they
    are lost.
    """

    request: int
    error: ErrorReport | None


class UploadAgain(ControllerToSession, frozen=True, tag=54):
    """Controller to ClientSession: upload this lost input again, as the array `name`.

    `name` is another array if the client has deleted this one.
    """

    array: int
    name: int


class InputGone(ClientToController, frozen=True, tag=55):
    """ClientSession to Controller: the client does not have the value of this array any more."""

    array: int


class ForgetInputs(ControllerToSession, frozen=True, tag=56):
    """Controller to ClientSession: the controller will not ask for these inputs again."""

    arrays: tuple[int, ...]


class ForgetRuns(ControllerToSession, frozen=True, tag=57):
    """Controller to ClientSession: no later controller needs these runs."""

    runs: tuple[int, ...]


class KnownArray(msgspec.Struct, frozen=True, array_like=True):
    """An array that can be restored from replicas only."""

    array: int
    spec: ArraySpec


class KnownArrays(msgspec.Struct, frozen=True, array_like=True):
    """The arrays of a `Resumed`."""

    arrays: tuple[KnownArray, ...]

    def with_placed(self, spec: OnSpec, placement: OnPlacement) -> KnownArrays:
        """Return a copy with other specs."""
        return KnownArrays(tuple([KnownArray(one.array, spec(one.spec)) for one in self.arrays]))


class FailedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array that will never exist."""

    array: int
    error: ErrorReport


class Resumed(ClientToController, frozen=True, tag=58):
    """ClientSession to Controller, after slices, programs, inputs and runs: the arrays that the client has."""

    held: tuple[int, ...]
    known: Compact[KnownArrays]
    """The arrays in `held` that no input and no run of the journal makes."""
    failed: tuple[FailedArray, ...]
    copied: tuple[int, ...]
    """Numbers of arrays that were checkpointed."""


class LinkLost(ClientToController, frozen=True, tag=111):
    """ClientSession to Controller: the link to this host is lost; the last messages may not have arrived."""

    host: Name


class Cancel(ClientToController, frozen=True, tag=132):
    """ClientSession to Controller: cancel the runs that make these arrays."""

    arrays: ManyArrays


class CancelRuns(ClientToController, frozen=True, tag=133):
    """ClientSession to Controller: cancel a run of any client (`run` 0: all runs in flight of that client)."""

    request: int
    client: int
    run: int = 0
