"""Finds the user of the process at the other end of a unix connection."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")
_KNOWS_PEERS = hasattr(socket, "SO_PEERCRED")


def peer_user(connection: socket.socket) -> int:
    """The user of the process at the other end of a unix connection."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def is_trusted(connection: socket.socket) -> bool:
    """Whether the other end belongs to this process's user, or to root; always true for tcp.

    Without SO_PEERCRED (on macOS) only the mode of a socket's directory keeps other users out.
    """
    if connection.family != socket.AF_UNIX or not _KNOWS_PEERS:
        return True
    try:
        return peer_user(connection) in (0, os.geteuid())
    except OSError:  # it is gone
        return False
