"""Encodes the messages for one peer in one loop turn as a frame, and decodes frames.

A frame is the msgpack array `[sequence, [[to_actor, from_actor, message], ...]]`. Its pieces are
encoded separately: a message to many peers is encoded once, and the two names before it once per
pair of actors.

Input is not trusted. Three bounds hold before any object is made: the size of a frame, the nesting
depth (msgspec's own), and the number of msgpack objects, because small objects grow when decoded:
10 MiB of heartbeats become 205 MiB of tuples. Only frames of more than `MAX_OBJECTS` bytes can
exceed that number, so only these are walked through, at about 0.1 µs per object.
"""

from __future__ import annotations

import functools
from typing import get_args

import msgspec

from pw.core import messages
from pw.core.errors import ProtocolError

MAX_FRAME_BYTES = 64 << 20
"""Most bytes of a frame that is sent or accepted; bulk data has its own plane."""

MAX_OBJECTS = 1 << 20
"""Most msgpack objects in one frame, which bounds what decoding it can allocate."""

BATCH_BYTES = 256 << 10
"""Bytes at which a frame is sent before the loop turn ends."""

_OVERHEAD_BYTES = 4096
"""Room in a frame for the sequence, headers and names."""

_REMOTE_KINDS = frozenset(get_args(messages.Message))


class MalformedFrame(ProtocolError):
    """Bytes that are no frame of this protocol."""


class MessageTooLarge(ProtocolError):
    """A message that no frame can hold."""


class TooManyObjects(MessageTooLarge):
    """A message of more objects than a frame may hold."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A decoded frame: its number on the link, and (to actor, from actor, message) in order."""

    sequence: int
    envelopes: list[tuple[str, str, messages.Message]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_message(message: object) -> bytes:
    """Encode one message, to be joined into frames for any number of peers.

    Raises:
        ProtocolError: the message is a timer, or msgpack cannot express it.
        MessageTooLarge: no frame could hold it.
    """
    if type(message) not in _REMOTE_KINDS:
        raise ProtocolError(f"{type(message).__name__} is not a message that crosses processes")
    try:
        body = _encoder.encode(message)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_FRAME_BYTES - _OVERHEAD_BYTES:
        raise MessageTooLarge(
            f"it takes {len(body)} bytes and a message holds "
            f"{MAX_FRAME_BYTES}; large values belong in arrays, not in programs or arguments"
        )
    if len(body) > MAX_OBJECTS and exceeds_objects(body, MAX_OBJECTS):
        raise TooManyObjects(
            f"it consists of more than {MAX_OBJECTS} objects, the bound for "
            "one message; split the program"
        )
    return body


@functools.lru_cache(maxsize=4096)
def encode_names(to_actor: str, from_actor: str) -> bytes:
    """The names before a message in a frame."""
    names = b"\x93" + _encoder.encode(to_actor) + _encoder.encode(from_actor)
    if len(names) > _OVERHEAD_BYTES // 2:
        raise ProtocolError(f"actor names of {len(names)} bytes are too long")
    return names


def join_frame(sequence: int, pieces: list[bytes]) -> bytes:
    """Make a frame of alternating names and messages, each encoded before."""
    count = (len(pieces) // 2).to_bytes(4, "big")
    return b"".join((b"\x92", _encoder.encode(sequence), b"\xdd", count, *pieces))


def encode_frame(sequence: int, envelopes: list[tuple[str, str, messages.Message]]) -> bytes:
    """Encode a whole frame at once."""
    pieces: list[bytes] = []
    for to_actor, from_actor, message in envelopes:
        pieces += (encode_names(to_actor, from_actor), encode_message(message))
    return join_frame(sequence, pieces)


def decode_parts(parts: list[bytes]) -> Frame:
    """Decode the frame in a ZMTP message. Raises MalformedFrame if it does not have one part."""
    if len(parts) != 1:
        raise MalformedFrame(f"a message of {len(parts)} parts")
    return decode(parts[0])


def decode(data: bytes) -> Frame:
    """Decode and check a frame.

    Raises:
        MalformedFrame: `data` is no frame; nothing else is raised.
    """
    size = len(data)
    if size > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {size} bytes is over the bound of {MAX_FRAME_BYTES}")
    if size > MAX_OBJECTS and exceeds_objects(data, MAX_OBJECTS):
        raise MalformedFrame(f"a frame of more than {MAX_OBJECTS} objects")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"not a frame: {error}") from error


def _strides() -> list[int]:
    """Bytes from each msgpack type byte to the next; 0 where a length field has to be read."""
    stride = [1] * 256  # small integers, nil, booleans, headers of small maps and arrays
    for size in range(32):
        stride[0xA0 + size] = 1 + size  # short strings
    stride[0xC4:0xCA] = [0] * 6  # binary and extension values
    stride[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # floats and integers
    stride[0xD4:0xD9] = [3, 4, 6, 10, 18]  # extensions of fixed size
    stride[0xD9:0xDC] = [0] * 3  # strings
    stride[0xDC:0xE0] = [3, 5, 3, 5]  # headers of arrays and maps
    return stride


_STRIDES = _strides()
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}


def exceeds_objects(data: bytes, most: int = MAX_OBJECTS) -> bool:
    """Whether `data` holds more msgpack objects than allowed; nesting does not matter for that."""
    position, end, strides = 0, len(data), _STRIDES
    for _ in range(most):
        if position >= end:
            return False
        head = data[position]
        stride = strides[head]
        if stride:
            position += stride
        else:
            width = _LENGTH_BYTES[head]
            start = position + 1
            extension = head in (0xC7, 0xC8, 0xC9)  # one byte of type before the payload
            position = (
                start + width + extension + int.from_bytes(data[start : start + width], "big")
            )
    return position < end
