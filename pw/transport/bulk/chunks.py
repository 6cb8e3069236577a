"""Transfers between machines: chunks over connections of their own.

With credentials, connections over tcp are TLS 1.3, and both ends show their certificates
(`pw.transport.streams`). Without, they are unix sockets of this user or, with `insecure`, plain tcp.

Both ends live on the bulk thread, and neither bytes nor their acknowledgements share a connection
with control messages. Hosts push over connections that they dial, one for each receiver. A client
listens nowhere: it dials the host, and says which plane it is; the host pushes over that connection.

    sender                                         receiver
      |  <------------------ RECEIVE plane's number|   first, if the receiver has dialled
      | CHUNK transfer, offset, length; bytes -->  |   received straight into the leased buffer
      | FINISH transfer, total bytes          -->  |   delivers
      |  <------------------------- ACK transfer   |   or REFUSE, at any time

Without TLS only the kernel copies the bytes: out of the sender's array, and into the receiver's
buffer. A landing is reserved memory, so no credits are needed. Transfers to one receiver take turns
by the chunk, and those of at most one chunk go first, so a small transfer waits for one chunk of the
large ones.

The receiver checks each header before it writes a byte: the transfer is open, it belongs to this
connection (the first that named it), and the chunk lies inside it. If not, it counts the chunk,
answers REFUSE, and drops the bytes. If the bytes are no header, it closes the connection. The number
of a transfer has 63 random bits, and travels only over the link to its sender: it is what allows a
peer to write into a landing.

The kernel notices a peer that is gone; a silent receiver is dropped after `SILENCE_S`, as is a
sender that brings less than `LEAST_BYTES_PER_S` of a chunk. A connection is never resumed: its
pushes fail, and the next push makes another one.

A listener takes connections for chunks at the port of a node's links, and hands them over with their
first header (`pw.transport.links.connection`). The receiver is in `chunk_receiver.py`, the sender in
`chunk_sender.py`, dialling in `chunk_dial.py`.
"""

from __future__ import annotations

import socket
import struct

from pw.transport.endpoints import CHUNKS_MAGIC

CHUNK_BYTES = 4 << 20
SILENCE_S = 20
"""Seconds without an answer after which the sender counts a receiver as dead, and the kernel a machine."""

LEAST_BYTES_PER_S = 16 << 10

HEADER = struct.Struct("<4sIQQQ")
MAGIC = CHUNKS_MAGIC
CHUNK, FINISH, ACK, REFUSE, RECEIVE = range(1, 6)


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


def receive_header(plane: str) -> bytes:
    """Return the first bytes of a receiver that has dialled: its plane, 128 bits as hexadecimal digits."""
    number = int(plane, 16)
    return header(RECEIVE, number >> 64, number & (1 << 64) - 1)


def plane_of(high: int, low: int) -> str:
    """The plane in a RECEIVE."""
    return f"{high << 64 | low:032x}"
