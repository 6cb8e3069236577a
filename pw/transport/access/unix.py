"""Finds the user of the process at the other end of a connection on this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")
_KNOWS_PEERS = hasattr(socket, "SO_PEERCRED")


def peer_user(connection: socket.socket) -> int:
    """The user of the process at the other end of a unix connection."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


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


def loopback_user(connection: socket.socket) -> int | None:
    """The user of the process at the other end of a tcp connection over the loopback.

    The kernel lists the user of each socket (proc(5), /proc/net/tcp). None for other connections, for an
    end that is gone, and where there is no such list.
    """
    try:
        own, peer = connection.getsockname(), connection.getpeername()
        if not ipaddress.ip_address(peer[0]).is_loopback:
            return None
        is_6 = connection.family == socket.AF_INET6
        wanted = [_in_table(*end[:2]) for end in (peer, own)]
        with open("/proc/net/tcp6" if is_6 else "/proc/net/tcp") as table:
            rows = (line.split() for line in table)
            return next((int(row[7]) for row in rows if row[1:3] == wanted), None)
    except (OSError, ValueError):
        return None


def is_foreign(connection: socket.socket) -> bool:
    """Whether the other end belongs to another user of this machine, as far as that can be known."""
    if connection.family == socket.AF_UNIX:
        return not is_trusted(connection)
    user = loopback_user(connection)
    return user is not None and user not in (0, os.geteuid())


def _in_table(address: str, port: int) -> str:
    """An end of a connection as the kernel's list has it: 32-bit words in the machine's byte order."""
    packed = ipaddress.ip_address(address).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
