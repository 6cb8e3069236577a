"""Arrays by name: between clients and the controller (`pw.sched.control.names`)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pw.core.errors import ErrorReport
from pw.core.messages.base import (
    ClientToController,
    ControllerToSession,
    ControllerToStore,
    HostToController,
)
from pw.core.messages.bounds import Hosts, Name, Seconds
from pw.core.messages.clients import Offer

DESCRIPTION_BYTES = 4 << 20
"""Bytes of the longest description of a published tree: the controller keeps it."""

VersionNumber = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Number of a version, from 1; later ones of the name still fit into every message."""

EVERY_TENANT = "all"
"""Word in the place of tenants: each of them may read."""


class Publish(ClientToController, frozen=True, tag=203):
    """ClientSession to Controller, in order with runs: the arrays of these offers are a new version of a name.

    Answered by `Published` when all arrays are there, or by `RequestFailed`.
    """

    request: int
    name: Name
    offers: Annotated[tuple[Offer, ...], Meta(max_length=1 << 10)]
    """The arrays, one offer for each slice."""
    tree: Annotated[bytes, Meta(max_length=DESCRIPTION_BYTES)]
    """Description of the tree by its publisher, for readers."""
    keep_s: Seconds = 0.0
    """Seconds for which the name outlasts the session of its publisher; infinite for no end."""
    to: Hosts = ()
    """Names of other tenants that may read, or `EVERY_TENANT`."""
    version: VersionNumber = 0
    """Number of the version under an earlier controller; 0 if there was none."""


class Published(ControllerToSession, frozen=True, tag=204):
    """Controller to ClientSession: the version is the newest one of its name, for all readers."""

    request: int
    version: int


class VersionEnded(ControllerToSession, frozen=True, tag=212):
    """Controller to ClientSession: lookups find the version no more, and no later controller needs it."""

    request: int
    """Number of the request that published it."""


class Lookup(ClientToController, frozen=True, tag=205):
    """ClientSession to Controller, in order with runs: offer this client the arrays of a version of a name.

    Answered by `VersionOffer`, or by `RequestFailed`.
    """

    request: int
    name: Name
    """The name; of another tenant's, after the tenant and a slash."""
    version: VersionNumber = 0
    """Number of the version; 0 for the newest."""
    after: VersionNumber = 0
    """Number above which the version's number is to be."""
    wait_s: Seconds = 0.0
    """Seconds to wait until there is such a version."""


class SharedPart(msgspec.Struct, frozen=True, array_like=True):
    """The arrays of a version that lie on one slice."""

    token: bytes
    """Token of the offer with which the reader takes them (`OfferSource`)."""
    slice: int
    """Number of a slice on their devices: the reader's own is to be like it."""
    devices: int


class VersionOffer(ControllerToSession, frozen=True, tag=206):
    """Controller to ClientSession: a version, whose arrays the client takes by these offers."""

    request: int
    name: str
    version: int
    parts: tuple[SharedPart, ...]
    tree: bytes


class Unpublish(ClientToController, frozen=True, tag=207):
    """ClientSession to Controller, in order with runs: the name is not there any more for later lookups."""

    request: int
    name: Name


class GetNames(ClientToController, frozen=True, tag=208):
    """ClientSession to Controller: list the names that this client may read."""

    request: int


class NameInfo(msgspec.Struct, frozen=True, array_like=True):
    """One name."""

    name: str
    tenant: str
    version: int
    """Number of the newest version."""
    versions: tuple[int, ...]
    """Numbers of all versions that are there: older ones have readers."""
    arrays: int
    size_bytes: int
    """Bytes of one copy of the newest version."""
    readers: int
    """Number of clients that have arrays of any version."""
    maker: int
    """Number of the client that has published the newest version; 0 if it has left."""
    keep_s: float
    """Seconds for which the name outlasts the session of its publisher; infinite for no end."""
    to: tuple[str, ...]
    """Names of other tenants that may read."""


class NameList(ControllerToSession, frozen=True, tag=209):
    """Controller to ClientSession: the names that the client may read."""

    request: int
    names: tuple[NameInfo, ...]


class ConfirmArrays(ControllerToStore, frozen=True, tag=210):
    """Controller to ObjectStore: answer when this host's shards of these arrays are ready."""

    request: int
    arrays: tuple[int, ...]


class ArraysConfirmed(HostToController, frozen=True, tag=211):
    """ObjectStore to Controller: the shards are ready, or one of them has this error."""

    request: int
    error: ErrorReport | None
