"""Transfers between machines: chunks over tcp connections of their own.

Where the cluster has a secret, both ends prove first that they know it (`pw.transport.proof`).

Both ends live on the bulk thread, and neither bytes nor their acknowledgements share a connection
with control messages. A receiver listens; a sender has one connection per receiver.

    sender                                         receiver
      | CHUNK transfer, offset, length; bytes -->  |   received straight into the leased buffer
      | FINISH transfer, total bytes          -->  |   delivers
      |  <------------------------- ACK transfer   |   or REFUSE, at any time

Only the kernel copies the bytes: out of the sender's array, and into the receiver's buffer. A
landing is reserved memory, so no credits are needed. Transfers to one receiver take turns by the
chunk, and those of at most one chunk go first, so a small transfer waits for one chunk of the large
ones.

The receiver checks each header before it writes a byte: the transfer is open, it belongs to this
connection (the first that named it), and the chunk lies inside it. If not, it counts the chunk,
answers REFUSE, and drops the bytes. If the bytes are no header, it closes the connection.

The kernel notices a peer that is gone; a silent receiver is dropped after `SILENCE_S`. A connection
is never resumed: its pushes fail, and the next push makes another one.

The receiver is in `chunk_receiver.py`, the sender in `chunk_sender.py`.
"""

from __future__ import annotations

import socket
import struct

CHUNK_BYTES = 4 << 20
SILENCE_S = 20
"""After so long without an answer, the sender counts a receiver as dead, and the kernel a machine."""

HEADER = struct.Struct("<4sIQQQ")
MAGIC = b"pwc2"
PLANE = b"chunks"
CHUNK, FINISH, ACK, REFUSE = range(1, 5)


def header(kind: int, transfer: int, offset: int = 0, length: int = 0) -> bytes:
    """The header of a chunk, or a whole message of another kind."""
    return HEADER.pack(MAGIC, kind, transfer, offset, length)


def prepare(connection: socket.socket) -> None:
    """Set the socket options of both ends."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_S // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", SILENCE_S // 2),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
