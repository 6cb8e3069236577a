"""Whether the machine at the other end of a tcp connection still answers.

A stopped process and a dead machine are equally silent, but the kernel of the stopped process acknowledges
what comes. So silence on a connection whose bytes are acknowledged is that of a slow process.

`TCP_USER_TIMEOUT` does not tell the two apart: it also ends the connection to a stopped process whose buffers
are full. While bytes wait, keepalive is not sent. The kernel's own record of the connection (`tcp_info` in
linux/tcp.h) has both facts: when the newest acknowledgement came, and whether the kernel asks for one again.
"""

from __future__ import annotations

import socket
import struct
import sys

_HAS_RECORD = sys.platform == "linux"
_RECORD = struct.Struct("=2xBB4x48xI")
"""Parts of `tcp_info`: unanswered retransmissions and probes, and ms since the newest acknowledgement."""


def unanswered_s(connected: socket.socket) -> float:
    """Return the seconds without an answer of the peer's machine to the kernel; 0 if it answers.

    A unix socket ends with its peer, so its peer's machine always answers. So does every machine for a kernel
    that keeps no such record.
    """
    if not _HAS_RECORD or connected.family == socket.AF_UNIX:
        return 0.0
    try:
        record = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECORD.size)
    except OSError:  # the connection has ended: the next read says so
        return 0.0
    retransmissions, probes, age_ms = _RECORD.unpack(record)
    return age_ms / 1000 if retransmissions or probes else 0.0
