"""Parses endpoints, tcp://host:port and ipc://path, and listens at them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
from typing import NamedTuple

from pw.core.errors import ConnectionFailed

BACKLOG = 512
LOOPBACK = "127.0.0.1"
PATH_BYTES = 107
"""The most bytes in the path of a unix socket."""
_WILDCARDS = ("*", "0.0.0.0")
_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class SocketAddress(NamedTuple):
    """The address of an endpoint, as the kernel needs it to dial or to listen."""

    family: int
    address: str | tuple[str, int]


def parse(endpoint: str) -> SocketAddress:
    """The address in an endpoint; a tcp one may hold the name of a host.

    Raises:
        ConnectionFailed: it is no endpoint.
    """
    scheme, separator, rest = endpoint.partition("://")
    if separator and scheme == "ipc" and rest:
        return SocketAddress(socket.AF_UNIX, "\0" + rest[1:] if rest[0] == "@" else rest)
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not colon or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConnectionFailed(
            f"{endpoint!r} is not an endpoint; it looks like tcp://host:port or ipc://path"
        )
    return SocketAddress(socket.AF_INET, (host, int(port)))


def is_numeric(where: SocketAddress) -> bool:
    """Whether an address holds no name that has to be looked up."""
    try:
        _look_up(where, _NUMERIC)
    except OSError:
        return False
    return True


def look_up(where: SocketAddress) -> SocketAddress:
    """The address with its name looked up, which may take seconds.

    Raises:
        OSError: there is no host of that name.
    """
    return _look_up(where, socket.AI_NUMERICSERV)


def listen(endpoint: str) -> socket.socket:
    """A socket that listens at `endpoint`; a star in the path of a unix socket becomes a random part.

    Raises:
        ConnectionFailed: the endpoint is taken, or makes no sense.
    """
    where = parse(endpoint)
    if isinstance(where.address, tuple) and where.address[0] == "*":
        where = where._replace(address=("0.0.0.0", where.address[1]))
    if isinstance(where.address, str):
        where = where._replace(address=where.address.replace("*", secrets.token_hex(4)))
    listener = None
    try:
        where = look_up(where)
        listener = socket.socket(where.family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _remove_remains(where)
        listener.bind(where.address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConnectionFailed(
            f"cannot listen on {endpoint}: {error.strerror or error}; "
            "stop what uses it, or choose another endpoint (port 0 picks a free one)"
        ) from error
    listener.setblocking(False)
    return listener


def unlisten(listener: socket.socket) -> None:
    """Close a listener, and remove its socket file."""
    path = listener.getsockname()
    listener.close()
    if listener.family == socket.AF_UNIX and isinstance(path, str) and path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def reachable_endpoint(listener: socket.socket, advertise: str | None) -> str:
    """The endpoint at which others reach `listener`; `advertise` replaces a wildcard address.

    Raises:
        ConnectionFailed: it is a wildcard, and this machine has no default route.
    """
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"ipc://{name}" if isinstance(name, str) else f"ipc://@{name[1:].decode()}"
    host, port = name
    if host == "0.0.0.0":
        host = advertise or _own_address()
    return f"tcp://{host}:{port}"


def is_on_loopback(endpoint: str) -> bool:
    """Whether a numeric tcp endpoint can be dialled on its own machine only."""
    return endpoint.startswith("tcp://127.")


def is_off_loopback(endpoint: str) -> bool:
    """Whether it can be dialled from other machines."""
    return endpoint.startswith("tcp://") and not is_on_loopback(endpoint)


def advertised(bind: str, towards: str) -> str | None:
    """The address to advertise for a wildcard in `bind`: the one on the way to the endpoint `towards`.

    None, for the address on the default route, if `towards` is on this machine: peers may not be.

    Raises:
        ConnectionFailed: an endpoint makes no sense.
    """
    where = parse(bind)
    if where.family != socket.AF_INET or where.address[0] not in _WILDCARDS:
        return None
    own = address_towards(towards)
    return None if own == LOOPBACK else own


def address_towards(endpoint: str) -> str:
    """The address of this machine at which the process at `endpoint` can dial it, without NAT in between.

    The loopback for an endpoint on this machine, or an unreachable one: dialling it will report the
    error. Looking up the name of a host may take seconds.

    Raises:
        ConnectionFailed: the endpoint makes no sense.
    """
    where = parse(endpoint)
    if where.family != socket.AF_INET:
        return LOOPBACK
    try:
        return _address_towards(look_up(where))
    except OSError:
        return LOOPBACK


def _look_up(where: SocketAddress, flags: int) -> SocketAddress:
    if isinstance(where.address, str):
        return where
    try:
        found = socket.getaddrinfo(*where.address, socket.AF_INET, socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # no host can have this name
        raise OSError(str(error)) from error
    return where._replace(address=(str(found[0][4][0]), where.address[1]))


def _remove_remains(where: SocketAddress) -> None:
    """Remove the socket file of a process that was killed, which would prevent listening."""
    path = where.address
    if not isinstance(path, str) or path.startswith("\0"):
        return
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def _own_address() -> str:
    """The address of this machine on its default route."""
    try:
        return _address_towards(
            SocketAddress(socket.AF_INET, ("192.0.2.1", 9))
        )  # reserved for examples
    except OSError as error:
        raise ConnectionFailed(
            "this machine has no default route, so peers cannot be told which of its addresses to dial; listen "
            "at one address (--bind tcp://ADDRESS:PORT) instead of at all of them"
        ) from error


def _address_towards(where: SocketAddress) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(where.address)  # sends nothing
        return str(probe.getsockname()[0])
