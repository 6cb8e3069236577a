"""Checkpoints on disk: how one comes to its path whole or not at all, and how parts of it are read.

A checkpoint is a directory with a safetensors file of each host that had something to write, and a manifest:

    PATH/manifest.json                    tree, id, and every file with its size, boxes and checksums
    PATH/<id>-00000.safetensors ...       boxes of arrays, and an index of them in the file's own metadata

The hosts write into a directory beside the path, `.NAME.pw-<id>`, and sync what they wrote. When all have,
one of them gathers the indexes into the manifest and renames the directory. Where the path has a checkpoint
already, the files go in beside the old ones, under their own names; replacing the manifest, which is one
rename as well, makes them the checkpoint; then the old ones go. So whoever looks finds all of one
checkpoint or all of the other, at any moment. What a crash leaves behind is of no checkpoint, and goes
with the next one to the same path.

Every host must see the path. Elements that safetensors has no name for (or numpy no type) are written as
bytes, in one more dimension; the index names the dtype. All here blocks: it belongs on a thread for that.
Nothing that takes long holds the interpreter, which the loop needs to stay alive in the eyes of others: that
is why files are read here as the bytes they are, and not with safetensors, which holds it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from pw.core.errors import (
    ArgumentError,
    CheckpointExists,
    CheckpointFailed,
    CheckpointNotFound,
    Error,
    OutOfHostMemory,
)
from pw.core.landing import Bytes
from pw.core.messages import CommitFiles, CopyFile, FileSource
from pw.core.sharding import ALIGNMENT_BYTES, ArraySpec, Box, box_shape, box_slices, dtype_of

FORMAT = "pw checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

_NATIVE = frozenset(
    [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["bool", "float16", "bfloat16", "float32", "float64", "complex64"]
)
"""What safetensors writes, and gives back as numpy arrays to whoever reads the files with it."""

_OURS = re.compile(r"[0-9a-f]+-\d{5}\.safetensors")


class Shard(NamedTuple):
    """A box of an array, and its value."""

    name: str
    spec: ArraySpec
    box: Box
    value: np.ndarray[Any, Any]


class _SavedBox(msgspec.Struct, frozen=True, array_like=True):
    tensor: str
    """Its name in the file."""
    box: Box
    crc32: int


class _SavedArray(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str
    boxes: list[_SavedBox]


class _SavedFile(msgspec.Struct, frozen=True):
    size_bytes: int
    arrays: dict[str, _SavedArray]


class _Entry(msgspec.Struct, frozen=True):
    """What a safetensors header says of a tensor, or of the file."""

    data_offsets: tuple[int, int] = (0, 0)
    pw: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    format: str
    version: int
    id: str
    tree: msgspec.Raw
    files: dict[str, _SavedFile]


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Say of which checkpoint something went wrong, as the error it is for the user."""
    try:
        yield
    except Error:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{what}: {error.strerror or error}") from error
    except MemoryError as error:
        raise OutOfHostMemory(f"{what}: {error}") from error
    except (OSError, SafetensorError, msgspec.MsgspecError, KeyError, ValueError) as error:
        raise CheckpointFailed(f"{what}: {error}") from error


def _staging(path: str, checkpoint: str) -> str:
    parent, base = os.path.split(path)
    return os.path.join(parent, f".{base}.pw-{checkpoint}")


# --- writing ---------------------------------------------------------------------------------------------


def write(job: CopyFile, shards: Sequence[Shard]) -> None:
    """Write one host's file, so that it survives the loss of the machine.

    Raises:
        CheckpointExists: there is something at the path, which is not to be replaced.
        CheckpointFailed: the file cannot be written.
    """
    with _named(f"the checkpoint {job.path} cannot be written"):
        if _id_at(job.path) == job.checkpoint:
            return  # asked for once more, because a controller was lost, and done before
        _check_free(job.path, job.overwrite)
        staging = _staging(job.path, job.checkpoint)
        os.makedirs(staging, exist_ok=True)
        arrays: dict[str, _SavedArray] = {}
        tensors: dict[str, TensorSpec] = {}
        alive: list[Bytes] = []
        for name, spec, box, value in shards:
            flat = _flat(value)
            alive.append(flat)
            shape, dtype = box_shape(box), spec.dtype
            if dtype not in _NATIVE:
                shape, dtype = (*shape, dtype_of(dtype).itemsize), "uint8"
            tensor = f"{name} {','.join(f'{start}:{stop}' for start, stop in box)}".rstrip()
            tensors[tensor] = TensorSpec(
                dtype=dtype, shape=shape, data_ptr=flat.ctypes.data, data_len=flat.nbytes
            )
            saved = arrays.setdefault(name, _SavedArray(spec.shape, spec.dtype, []))
            saved.boxes.append(_SavedBox(tensor, box, zlib.crc32(flat.data)))
        path = os.path.join(staging, job.file)
        index = msgspec.json.encode(arrays).decode()
        with open(path, "wb") as made:
            mode = os.fstat(made.fileno()).st_mode
        serialize_file(tensors, path, metadata={"pw": index})
        os.chmod(path, mode)  # it had made another file, that nobody else may read
        _sync(path)


