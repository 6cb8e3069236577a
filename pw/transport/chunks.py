"""Transfers between machines: chunks over tcp connections of their own.

Where the cluster has a secret, both ends prove first that they know it (`pw.transport.proof`).

Both ends live on the bulk thread, and neither bytes nor their acknowledgements share a connection
with control messages. A receiver listens; a sender has one connection per receiver.

    sender                                         receiver
      | CHUNK transfer, offset, length; bytes -->  |   received straight into the leased buffer
      | FINISH transfer, total bytes          -->  |   delivers
      |  <------------------------- ACK transfer   |   or REFUSE, at any time

The kernel copies the bytes out of the sender's array and into the receiver's buffer, and nobody
else copies them: libzmq would once more on either side, mostly into fresh pages. No credits are
needed, because a landing is memory that waits: what is on its way is bounded by the kernel's
socket buffers. Transfers to one receiver take turns by the chunk, and those of no more than one
chunk go first, so a small one waits for a chunk of the large ones and not for their ends.

Whatever arrives is checked before a byte is written: the header, that the transfer is open, that
it belongs to this connection (the first to know its number), and that the chunk lies inside it.
What fails is counted, answered with REFUSE, and its bytes are thrown away; after what is no header
at all nobody knows where the next one begins, so that connection is closed, and only that.

A peer that is gone is noticed by the kernel (a reset, or probes that nobody answers); a receiver
that is connected but takes and says nothing is given up after a while. A connection that ends is
never resumed: its pushes fail, and the next push makes another one.
"""

from __future__ import annotations

import socket
import struct

CHUNK_BYTES = 4 << 20
SILENCE_S = 20
"""Whoever owes an answer for so long is taken for dead: a receiver by its sender, a machine by the kernel."""

HEADER = struct.Struct("<4sIQQQ")
MAGIC = b"pwc2"
PLANE = b"chunks"
CHUNK, FINISH, ACK, REFUSE = range(1, 5)


def header(kind: int, transfer: int, offset: int = 0, length: int = 0) -> bytes:
    """What goes before a chunk's bytes, or is a whole message."""
    return HEADER.pack(MAGIC, kind, transfer, offset, length)


def prepare(connection: socket.socket) -> None:
    """Set what both ends of a connection want of the kernel."""
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
