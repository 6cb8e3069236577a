"""Checkpoints on disk: between clients, the controller, and the hosts that write and read."""

from __future__ import annotations

import msgspec

from pw.core.errors import ErrorReport
from pw.core.messages.base import Base
from pw.core.sharding import ArraySpec, DeviceAddress


class FileSource(msgspec.Struct, frozen=True, array_like=True):
    """An array in a checkpoint on disk."""

    path: str
    checkpoint: str
    """Which one: what is at the path may be replaced."""
    name: str


class SaveArrays(Base, frozen=True, tag=140):
    """ClientSession to Controller, in order with runs: have these arrays written to disk, as one checkpoint."""

    request: int
    checkpoint: str
    path: str
    overwrite: bool
    arrays: tuple[int, ...]
    names: tuple[str, ...]
    tree: bytes
    """The client's own part of the manifest."""


class FileWritten(Base, frozen=True, tag=141):
    """ObjectStore to Controller: my file of this checkpoint is on disk, or why not."""

    checkpoint: str
    path: str
    error: ErrorReport | None


class CommitFiles(Base, frozen=True, tag=142):
    """Controller to one ObjectStore: all files of this checkpoint are written, make it the one at its path."""

    checkpoint: str
    path: str
    overwrite: bool
    files: tuple[str, ...]
    tree: bytes
    others: tuple[str, ...]
    """Checkpoints under way to the same path: what else was left there is of none."""


class FilesCommitted(Base, frozen=True, tag=143):
    """ObjectStore to Controller: the checkpoint is at its path, or it never will be."""

    checkpoint: str
    error: ErrorReport | None


class AbandonFiles(Base, frozen=True, tag=144):
    """Controller to one ObjectStore: this checkpoint will not be, remove what there is of it."""

    checkpoint: str
    path: str
    unless: ErrorReport | None = None
    """It may be at its path already: answered by `FilesCommitted`, with this if it is not."""


class Describe(Base, frozen=True, tag=145):
    """ClientSession to ObjectStore: what is in the checkpoint at this path?"""

    request: int
    path: str


class Described(Base, frozen=True, tag=146):
    """ObjectStore to ClientSession: this checkpoint is, and here is what the client said that wrote it."""

    request: int
    checkpoint: str
    tree: bytes


class ReadArray(Base, frozen=True, tag=147):
    """Controller to ObjectStore: make your shards of `array` from files; answered by `Uploaded`."""

    array: int
    source: FileSource
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
