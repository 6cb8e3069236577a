"""The object stores of hosts: uploads and fetches of clients, and copies in host memory."""

from __future__ import annotations

import msgspec

from pw.core.errors import ErrorReport
from pw.core.landing import Landing
from pw.core.messages.base import Base
from pw.core.sharding import ArraySpec, Box, DeviceAddress


class Upload(Base, frozen=True, tag=93):
    """ClientSession to ObjectStore: take your shards of this array (inline, or tell me where)."""

    array: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    data: bytes | None
    island: str
    epoch: int
    """Where `devices` are: in another epoch your shards may be another host's, and I send to that one."""
    attempt: int = 0
    """Of all that this client sends no two have the same."""


class UploadLanding(Base, frozen=True, tag=94):
    """ObjectStore to ClientSession: put the bytes of this array's shards here."""

    array: int
    landing: Landing
    attempt: int
    """That of the upload."""


class Uploaded(Base, frozen=True, tag=95):
    """ObjectStore to Controller: my shards of this array are in device memory."""

    array: int
    error: ErrorReport | None
    again: bool = False
    """They were there before, and will be dropped in their turn."""


class Fetch(Base, frozen=True, tag=96):
    """ClientSession to ObjectStore: send me these shards (mesh positions) when they are ready."""

    request: int
    array: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    positions: tuple[int, ...]
    landing: Landing | None


class Fetched(Base, frozen=True, tag=97):
    """ObjectStore to ClientSession: the bytes of a small fetch."""

    request: int
    data: bytes


class Wait(Base, frozen=True, tag=98):
    """ClientSession to ObjectStore: tell me when your shards of these arrays are ready."""

    request: int
    arrays: tuple[int, ...]


class Ready(Base, frozen=True, tag=99):
    """ObjectStore to ClientSession: your shards on this host are ready."""

    request: int


class RequestFailed(Base, frozen=True, tag=100):
    """Controller or ObjectStore to ClientSession: a fetch, wait or query has failed."""

    request: int
    error: ErrorReport


class UploadAborted(Base, frozen=True, tag=102):
    """ClientSession to ObjectStore: the bytes of this upload will not come."""

    array: int
    transfer: int
    """Of the landing: another one's bytes may be on their way."""
    error: ErrorReport


class CancelRequest(Base, frozen=True, tag=101):
    """ClientSession to ObjectStore: I no longer wait for this fetch or wait."""

    request: int


class Line(msgspec.Struct, frozen=True, array_like=True):
    """Something written by a client's program."""

    is_error: bool
    """To standard error, or logged; otherwise to standard output."""
    text: str


class Printed(Base, frozen=True, tag=149):
    """ObjectStore to ClientSession: your programs have written this here; what is lost is not sent again."""

    lines: tuple[Line, ...]


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of one array."""

    array: int
    boxes: tuple[Box, ...]
    error: ErrorReport | None = None
    """What kept those away that were asked for, where there are none."""


class Holdings(Base, frozen=True, tag=103):
    """ObjectStore to Controller: I have these boxes in host memory, until you say otherwise.

    From a new incarnation it comes before anything else, with what the last one handed over.
    """

    holdings: tuple[Holding, ...]


class HoldsNoMore(Base, frozen=True, tag=148):
    """ObjectStore to Controller: I have told all that this incarnation began with."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A box of an array, and a host that has it in host memory."""

    box: Box
    host: str


class Restore(Base, frozen=True, tag=104):
    """Controller to ObjectStore: make your shards of `array` from copies; answered by `Uploaded`."""

    array: int
    copied: int
    """The array that the copies are of."""
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    sources: tuple[Source, ...]


class DropUploads(Base, frozen=True, tag=115):
    """Controller to ObjectStore: whoever uploaded these does not hold them any more."""

    arrays: tuple[int, ...]


class FetchReplica(Base, frozen=True, tag=105):
    """ObjectStore to ObjectStore: send me these boxes (packed, at the landing if there is one)."""

    request: int
    array: int
    dtype: str
    boxes: tuple[Box, ...]
    landing: Landing | None


class ReplicaData(Base, frozen=True, tag=106):
    """ObjectStore to ObjectStore: the bytes of a small fetch."""

    request: int
    data: bytes


class ReplicaRefused(Base, frozen=True, tag=107):
    """ObjectStore to ObjectStore: I do not have these boxes, or cannot send them."""

    request: int
    error: ErrorReport


class OfferReplica(Base, frozen=True, tag=108):
    """ObjectStore or Controller to ObjectStore: fetch these boxes of this array from `host`, keep them."""

    array: int
    dtype: str
    boxes: tuple[Box, ...]
    host: str


class DropReplicas(Base, frozen=True, tag=109):
    """Controller to ObjectStore: forget the copies of these arrays in host memory."""

    arrays: tuple[int, ...]


class ArraysLost(Base, frozen=True, tag=110):
    """ObjectStore to Controller: somebody asks for these, and here they failed because a host was lost."""

    arrays: tuple[int, ...]
