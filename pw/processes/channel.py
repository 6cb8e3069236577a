"""Messages, with arrays and descriptors, through a socket pair between two processes of a machine.

A frame is a length, a msgpack array of the message and of the dtypes and shapes of its arrays, and the
bytes of the arrays. Descriptors travel beside the length.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from pw.core.sharding import dtype_of

Message = TypeVar("Message")

BUFFER_BYTES = 1 << 20
"""Bytes of the socket's buffers, so that large arrays need few system calls."""
_READ_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")

Empty = Callable[[tuple[int, ...], Any], np.ndarray[Any, Any]]
"""Makes memory for an array of a shape and dtype."""

_encode = msgspec.msgpack.Encoder().encode


class Received(NamedTuple, Generic[Message]):
    """A message, and what came with it."""

    message: Message
    arrays: list[np.ndarray[Any, Any]]
    descriptors: list[int]


_making_decoder = threading.Lock()
"""Held while a decoder is made: two threads that make the first decoder of a type at once crash in msgspec."""


class Channel(Generic[Message]):
    """One end of a socket pair. Several threads may send, and one receives.

    Args:
        end: the socket, or its descriptor.
        kinds: the types of the messages from the other end.
        empty: makes memory for arrays from the other end; without it, they are refused.
        descriptors: the largest number of descriptors that come with a message; the system closes others.
    """

    def __init__(
        self, end: socket.socket | int, kinds: Any, empty: Empty | None = None, descriptors: int = 0
    ) -> None:
        self.socket = socket.socket(fileno=end) if isinstance(end, int) else end
        self.socket.set_inheritable(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.ended = False
        """Whether this end is closed, or `arrived` has seen the end of the other side."""
        frame = tuple[kinds, tuple[tuple[str, tuple[int, ...]], ...]]
        with _making_decoder:
            self._decode = msgspec.msgpack.Decoder(frame).decode
        self._empty = empty
        self._descriptors = descriptors
        self._sending = threading.RLock()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with the next message."""
        return self.socket.fileno()

    def is_readable(self, timeout_s: float) -> bool:
        """Wait for a message, or for the end of the other side; return whether there is one."""
        return self._is_ready(select.POLLIN, timeout_s)

    def _is_ready(self, event: int, timeout_s: float | None = None) -> bool:
        ready = select.poll()  # descriptors may be too many for `select.select`
        ready.register(self.socket, event)
        return bool(ready.poll(None if timeout_s is None else timeout_s * 1000))

    def send(
        self,
        message: object,
        arrays: Sequence[np.ndarray[Any, Any]] = (),
        descriptors: Sequence[int] = (),
        *,
        wait: bool = True,
    ) -> None:
        """Send a message. Raises OSError if the other side has ended.

        Args:
            message: a struct.
            arrays: arrays in any layout.
            descriptors: the other side gets copies of them.
            wait: otherwise a small message raises BlockingIOError if the other side does not read.
        """
        parts = [np.ascontiguousarray(one).reshape(-1).view(np.uint8).data for one in arrays]
        body = _encode((message, [(one.dtype.name, one.shape) for one in arrays]))
        with self._sending:
            self._put(_LENGTH.pack(len(body)) + body, descriptors, wait)
            for part in parts:
                self._put(part)

    def _put(
        self, rest: bytes | memoryview, descriptors: Sequence[int] = (), wait: bool = True
    ) -> None:
        """Send bytes, and descriptors beside the first one."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while rest:
            try:
                if descriptors:
                    rights = array.array("i", descriptors)
                    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                    sent = self.socket.sendmsg([rest], beside, flags)
                    descriptors = ()
                else:
                    sent = self.socket.send(rest, flags)
            except BlockingIOError:  # event loops make their descriptors so
                if flags:
                    raise
                self._is_ready(select.POLLOUT)
            else:
                if sent == len(rest):
                    return
                rest, flags = memoryview(rest)[sent:], 0

    def receive(self, until_readable: Callable[[], None] | None = None) -> Received[Message]:
        """Return the next message, and what came with it.

        Args:
            until_readable: called before each read; it may raise to give up.

        Raises:
            EOFError: the other side has ended.
            msgspec.MsgspecError: the message cannot be read.
        """
        descriptors: list[int] = []
        try:
            if until_readable is not None:
                until_readable()
            if self._descriptors:
                head, descriptors, _, _ = socket.recv_fds(
                    self.socket, _LENGTH.size, self._descriptors
                )
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)
            else:
                head = self.socket.recv(_LENGTH.size)
            if not head:
                raise EOFError
            if len(head) < _LENGTH.size:
                head += self._read(_LENGTH.size - len(head), until_readable)
            body = self._read(_LENGTH.unpack(head)[0], until_readable)
            message, described = self._decode(body)
            arrays = []
            for dtype, shape in described:
                if self._empty is None:
                    raise msgspec.ValidationError("no arrays are expected")
                room = self._empty(shape, dtype_of(dtype))
                self._fill(room.reshape(-1).view(np.uint8).data, until_readable)
                arrays.append(room)
        except ConnectionError:
            raise EOFError from None
        return Received(message, arrays, descriptors)

    def _read(self, count: int, until_readable: Callable[[], None] | None) -> bytearray:
        """Read so many bytes; no memory is taken long before they come."""
        data = bytearray(min(count, _READ_BYTES))
        self._fill(memoryview(data), until_readable)
        while len(data) < count:
            part = bytearray(min(count - len(data), _READ_BYTES))
            self._fill(memoryview(part), until_readable)
            data += part
        return data

    def _fill(self, rest: memoryview, until_readable: Callable[[], None] | None) -> None:
        while rest:
            if until_readable is not None:
                until_readable()
            try:
                count = self.socket.recv_into(rest)
            except BlockingIOError:
                self._is_ready(select.POLLIN)
                continue
            if not count:
                raise EOFError
            rest = rest[count:]

    def arrived(self) -> Iterator[Received[Message]]:
        """Yield the messages that have arrived; does not wait."""
        while not self.ended and self.is_readable(0.0):
            try:
                yield self.receive()
            except EOFError:
                self.ended = True

    def close(self) -> None:
        """Close this end, which the other side sees. Idempotent."""
        self.ended = True
        self.socket.close()