def commit(message: CommitFiles) -> None:
    """Make what all hosts have written the checkpoint at its path.

    Raises:
        CheckpointExists: there is something at the path, which is not to be replaced.
        CheckpointFailed: a file is not there, or the directory cannot be put in its place. Nothing is
            left of the checkpoint then, and what was there before is there still.
    """
    path, checkpoint = message.path, message.checkpoint
    staging = _staging(path, checkpoint)
    try:
        with _named(f"the checkpoint {path} cannot be written"):
            if _id_at(path) == checkpoint:
                return  # a host that was lost meanwhile had come so far
            files = {file: _index_of(os.path.join(staging, file)) for file in message.files}
            for entry in os.listdir(staging):
                # A host that was killed while it wrote has left it. Another may be about to publish all this.
                if entry not in files and entry != MANIFEST:
                    with contextlib.suppress(OSError):
                        os.remove(os.path.join(staging, entry))
            manifest = _Manifest(FORMAT, VERSION, checkpoint, msgspec.Raw(message.tree), files)
            with open(os.path.join(staging, MANIFEST), "wb") as out:
                out.write(msgspec.json.encode(manifest))
                out.flush()
                os.fsync(out.fileno())
            _sync(staging)
            _check_free(path, message.overwrite)
            _publish(staging, path, message)
            _sync(os.path.dirname(path))
    finally:
        _discard(staging)
    _tidy(path, message.others)


def abandon(path: str, checkpoint: str) -> bool:
    """Remove what hosts have written of a checkpoint that will not be; whether it is at its path after all.

    If it is not, whoever may still be at putting it there fails.
    """
    _discard(_staging(path, checkpoint))
    return _id_at(path) == checkpoint


def _discard(staging: str) -> None:
    """Remove a directory; one that another host is about to rename goes as a whole, or not at all."""
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


def _tidy(path: str, others: tuple[str, ...]) -> None:
    """Remove what is of no checkpoint: the one before, and what crashes have left."""
    with contextlib.suppress(OSError, CheckpointFailed):
        files = _manifest_at(path).files
        for entry in os.listdir(path):
            if _OURS.fullmatch(entry) and entry not in files:
                os.remove(os.path.join(path, entry))
    parent, base = os.path.split(path)
    kept = {os.path.basename(_staging(path, other)) for other in others}
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
        _manifest_at(path)
    except CheckpointFailed as error:
        words = f"{path} is not replaced, because it is no checkpoint of pw: {error}"
        raise CheckpointExists(words) from error


def _id_at(path: str) -> str | None:
    with contextlib.suppress(CheckpointFailed):
        return _manifest_at(path).id
    return None


def _index_of(path: str) -> _SavedFile:
    try:
        entries, _ = _header_of(path)
    except FileNotFoundError:
        raise CheckpointFailed(
            f"a host has written {path}, and another one does not see it: the path must be on a file system "
            "that all hosts share"
        ) from None
    arrays = msgspec.json.decode(entries["__metadata__"].pw, type=dict[str, _SavedArray])
    return _SavedFile(os.path.getsize(path), arrays)


