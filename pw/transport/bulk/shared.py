"""Transfers between processes of one machine: one copy, into a block that the receiver aliases.

Each receiver listens on a unix socket: in the private directory of its cluster or, without one,
under an abstract name (no file, gone with its process). A sender's bulk thread connects to it once
and then, for each transfer,

    sender                                        receiver (on its loop)
      | WANT block              ------------------->  |     only if it is not mapped yet
      |  <---------------------  BLOCK, descriptor    |     or MISSING: cancelled, or unknown
      | copies the parts                              |
      | FINISH transfer         ------------------->  |     delivers

Small transfers need no block: INLINE carries their bytes on the socket. DROP tells senders to unmap
a block that the receiver has released. An array that lies in a block of the sender, because it was
itself received, is not copied:

      | SHARE transfer, descriptor  -------------->  |     delivers an array over the sender's pages
      |  <------------------------  RETURN transfer  |     no array aliases them any more
      |  <------------------------  RETIRE transfer  |     the same, but a forked process may
      |  <------------------------    LOST transfer  |     it had no descriptor left: copy instead

All records have one fixed size. Other bytes on the socket, a record that breaks the protocol, or a
peer of another user closes that connection and nothing more.

The receiver is in `shared_receiver.py`, the sender in `shared_sender.py`.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator

ON_SOCKET_BYTES = 32 * 1024
"""Most bytes that travel on the socket: mapping a block would cost more."""
SHARE_BYTES = 2 << 20
"""Least bytes for which another mapping of the pages costs less than a copy."""

_RECORD = struct.Struct("<4sIQQ")
_MAGIC = b"pwb1"
WANT, FINISH, INLINE, BLOCK, MISSING, DROP, SHARE, RETURN, RETIRE, LOST = range(1, 11)
_DESCRIPTORS_AT_ONCE = 16
GONE = -1
"""Stand-in for a descriptor that came when this process could have no more."""


class Malformed(Exception):
    """The other end of a connection does not speak this protocol."""


def record(kind: int, first: int, second: int = 0) -> bytes:
    """One record, with its two numbers."""
    return _RECORD.pack(_MAGIC, kind, first, second)


def parse(buffer: bytearray) -> Iterator[tuple[int, int, int]]:
    """Take complete records off the front of the buffer.

    Raises:
        Malformed: these bytes are no record.
    """
    while len(buffer) >= _RECORD.size:
        magic, kind, first, second = _RECORD.unpack_from(buffer)
        if magic != _MAGIC:
            raise Malformed("no record begins here")
        del buffer[: _RECORD.size]
        yield kind, first, second


def receive(connection: socket.socket, limit_bytes: int) -> tuple[bytes, list[int]]:
    """Receive bytes and descriptors; GONE stands for descriptors that were lost."""
    received, descriptors, flags, _ = socket.recv_fds(connection, limit_bytes, _DESCRIPTORS_AT_ONCE)
    for descriptor in descriptors:  # Python 3.11 drops the flag that would ask for it
        os.set_inheritable(descriptor, False)
    if flags & socket.MSG_CTRUNC:
        descriptors.append(GONE)
    return received, descriptors


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that no mapping needs."""
    for descriptor in descriptors:
        if descriptor != GONE:
            os.close(descriptor)


def socket_name(name: str) -> str:
    """Return the address of the listener of this name: a path, or an abstract name."""
    return name if name.startswith("/") else f"\0{name}"
