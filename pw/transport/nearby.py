"""The short way to a tcp endpoint that is on this machine: a unix socket that has its name.

Sending a small frame over the loopback costs two to three times as much as over a unix socket, since the
sender does all that a network card and its interrupt would do. So who listens at tcp://host:port also
listens at an abstract unix socket called after that endpoint, and who dials the endpoint tries it first. Such
names belong to a network namespace, as ports do: one that is found can only be of the process that has the
port. Any user could take the name of an endpoint on another machine, though, so only root and the dialler's
own user are believed. Where nothing is found, at the cost of a refused connection, the way is tcp as ever.
"""

from __future__ import annotations

import socket
import sys

from pw.core.errors import ConnectionFailed
from pw.transport.endpoints import BACKLOG, SocketAddress, parse
from pw.transport.peers import is_trusted

_IS_LINUX = sys.platform == "linux"


def listen(endpoint: str) -> socket.socket | None:
    """A socket that listens for diallers of this tcp endpoint on this machine; None where that cannot be."""
    try:
        where = parse(endpoint)
    except ConnectionFailed:
        return None
    if not _IS_LINUX or where.family != socket.AF_INET:
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(where))
        listener.listen(BACKLOG)
    except OSError:  # somebody has taken the name: tcp is there for all
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def dial(where: SocketAddress) -> socket.socket | None:
    """A connection to whoever listens at this place and is on this machine; None if it is not."""
    if not _IS_LINUX or where.family != socket.AF_INET:
        return None
    try:
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptors left: who cannot dial tcp either tries again
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
    return "\0pw tcp://{}:{}".format(*where.address)
