"""Checkpoints on disk: each comes to its path as a whole or not at all.

A checkpoint is a directory with a manifest, and a safetensors file of each host that had something
to write:

    PATH/manifest.json               tree, id, and every file with its size, boxes and checksums
    PATH/<id>-00000.safetensors ...  boxes of arrays, and their index in the file's own metadata

The hosts write into a directory beside the path, `.NAME.pw-<id>`, and sync their files. Then one of
them gathers the indexes into the manifest and renames the directory. If the path has a checkpoint
already, the files go in beside the old ones, under their own names; one rename replaces the
manifest, which makes them the checkpoint; then the old ones are removed. So a reader finds all of
one checkpoint or all of the other at any moment. Files that a crash leaves behind belong to no
checkpoint, and the next checkpoint to the same path removes them.

Every host must see the path. Elements that safetensors has no name for (or numpy no type) are
written as bytes, in one more dimension; the index names the dtype. All calls block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from pw.core.dtypes import DTYPES
from pw.core.errors import (
    CheckpointExists,
    CheckpointFailed,
    CheckpointNotFound,
    Error,
    OutOfHostMemory,
)
from pw.core.landing import Bytes
from pw.core.messages import CommitFiles, CopyFile
from pw.core.messages.bounds import TREE_BYTES
from pw.core.packing import flat_bytes
from pw.core.sharding import ArraySpec, Box, box_shape, dtype_of
from pw.devices.host.checkpoint_paths import INDEX_BYTES, opened, read_exactly, read_whole, resolved

FORMAT = "pw checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

_ID = re.compile(r"[0-9a-f]{8,64}")
_OURS = re.compile(r"[0-9a-f]+-\d{5}\.safetensors")


class Shard(NamedTuple):
    """A box of an array, and its value."""

    name: str
    spec: ArraySpec
    box: Box
    value: np.ndarray[Any, Any]


class SavedBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of an array in a file."""

    tensor: str
    """Name of the tensor in the file."""
    box: Box
    crc32: int


class SavedArray(msgspec.Struct, frozen=True):
    """The boxes of an array in one file."""

    shape: tuple[int, ...]
    dtype: str
    boxes: list[SavedBox]


class _SavedFile(msgspec.Struct, frozen=True):
    size_bytes: int
    arrays: dict[str, SavedArray]


class _Entry(msgspec.Struct, frozen=True):
    """The header of a tensor, or of the file."""

    data_offsets: tuple[int, int] = (0, 0)
    pw: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    format: str
    version: int
    id: str
    tree: msgspec.Raw
    files: dict[str, _SavedFile]


# Made here, in one thread: two threads that make the first decoder of a type at once crash (msgspec).
_decode_arrays = msgspec.json.Decoder(dict[str, SavedArray]).decode
_decode_header = msgspec.json.Decoder(dict[str, _Entry]).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_manifest = msgspec.json.Decoder(_Manifest).decode


