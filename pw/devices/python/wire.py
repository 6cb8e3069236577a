"""Frames between a host and its Python processes, over a socket pair.

A frame is a message and the bytes of its arrays, one after the other. The host sends `Load`, `Call`
and `Drop`; the process answers each `Call` with `Returned` or `Raised`, after any `Wrote`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from pw.core.errors import ErrorReport
from pw.core.functions.parts import Share
from pw.core.sharding import dtype_of

BUFFER_BYTES = 1 << 20
"""Of the socket, so that a batch needs few system calls."""

_LENGTH = struct.Struct("<Q")

Described = tuple[str, tuple[int, ...]]
"""The dtype and shape of an array."""

Empty = Callable[[tuple[int, ...], Any], np.ndarray[Any, Any]]
"""Makes memory for an array of a shape and dtype."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host has a process know a function under a key."""

    key: bytes
    artifact: bytes
    share: Share


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host has a process call a function; its arrays follow."""

    key: bytes
    arrays: tuple[Described, ...]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host does not need a function any more."""

    key: bytes


class Wrote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function wrote text to standard output or standard error."""

    is_error: bool
    text: str


class Returned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function returned arrays, which follow."""

    arrays: tuple[Described, ...]


class Raised(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function raised, or could not be loaded."""

    report: ErrorReport


Frame = Load | Call | Drop | Wrote | Returned | Raised

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def described(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Described, ...]:
    """Return the dtype and shape of each array."""
    return tuple((array.dtype.name, array.shape) for array in arrays)


def send(link: socket.socket, frame: Frame, arrays: Sequence[np.ndarray[Any, Any]] = ()) -> None:
    """Send a frame. Raises OSError if the other side has ended."""
    head = _encode(frame)
    link.sendall(_LENGTH.pack(len(head)) + head)
    for array in arrays:
        if array.nbytes:
            link.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def receive(
    link: socket.socket, empty: Empty = np.empty
) -> tuple[Frame, list[np.ndarray[Any, Any]]]:
    """Return the next frame and its arrays. Raises EOFError if the other side has ended."""
    (length,) = _LENGTH.unpack(_exactly(link, bytearray(_LENGTH.size)))
    frame = _decode(_exactly(link, bytearray(length)))
    arrays = []
    for dtype, shape in frame.arrays if isinstance(frame, Call | Returned) else ():
        array = empty(shape, dtype_of(dtype))
        if array.nbytes:
            _exactly(link, array.reshape(-1).view(np.uint8).data)
        arrays.append(array)
    return frame, arrays


def _exactly(link: socket.socket, room: Any) -> Any:
    """Fill a buffer from the socket, and return it."""
    rest = memoryview(room)
    while rest:
        try:
            count = link.recv_into(rest)
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other side has ended")
        rest = rest[count:]
    return room
