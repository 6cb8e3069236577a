"""The short way to a tcp endpoint on this machine: an abstract unix socket with its name.

A small frame over the loopback costs two to three times as much as over a unix socket. So a
listener at tcp://host:port also listens at an abstract unix socket with the name of that endpoint,
and diallers try it first. Such names belong to a network namespace, as ports do. Any user could
take the name of an endpoint on another machine, so diallers trust only root and their own user.
Otherwise they use tcp.
"""

from __future__ import annotations

import socket
import sys

from pw.core.errors import ConnectionFailed
from pw.transport.access.unix import is_trusted
from pw.transport.endpoints import BACKLOG, SocketAddress, parse, tcp_endpoint

_IS_LINUX = sys.platform == "linux"


def listen(endpoint: str) -> socket.socket | None:
    """A socket that listens for diallers of this tcp endpoint on this machine; None if there can be
    none."""
    try:
        where = parse(endpoint)
    except ConnectionFailed:
        return None
    if not _IS_LINUX or where.family == socket.AF_UNIX:
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(where))
        listener.listen(BACKLOG)
    except OSError:  # the name is taken: diallers use tcp
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def dial(where: SocketAddress) -> socket.socket | None:
    """A connection to the listener at this address, if it is on this machine; else None."""
    if not _IS_LINUX or where.family == socket.AF_UNIX:
        return None
    try:
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptors left: dialling tcp reports it
        return None
    try:
        dialled.setblocking(False)
        dialled.connect(_name(where))
        if is_trusted(dialled):
            return dialled
    except OSError:
        pass
    dialled.close()
    return None


def _name(where: SocketAddress) -> str:
    assert isinstance(where.address, tuple)
    return f"\0pw {tcp_endpoint(*where.address)}"
