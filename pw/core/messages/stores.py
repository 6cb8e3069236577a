"""The stores of hosts: uploads and fetches of clients, and replicas."""

from __future__ import annotations

import msgspec

from pw.core.errors import ErrorReport
from pw.core.landing import Landing
from pw.core.messages.base import (
    ClientToStore,
    ControllerToSession,
    ControllerToStore,
    HostToController,
    HostToSession,
    HostToStore,
)
from pw.core.messages.bounds import Arrays, Devices
from pw.core.sharding import ArraySpec, Box, DeviceAddress


class Upload(ClientToStore, frozen=True, tag=93):
    """ClientSession to ObjectStore: take this host's shards of an array, or answer with a landing."""

    array: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    data: bytes | None
    island: str
    epoch: int
    """Epoch of `devices`: in another epoch the shards may belong to another host."""
    attempt: int = 0
    """Number of the attempt, unique for each upload of the client."""


class UploadLanding(HostToSession, frozen=True, tag=94):
    """ObjectStore to ClientSession: push the bytes of this array's shards to this landing."""

    array: int
    landing: Landing
    attempt: int
    """Number of the upload's attempt."""


class Uploaded(HostToController, frozen=True, tag=95):
    """ObjectStore to Controller: this host's shards of the array are in device memory, or have failed."""

    array: int
    error: ErrorReport | None
    again: bool = False
    """True if the host had the shards before, and drops the new ones."""
    layout: bytes = b""
    """Digest of the array as the host has it (`pw.core.programs.spec_checks.layout_of`); empty if it has
    none."""


class Fetch(ClientToStore, frozen=True, tag=96):
    """ClientSession to ObjectStore: send these shards (mesh positions) when they are ready."""

    request: int
    array: int
    spec: ArraySpec
    devices: Devices
    positions: tuple[int, ...]
    landing: Landing | None
    island: str = ""
    epoch: int = 0
    """Epoch of `devices`; 0 over a line, which ends with the process that it leads to."""


class Fetched(HostToSession, frozen=True, tag=97):
    """ObjectStore to ClientSession: the bytes of a small fetch."""

    request: int
    data: bytes


class Wait(ClientToStore, frozen=True, tag=98):
    """ClientSession to ObjectStore: answer when this host's shards of these arrays are ready."""

    request: int
    arrays: Arrays
    island: str = ""
    epoch: int = 0
    """Epoch in which the arrays lie there; 0 over a line, which ends with the process that it leads to."""


class Ready(HostToSession, frozen=True, tag=99):
    """ObjectStore to ClientSession: the shards on this host are ready."""

    request: int


class RequestFailed(ControllerToSession, HostToSession, frozen=True, tag=100):
    """Controller or ObjectStore to ClientSession: a fetch, wait or query has failed."""

    request: int
    error: ErrorReport


class UploadAborted(ClientToStore, frozen=True, tag=102):
    """ClientSession to ObjectStore: the bytes of this upload will not come."""

    array: int
    transfer: int
    """Number of the landing's transfer: bytes for another landing may be on their way."""
    error: ErrorReport


class CancelRequest(ClientToStore, frozen=True, tag=101):
    """ClientSession to ObjectStore: the client does not need the answer to this fetch or wait."""

    request: int


class OutputLine(msgspec.Struct, frozen=True, array_like=True):
    """A line that a host function has written."""

    is_error: bool
    """True if the line was written to standard error, or logged; else it was written to standard output."""
    text: str


class Printed(HostToSession, frozen=True, tag=149):
    """ObjectStore to ClientSession: the output of host functions; lost lines are not sent again."""

    lines: tuple[OutputLine, ...]


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of one array."""

    array: int
    boxes: tuple[Box, ...]
    error: ErrorReport | None = None
    """Error that says why there are no boxes."""
    proof: bytes = b""
    """Proof of the offer; empty for what lay on the host's devices."""


class Holdings(HostToController, frozen=True, tag=103):
    """ObjectStore to Controller: this host has these replicas, until the controller drops them.

    A new incarnation sends it first, with the replicas of the last one.
    """

    holdings: tuple[Holding, ...]


class HoldsNoMore(HostToController, frozen=True, tag=148):
    """ObjectStore to Controller: all replicas that this incarnation began with have been reported."""


class BoxSource(msgspec.Struct, frozen=True, array_like=True):
    """A box of an array, and a host with a replica of it."""

    box: Box
    host: str


class Restore(ControllerToStore, frozen=True, tag=104):
    """Controller to ObjectStore: restore the shards of `array` from replicas; answered by `Uploaded`."""

    array: int
    copied: int
    """Number of the array that the replicas are of."""
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    sources: tuple[BoxSource, ...]
    permits: dict[str, bytes]
    """What the hosts in `sources` want to see (`pw.core.tenants`)."""
    error: ErrorReport | None = None
    """Error that the array had, in place of values, when it was to be copied."""


class DropUploads(ControllerToStore, frozen=True, tag=115):
    """Controller to ObjectStore: the client has deleted these uploads."""

    arrays: tuple[int, ...]


class FetchReplica(HostToStore, frozen=True, tag=105):
    """ObjectStore to ObjectStore: send these boxes, packed, to the landing if there is one."""

    request: int
    array: int
    dtype: str
    boxes: tuple[Box, ...]
    landing: Landing | None
    permit: bytes
    """Permit of the controller, by which the sender may have replicas of the array."""


class ReplicaData(HostToStore, frozen=True, tag=106):
    """ObjectStore to ObjectStore: the bytes of a small fetch."""

    request: int
    data: bytes


class ReplicaRefused(HostToStore, frozen=True, tag=107):
    """ObjectStore to ObjectStore: this host does not have these boxes, or cannot send them."""

    request: int
    error: ErrorReport


class OfferReplica(ControllerToStore, frozen=True, tag=108):
    """Controller to ObjectStore: fetch these boxes from `host`, and keep them as replicas."""

    array: int
    dtype: str
    boxes: tuple[Box, ...]
    host: str
    permit: bytes
    """Permit that `host` wants to see."""
    proof: bytes
    """Proof that the controller, or a later one, wants to see in `Holdings`."""


class Copied(HostToController, frozen=True, tag=112):
    """ObjectStore to Controller: this host has copied these boxes to its memory, for other hosts to fetch."""

    array: int
    boxes: tuple[Box, ...]


class DropReplicas(ControllerToStore, frozen=True, tag=109):
    """Controller to ObjectStore: drop the replicas of these arrays."""

    arrays: tuple[int, ...]


class WriteReplicas(ControllerToStore, frozen=True, tag=265):
    """Controller to ObjectStore: move the replicas of these arrays from memory to files, if there is a folder.

    They can be read as before, also meanwhile.
    """

    arrays: tuple[int, ...]


class ArraysLost(HostToController, frozen=True, tag=110):
    """ObjectStore to Controller: a client asks for these arrays, which a lost host has made fail here."""

    arrays: tuple[int, ...]
