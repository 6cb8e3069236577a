"""Reads arrays from a checkpoint on disk (`pw.devices.host.checkpoint_format` has its format).

All calls block. Files are read as bytes, not with safetensors, because that holds the interpreter,
which the event loop needs to send heartbeats.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pw.core.errors import ArgumentError, CheckpointFailed, CheckpointNotFound
from pw.core.landing import Bytes
from pw.core.messages import FileSource
from pw.core.packing import flat_bytes
from pw.core.sharding import ALIGNMENT_BYTES, ArraySpec, Box, box_shape, box_slices, dtype_of
from pw.devices.host.checkpoint_format import SavedArray, SavedBox, header_in, manifest_at, named
from pw.devices.host.checkpoint_paths import opened, resolved

BLOCK_BYTES = 4 << 20
"""Bytes of one read of a file of which only parts are wanted."""


class CheckpointReader:
    """Reads arrays from one checkpoint; each file is opened when it is first needed.

    Args:
        path: of the checkpoint.
        checkpoint: its id.
        root: the folder in which it lies; empty for any.
        block_bytes: how much is read at once where only parts of it are wanted.

    Raises:
        CheckpointNotFound: it is not at the path any more.
        CheckpointFailed: it cannot be read.
    """

    def __init__(
        self, path: str, checkpoint: str, root: str = "", block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._block_bytes = block_bytes
        self._path = path = resolved(path, root)
        self._manifest = manifest_at(path)
        if self._manifest.id != checkpoint:
            raise CheckpointNotFound(
                f"the checkpoint at {path} has been replaced by another one since it was opened"
            )
        self._opened: dict[str, _File] = {}
        self._boxes: dict[str, list[tuple[str, SavedBox]]] = {}
        self._arrays: dict[str, SavedArray] = {}
        for file, saved in self._manifest.files.items():
            for name, array in saved.arrays.items():
                self._arrays[name] = array
                self._boxes.setdefault(name, []).extend((file, box) for box in array.boxes)

    def read(
        self, source: FileSource, spec: ArraySpec, boxes: Sequence[Box]
    ) -> list[np.ndarray[Any, Any]]:
        """Return boxes of an array, however it was split when it was written.

        Raises:
            ArgumentError: the array has another shape or dtype.
            CheckpointFailed: a file is damaged, or does not have what the manifest says.
        """
        with named(f"{source.name!r} cannot be read from the checkpoint {self._path}"):
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
            if common == saved.box and zlib.crc32(flat_bytes(part).data) != saved.crc32:
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
            size_bytes = self._manifest.files[file].size_bytes
            opened = self._opened[file] = _File(path, size_bytes, self._block_bytes)
        return opened


class _File:
    """One safetensors file.

    It is read with calls that say where, and not mapped: a file that becomes shorter meanwhile would
    otherwise end the process.
    """

    def __init__(self, path: str, size_bytes: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._name = os.path.basename(path)
        self._file = opened(path)
        self._size_bytes = os.fstat(self._file.fileno()).st_size
        if self._size_bytes != size_bytes:
            raise CheckpointFailed(
                f"{self._name} is damaged: it has {self._size_bytes} bytes instead of {size_bytes}"
            )
        self._entries, self._begin = header_in(self._file, self._name)

    def read(self, saved: SavedBox, inner: Box, out: Bytes) -> None:
        """Fill `out`, whose last dimension is the bytes of an element."""
        start, stop = self._entries[saved.tensor].data_offsets
        shape = (*box_shape(saved.box), out.shape[-1])
        if start < 0 or stop - start != math.prod(shape):
            raise CheckpointFailed(f"{self._name} is damaged: {saved.tensor!r} has another size")
        self._fill(self._begin + start, shape, (*inner, (0, out.shape[-1])), out)

    def _fill(self, offset: int, shape: tuple[int, ...], box: Box, out: Bytes) -> None:
        """Fill `out` with a box of an array of bytes that begins at an offset of the file."""
        (start, stop), row = box[0], math.prod(shape[1:])
        if all(part == (0, size) for part, size in zip(box[1:], shape[1:], strict=True)):
            self._read(offset + start * row, out)
        elif row > self._block_bytes:
            for index in range(start, stop):
                self._fill(offset + index * row, shape[1:], box[1:], out[index - start])
        else:
            rows = max(1, self._block_bytes // max(row, 1))
            for first in range(start, stop, rows):
                last = min(first + rows, stop)
                block = np.empty((last - first, *shape[1:]), np.uint8)
                self._read(offset + first * row, block)
                part = block[(slice(None), *box_slices(box[1:]))]
                np.copyto(out[first - start : last - start], part)

    def _read(self, offset: int, out: Bytes) -> None:
        target = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        view = target.reshape(-1).data
        while len(view):
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise CheckpointFailed(f"{self._name} is damaged: it ends early")
            view, offset = view[count:], offset + count
        if target is not out:
            np.copyto(out, target)


def _aligned(size_bytes: int) -> Bytes:
    """Return memory that devices can use without a copy."""
    spare = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -spare.ctypes.data % ALIGNMENT_BYTES
    return spare[start : start + size_bytes]


def _common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _within(inner: Box, outer: Box) -> Box:
    """Return `inner` as a box of `outer`."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))