def _header_of(path: str) -> tuple[dict[str, _Entry], int]:
    """The header of a safetensors file, and where the data begins."""
    with open(path, "rb") as opened:
        size_bytes = int.from_bytes(opened.read(8), "little")
        if size_bytes > os.fstat(opened.fileno()).st_size:
            raise ValueError(
                f"{os.path.basename(path)} is damaged: it does not begin with a header"
            )
        header = opened.read(size_bytes)
    return msgspec.json.decode(header, type=dict[str, _Entry]), 8 + size_bytes


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flat(value: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


# --- reading ---------------------------------------------------------------------------------------------


def _manifest_at(path: str) -> _Manifest:
    name = os.path.join(path, MANIFEST)
    with _named(f"there is no checkpoint at {path}"), open(name, "rb") as opened:
        data = opened.read()
    with _named(f"{name} is not the manifest of a checkpoint"):
        manifest = msgspec.json.decode(data, type=_Manifest)
        if manifest.format != FORMAT:
            raise ValueError(f"it is {manifest.format!r}, not {FORMAT!r}")
        if manifest.version != VERSION:
            raise ValueError(f"it is of version {manifest.version}; this is pw for {VERSION}")
        if not all(_OURS.fullmatch(file) for file in manifest.files):
            raise ValueError("it names files that pw does not write")
    return manifest


def describe(path: str) -> tuple[str, bytes]:
    """Which checkpoint is at a path, and the tree that its writer described.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointFailed: what is there cannot be read.
    """
    manifest = _manifest_at(path)
    return manifest.id, bytes(manifest.tree)


class Reader:
    """One checkpoint that is being read; its files are opened when first needed.

    Raises:
        CheckpointNotFound: there is none at the path.
        CheckpointFailed: there is another one by now, or it cannot be read.
    """

    def __init__(self, path: str, checkpoint: str) -> None:
        self._path = path
        self._manifest = _manifest_at(path)
        if self._manifest.id != checkpoint:
            raise CheckpointNotFound(
                f"the checkpoint at {path} has been replaced by another one since it was opened"
            )
        self._opened: dict[str, _File] = {}
        self._boxes: dict[str, list[tuple[str, _SavedBox]]] = {}
        self._arrays: dict[str, _SavedArray] = {}
        for file, saved in self._manifest.files.items():
            for name, array in saved.arrays.items():
                self._arrays[name] = array
                self._boxes.setdefault(name, []).extend((file, box) for box in array.boxes)

    def read(
        self, source: FileSource, spec: ArraySpec, boxes: Sequence[Box]
    ) -> list[np.ndarray[Any, Any]]:
        """Boxes of an array, however it was split when it was written.

        Raises:
            ArgumentError: the array has another shape or dtype.
            CheckpointFailed: a file is damaged, or does not have what the manifest says.
        """
        with _named(f"{source.name!r} cannot be read from the checkpoint {self._path}"):
            array = self._arrays[source.name]
            if (array.shape, array.dtype) != (spec.shape, spec.dtype):
                raise ArgumentError(
                    f"{source.name!r} in {self._path} is {array.dtype}{list(array.shape)}, not "
                    f"{spec.dtype}{list(spec.shape)}"
                )
            return [self._assemble(source.name, spec.dtype, box) for box in boxes]

    def _assemble(self, name: str, dtype: str, box: Box) -> np.ndarray[Any, Any]:
        shape, itemsize = box_shape(box), dtype_of(dtype).itemsize
        missing = math.prod(shape)
        flat = _aligned(missing * itemsize)
        result = flat.reshape(*shape, itemsize)
        for file, saved in self._boxes[name]:
            common = _common(saved.box, box)
            if common is None:
                continue
            part = result[box_slices(_within(common, box))]
            self._file(file).read(saved, _within(common, saved.box), part)
            if common == saved.box and zlib.crc32(_flat(part).data) != saved.crc32:
                raise CheckpointFailed(
                    f"{file} is damaged: {saved.tensor!r} is not what was written"
                )
            missing -= math.prod(box_shape(common))
        if missing:
            raise CheckpointFailed(f"{name!r} has no value at {box} in the checkpoint {self._path}")
        return flat.view(dtype_of(dtype)).reshape(shape)

    def _file(self, file: str) -> _File:
        opened = self._opened.get(file)
        if opened is None:
            path = os.path.join(self._path, file)
            opened = self._opened[file] = _File(path, self._manifest.files[file].size_bytes)
        return opened


class _File:
    """One safetensors file that is being read."""

    def __init__(self, path: str, size_bytes: int) -> None:
        self._path = path
        found = os.path.getsize(path)
        if found != size_bytes:
            name = os.path.basename(path)
            raise CheckpointFailed(
                f"{name} is damaged: it has {found} bytes instead of {size_bytes}"
            )
        self._entries, self._begin = _header_of(path)
        self._bytes = np.memmap(path, np.uint8, "r")

    def read(self, saved: _SavedBox, inner: Box, out: Bytes) -> None:
        """Fill `out`, which has one dimension more for the bytes of an element."""
        start, stop = self._entries[saved.tensor].data_offsets
        tensor = self._bytes[self._begin + start : self._begin + stop]
        wanted = tensor.reshape(*box_shape(saved.box), out.shape[-1])[box_slices(inner)]
        if not wanted.flags.c_contiguous:
            np.copyto(out, wanted)
            return
        # One after the other on disk: reading is quicker than faulting pages in.
        target = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        view = target.reshape(-1).data
        with open(self._path, "rb", buffering=0) as opened:
            opened.seek(wanted.ctypes.data - self._bytes.ctypes.data)
            while len(view):
                count = opened.readinto(view)
                if not count:
                    raise CheckpointFailed(
                        f"{os.path.basename(self._path)} is damaged: it ends early"
                    )
                view = view[count:]
        if target is not out:
            np.copyto(out, target)


def _aligned(size_bytes: int) -> Bytes:
    """Memory that devices may use as it is."""
    spare = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -spare.ctypes.data % ALIGNMENT_BYTES
    return spare[start : start + size_bytes]


def _common(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None for nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _within(inner: Box, outer: Box) -> Box:
    """`inner` as a box of `outer`."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))