_UNREADABLE = (
    OSError, SafetensorError, msgspec.MsgspecError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""Exceptions of files that are damaged, or cannot be read or written."""


@contextlib.contextmanager
def named(what: str, missing: type[CheckpointFailed] = CheckpointNotFound) -> Iterator[None]:
    """Turn errors into those for the user, which name the checkpoint; into `missing` if a path is not there."""
    try:
        yield
    except Error:
        raise
    except FileNotFoundError as error:
        raise missing(f"{what}: {error.strerror or error}") from error
    except MemoryError as error:
        raise OutOfHostMemory(f"{what}: {error}") from error
    except _UNREADABLE as error:
        raise CheckpointFailed(f"{what}: {error}") from error


def _staging(path: str, checkpoint: str) -> str:
    parent, base = os.path.split(path)
    return os.path.join(parent, f".{base}.pw-{checkpoint}")


# --- writing ---------------------------------------------------------------------------------------------


def write(job: CopyFile, shards: Sequence[Shard], root: str = "") -> None:
    """Write one host's file, so that it survives the loss of the machine.

    Args:
        job: the file.
        shards: boxes to write.
        root: see `pw.devices.host.checkpoint_paths.resolved`, as in the other functions here.

    Raises:
        CheckpointExists: the path exists and must not be replaced.
        CheckpointFailed: the file cannot be written.
    """
    with named(f"the checkpoint {job.path} cannot be written", CheckpointFailed):
        at = resolved(job.path, root)
        if _id_at(at) == job.checkpoint:
            return  # the next controller asks again for a file that is written
        _check_free(at, job.overwrite)
        staging = _staging(at, job.checkpoint)
        os.makedirs(staging, exist_ok=True)
        if os.path.realpath(staging) != staging:
            raise ValueError(f"{staging} is a symbolic link")
        arrays: dict[str, SavedArray] = {}
        tensors: dict[str, TensorSpec] = {}
        alive: list[Bytes] = []
        for name, spec, box, value in shards:
            flat = flat_bytes(value)
            alive.append(flat)
            shape, dtype = box_shape(box), spec.dtype
            if not DTYPES[dtype].is_native:
                shape, dtype = (*shape, dtype_of(dtype).itemsize), "uint8"
            tensor = f"{name} {','.join(f'{start}:{stop}' for start, stop in box)}".rstrip()
            tensors[tensor] = TensorSpec(
                dtype=dtype, shape=shape, data_ptr=flat.ctypes.data, data_len=flat.nbytes
            )
            saved = arrays.setdefault(name, SavedArray(spec.shape, spec.dtype, []))
            saved.boxes.append(SavedBox(tensor, box, zlib.crc32(flat.data)))
        path = os.path.join(staging, job.file)
        index = msgspec.json.encode(arrays).decode()
        with open(path, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        serialize_file(tensors, path, metadata={"pw": index})
        os.chmod(path, mode)  # safetensors has made another file, for this user only
        _sync(path)


def commit(message: CommitFiles, root: str = "") -> None:
    """Make the files of all hosts the checkpoint at its path.

    Raises:
        CheckpointExists: the path exists and must not be replaced.
        CheckpointFailed: a file is missing, or the directory cannot be renamed. Then the files are
            removed, and an earlier checkpoint at the path stays.
    """
    path, checkpoint = resolved(message.path, root), message.checkpoint
    staging = _staging(path, checkpoint)
    try:
        with named(f"the checkpoint {path} cannot be written", CheckpointFailed):
            if _id_at(path) == checkpoint:
                return  # another host has committed, and was lost
            files = {file: _index_of(os.path.join(staging, file)) for file in message.files}
            for entry in os.listdir(staging):
                # A host that was killed while it wrote has left it.
                if entry not in files and entry != MANIFEST:
                    with contextlib.suppress(OSError):
                        os.remove(os.path.join(staging, entry))
            _check_json(message.tree)  # it becomes a part of the manifest as it is
            manifest = _Manifest(FORMAT, VERSION, checkpoint, msgspec.Raw(message.tree), files)
            encoded = msgspec.json.encode(manifest)
            if len(encoded) > INDEX_BYTES:
                raise ValueError(
                    f"its manifest would have {len(encoded)} bytes, and {INDEX_BYTES} are the most: it has too "
                    "many arrays or shards. Make several checkpoints"
                )
            with open(os.path.join(staging, MANIFEST), "wb") as out:
                out.write(encoded)
                out.flush()
                os.fsync(out.fileno())
            _sync(staging)
            _check_free(path, message.overwrite)
            _publish(staging, path, message)
            _sync(os.path.dirname(path))
    finally:
        _discard(staging)
    _tidy(path, message.others)


def abandon(path: str, checkpoint: str, root: str = "") -> bool:
    """Remove the files of a checkpoint, and return whether it is at its path nevertheless.

    If it is not, a host that tries to commit it now fails.
    """
    path = resolved(path, root)
    _discard(_staging(path, checkpoint))
    return _id_at(path) == checkpoint


def _discard(staging: str) -> None:
    """Remove a directory as a whole, or not at all: another host may be about to rename it."""
    going = f"{staging}-gone"
    shutil.rmtree(going, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(staging, going)
    shutil.rmtree(going, ignore_errors=True)


def _publish(staging: str, path: str, message: CommitFiles) -> None:
    try:
        os.rename(staging, path)  # to nothing, or over an empty directory
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    if not message.overwrite:
        raise CheckpointExists(f"{path} has come into being while the checkpoint was written")
    moved = [os.path.join(path, file) for file in message.files]
    try:
        for file, target in zip(message.files, moved, strict=True):
            os.rename(os.path.join(staging, file), target)
        _sync(path)
        os.rename(os.path.join(staging, MANIFEST), os.path.join(path, MANIFEST))
    except BaseException:
        for target in moved:
            with contextlib.suppress(OSError):
                os.remove(target)
        raise
    _sync(path)


def _tidy(path: str, checkpoints: tuple[str, ...]) -> None:
    """Remove the files of the checkpoint before, and those that crashes have left."""
    with contextlib.suppress(OSError, CheckpointFailed):
        files = manifest_at(path).files
        for entry in os.listdir(path):
            if _OURS.fullmatch(entry) and entry not in files:
                os.remove(os.path.join(path, entry))
    parent, base = os.path.split(path)
    kept = {os.path.basename(_staging(path, other)) for other in checkpoints}
    with contextlib.suppress(OSError):
        for entry in os.listdir(parent):
            if entry.startswith(f".{base}.pw-") and entry not in kept:
                shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


def _check_free(path: str, overwrite: bool) -> None:
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path)):
        return
    if not overwrite:
        raise CheckpointExists(
            f"{path} exists already; pass overwrite=True to replace a checkpoint"
        )
    try:
        manifest_at(path)
    except CheckpointFailed as error:
        words = f"{path} is not replaced, because it is no checkpoint of pw: {error}"
        raise CheckpointExists(words) from error


def _id_at(path: str) -> str | None:
    with contextlib.suppress(CheckpointFailed):
        return manifest_at(path).id
    return None


def _index_of(path: str) -> _SavedFile:
    try:
        with opened(path) as file:
            entries, _ = header_in(file, os.path.basename(path))
    except FileNotFoundError:
        raise CheckpointFailed(
            f"a host has written {path}, and another one does not see it: the path must be on a file system "
            "that all hosts share"
        ) from None
    arrays = _decode_arrays(entries["__metadata__"].pw)
    return _SavedFile(os.path.getsize(path), arrays)


def header_in(file: BinaryIO, name: str) -> tuple[dict[str, _Entry], int]:
    """Return the header of a safetensors file that was just opened, and where its data begins."""
    size_bytes = int.from_bytes(read_exactly(file, 8), "little")
    if size_bytes > os.fstat(file.fileno()).st_size:
        raise ValueError(f"{name} is damaged: it does not begin with a header")
    if size_bytes > INDEX_BYTES:
        raise ValueError(f"{name} has a header of {size_bytes} bytes; {INDEX_BYTES} are the most")
    return _decode_header(read_exactly(file, size_bytes)), 8 + size_bytes


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ---------------------------------------------------------------------------------------------


def manifest_at(path: str) -> _Manifest:
    """Return the manifest of the checkpoint at a resolved path."""
    name = os.path.join(path, MANIFEST)
    with named(f"there is no checkpoint at {path}"):
        data = read_whole(name)
    with named(f"{name} is not the manifest of a checkpoint"):
        manifest = _decode_manifest(data)
        if manifest.format != FORMAT:
            raise ValueError(f"it is {manifest.format!r}, not {FORMAT!r}")
        if manifest.version != VERSION:
            raise ValueError(f"it is of version {manifest.version}; this is pw for {VERSION}")
        if not _ID.fullmatch(manifest.id):
            raise ValueError("its id is none that pw gives")
        if len(manifest.tree) > TREE_BYTES:
            raise ValueError(f"it describes its tree with more than {TREE_BYTES} bytes")
        if not all(_OURS.fullmatch(file) for file in manifest.files):
            raise ValueError("it names files that pw does not write")
    return manifest


def describe(path: str, root: str = "") -> tuple[str, bytes]:
    """Return the id of the checkpoint at a path, and the tree of its arrays.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointFailed: it cannot be read.
    """
    manifest = manifest_at(resolved(path, root))
    return manifest.id, bytes(manifest.tree)
