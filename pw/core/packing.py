"""Packs arrays into one buffer, each at a 64-byte boundary, so that the receiver can alias them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pw.core.landing import Bytes
from pw.core.sharding import ArraySpec, box_bytes, box_shape, dtype_of, packed_offsets


def pack(arrays: Sequence[np.ndarray[Any, Any]]) -> bytes:
    """Return one buffer with several arrays, each at a 64-byte boundary."""
    offsets, total = packed_offsets([array.nbytes for array in arrays])
    packed = bytearray(total)
    for offset, array in zip(offsets, arrays, strict=True):
        packed[offset : offset + array.nbytes] = array.tobytes()
    return bytes(packed)


def unpack(buffer: bytes | Bytes, offset: int, spec: ArraySpec, box: Any) -> np.ndarray[Any, Any]:
    """Return a view of the array of shape `box` at `offset` of a packed buffer."""
    dtype = dtype_of(spec.dtype)
    shape = box_shape(box)
    flat = np.frombuffer(buffer, np.uint8, box_bytes(box, spec.dtype), offset)
    return flat.view(dtype).reshape(shape) if flat.size else np.empty(shape, dtype)
