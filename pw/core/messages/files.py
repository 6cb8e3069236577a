"""Checkpoints on disk: between clients, the controller, and the hosts that write and read."""

from __future__ import annotations

import msgspec

from pw.core.errors import ErrorReport
from pw.core.messages.base import (
    ClientToController,
    ClientToStore,
    ControllerToStore,
    HostToController,
    HostToSession,
)
from pw.core.messages.bounds import Arrays, Name, Names, Path, Tree
from pw.core.sharding import ArraySpec, DeviceAddress


class FileSource(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """An array in a checkpoint on disk."""

    path: Path
    checkpoint: Name
    """Random name of the checkpoint: another checkpoint may replace it at the path."""
    name: Path


OFFER_TOKEN_BYTES = 16
"""Random bytes in the token of an offer."""


class OfferSource(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An array that another client offers (`Offer`); the new array is a view of it."""

    token: bytes
    index: int
    """Index of the array in the offer."""


class SaveArrays(ClientToController, frozen=True, tag=140):
    """ClientSession to Controller, in order with runs: have hosts write these arrays to disk."""

    request: int
    checkpoint: str
    path: Path
    overwrite: bool
    arrays: Arrays
    names: Names
    tree: Tree
    """Part of the manifest that the client writes."""


class FileWritten(HostToController, frozen=True, tag=141):
    """ObjectStore to Controller: this host's file of the checkpoint is on disk, or has failed."""

    checkpoint: str
    path: str
    error: ErrorReport | None


class CommitFiles(ControllerToStore, frozen=True, tag=142):
    """Controller to one ObjectStore: all files are written; move the checkpoint to its path."""

    checkpoint: str
    path: str
    overwrite: bool
    files: tuple[str, ...]
    tree: bytes
    others: tuple[str, ...]
    """Other checkpoints in flight to the same path; the store removes all other leftovers there."""


class FilesCommitted(HostToController, frozen=True, tag=143):
    """ObjectStore to Controller: the checkpoint is at its path, or has failed."""

    checkpoint: str
    error: ErrorReport | None


class AbandonFiles(ControllerToStore, frozen=True, tag=144):
    """Controller to one ObjectStore: the checkpoint has failed; remove its files."""

    checkpoint: str
    path: str
    unless: ErrorReport | None = None
    """Error to answer with if the checkpoint is not at its path; if it is, answer with `FilesCommitted`."""


class LookForFolders(ControllerToStore, frozen=True, tag=155):
    """Controller to ObjectStore: look whether the folders of checkpoints are still there."""

    look: int
    """Number of this look."""
    paths: tuple[str, ...]


class FoldersGone(HostToController, frozen=True, tag=156):
    """ObjectStore to Controller: the folders that are not there any more, the answer to `LookForFolders`."""

    look: int
    paths: Names


class Describe(ClientToStore, frozen=True, tag=145):
    """ClientSession to ObjectStore: describe the checkpoint at this path."""

    request: int
    path: Path


class Described(HostToSession, frozen=True, tag=146):
    """ObjectStore to ClientSession: the name of the checkpoint, and the tree that its writer described."""

    request: int
    checkpoint: str
    tree: bytes


class ReadArray(ControllerToStore, frozen=True, tag=147):
    """Controller to ObjectStore: read this host's shards of `array` from files; answered by `Uploaded`."""

    array: int
    source: FileSource
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
