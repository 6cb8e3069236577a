"""Packs arrays into one buffer, each at a 64-byte boundary, so that the receiver can alias them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pw.core.landing import Bytes
from pw.core.sharding import ArraySpec, box_bytes, box_shape, dtype_of, packed_offsets

ArrayType = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array."""


def flat_bytes(data: np.ndarray[Any, Any]) -> Bytes:
    """Return the bytes of an array, without a copy where they are contiguous."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def packed_bytes(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    """Return the size of the buffer that `pack` returns."""
    return packed_offsets([array.nbytes for array in arrays])[1]


def sizes_of(types: Sequence[ArrayType]) -> list[int]:
    """Return the sizes of arrays in bytes."""
    return [math.prod(shape) * dtype_of(dtype).itemsize for dtype, shape in types]


def pack(arrays: Sequence[np.ndarray[Any, Any]]) -> bytes:
    """Return one buffer with several arrays, each at a 64-byte boundary."""
    offsets, total = packed_offsets([array.nbytes for array in arrays])
    packed = bytearray(total)
    for offset, array in zip(offsets, arrays, strict=True):
        packed[offset : offset + array.nbytes] = array.tobytes()
    return bytes(packed)


def unpack_arrays(buffer: bytes | Bytes, types: Sequence[ArrayType]) -> list[np.ndarray[Any, Any]]:
    """Return views of the arrays of a packed buffer. Raises ValueError if they do not fit into it."""
    sizes = sizes_of(types)
    offsets, _ = packed_offsets(sizes)
    arrays = []
    for offset, size, (dtype, shape) in zip(offsets, sizes, types, strict=True):
        flat = np.frombuffer(buffer, np.uint8, size, offset) if size else np.empty(0, np.uint8)
        arrays.append(flat.view(dtype_of(dtype)).reshape(shape))
    return arrays


def unpack(buffer: bytes | Bytes, offset: int, spec: ArraySpec, box: Any) -> np.ndarray[Any, Any]:
    """Return a view of the array of shape `box` at `offset` of a packed buffer."""
    dtype = dtype_of(spec.dtype)
    shape = box_shape(box)
    flat = np.frombuffer(buffer, np.uint8, box_bytes(box, spec.dtype), offset)
    return flat.view(dtype).reshape(shape) if flat.size else np.empty(shape, dtype)
