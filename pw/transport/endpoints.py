"""Parses endpoints, tcp://host:port and ipc://path, and listens at them.

A host is a name, an IPv4 address, or an IPv6 address in brackets. A name with addresses of both kinds
stands for its IPv4 address. Where to listen, the port may be a range, as in tcp://*:7000-7100.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import stat
from typing import NamedTuple

from pw.core.errors import ConnectionFailed

BACKLOG = 512
NO_DESCRIPTORS_S = 1.0
"""Seconds without new connections after the process had no descriptor for one."""
CHUNKS_MAGIC = b"pwc4"
"""The first bytes that the dialler of a connection for chunks sends; those of a link are others."""
CHUNKS_HEAD_BYTES = 32
"""The size of the header that begins with them."""
LOOPBACK = "127.0.0.1"
PATH_BYTES = 107
"""The most bytes in the path of a unix socket."""
_WILDCARDS = ("*", "0.0.0.0", "::")
_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are reserved for examples."""
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
    where, last_port = parse_bind(endpoint)
    if isinstance(where.address, tuple) and last_port != where.address[1]:
        raise ConnectionFailed(f"{endpoint!r} has a range of ports; only a listener can choose one")
    return where


def parse_bind(endpoint: str) -> tuple[SocketAddress, int]:
    """The address in an endpoint to listen at, with its first port; and its last port.

    Raises:
        ConnectionFailed: it is no endpoint.
    """
    scheme, separator, rest = endpoint.partition("://")
    if separator and scheme == "ipc" and rest:
        return SocketAddress(socket.AF_UNIX, "\0" + rest[1:] if rest[0] == "@" else rest), 0
    host, _, ports = rest.rpartition(":")
    first, dash, last = ports.partition("-")
    is_6 = host.startswith("[") and host.endswith("]") and ":" in host
    if is_6:
        host = host[1:-1]
    numbers = [int(port) for port in (first, last if dash else first) if port.isdecimal()]
    if (
        scheme != "tcp"
        or not host
        or (":" in host) is not is_6
        or len(numbers) != 2
        or not (numbers[0] == numbers[1] or 0 < numbers[0] < numbers[1])
        or numbers[1] > 0xFFFF
    ):
        raise ConnectionFailed(
            f"{endpoint!r} is not an endpoint; it looks like tcp://host:port, tcp://[::1]:port or ipc://path"
        )
    family = socket.AF_INET6 if is_6 else socket.AF_INET
    return SocketAddress(family, (host, numbers[0])), numbers[1]


def tcp_endpoint(host: str, port: int) -> str:
    """The endpoint of a port, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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
    """A socket that listens at `endpoint`, at the first free port of a range.

    A star in the path of a unix socket becomes a random part.

    Raises:
        ConnectionFailed: the endpoint is taken, or makes no sense.
    """
    where, last_port = parse_bind(endpoint)
    if isinstance(where.address, tuple) and where.address[0] == "*":
        where = where._replace(address=("0.0.0.0", where.address[1]))
    if isinstance(where.address, str):
        where = where._replace(address=where.address.replace("*", secrets.token_hex(4)))
    try:
        return _listen(look_up(where), last_port)
    except OSError as error:
        raise ConnectionFailed(
            f"cannot listen on {endpoint}: {error.strerror or error}; "
            "stop what uses it, or choose another endpoint (port 0 picks a free one)"
        ) from error


def _listen(where: SocketAddress, last_port: int) -> socket.socket:
    """Listen at the first free port from that of `where` on. Raises OSError."""
    while True:
        listener = socket.socket(where.family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if where.family == socket.AF_INET6:  # [::] stands for all addresses of both kinds
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            _remove_remains(where)
            listener.bind(where.address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or isinstance(where.address, str):
                raise
            host, port = where.address
            if port >= last_port:
                raise
            where = where._replace(address=(host, port + 1))


def unlisten(listener: socket.socket) -> None:
    """Close a listener, and remove its socket file."""
    path = listener.getsockname()
    listener.close()
    if listener.family == socket.AF_UNIX and isinstance(path, str) and path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def reachable_endpoint(listener: socket.socket, advertise: str | None) -> str:
    """The endpoint at which others reach `listener`.

    Args:
        listener: a listening socket.
        advertise: a host to tell others in the place of the listener's own, and perhaps a port, as in
            `name`, `name:7000` or `[::1]:7000`.

    Raises:
        ConnectionFailed: `advertise` makes no sense; or it is missing, the listener's address is a
            wildcard, and this machine has no default route.
    """
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"ipc://{name}" if isinstance(name, str) else f"ipc://@{name[1:].decode()}"
    host, port = name[:2]
    if advertise:
        if "/" in advertise:
            raise ConnectionFailed(f"--advertise {advertise!r} is not HOST or HOST:PORT")
        if ":" not in advertise.partition("]")[2] and advertise.count(":") != 1:
            advertise = tcp_endpoint(advertise.strip("[]"), port).removeprefix("tcp://")
        where = parse(f"tcp://{advertise}")
        assert isinstance(where.address, tuple)
        return tcp_endpoint(*where.address)
    if host in _WILDCARDS:
        host = _own_address(listener.family)
    return tcp_endpoint(host, port)


def is_on_loopback(endpoint: str) -> bool:
    """Whether a tcp endpoint, numeric or at localhost, can be dialled on its own machine only."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        return endpoint.startswith("tcp://") and is_loopback
    except ValueError:
        return False


def is_off_loopback(endpoint: str) -> bool:
    """Whether it can be dialled from other machines."""
    return endpoint.startswith("tcp://") and not is_on_loopback(endpoint)


def is_here(where: SocketAddress) -> bool:
    """Whether a numeric address is one of this machine's."""
    if isinstance(where.address, str) or where.address[0].startswith("127."):
        return True
    with socket.socket(where.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((where.address[0], 0))
        except OSError:
            return False
    return True


def advertised(bind: str, towards: str) -> str | None:
    """The address to advertise for a wildcard in `bind`: the one on the way to the endpoint `towards`.

    None, for the address on the default route, if `towards` is on this machine: peers may not be.

    Raises:
        ConnectionFailed: an endpoint makes no sense.
    """
    where, _ = parse_bind(bind)
    if where.family == socket.AF_UNIX or where.address[0] not in _WILDCARDS:
        return None
    own = address_towards(towards)
    return None if own in (LOOPBACK, "::1") else own


def own_address(bind: str, towards: str) -> str:
    """The numeric address of a process that listens at `bind`: its own, whatever it advertises.

    Raises:
        ConnectionFailed: an endpoint makes no sense; there is no such host, or no default route.
    """
    where, _ = parse_bind(bind)
    if isinstance(where.address, str):
        return LOOPBACK
    if where.address[0] in _WILDCARDS:
        return advertised(bind, towards) or _own_address(where.family)
    try:
        return str(look_up(where).address[0])
    except OSError as error:
        raise ConnectionFailed(f"there is no host of the name in {bind}: {error}") from error


def address_towards(endpoint: str) -> str:
    """The address of this machine at which the process at `endpoint` can dial it, without NAT in between.

    The loopback for an endpoint on this machine, or an unreachable one: dialling it will report the
    error. Looking up the name of a host may take seconds.

    Raises:
        ConnectionFailed: the endpoint makes no sense.
    """
    where = parse(endpoint)
    if where.family == socket.AF_UNIX:
        return LOOPBACK
    try:
        return route_address(look_up(where))
    except OSError:
        return LOOPBACK


def _look_up(where: SocketAddress, flags: int) -> SocketAddress:
    if isinstance(where.address, str):
        return where
    try:
        addresses = socket.getaddrinfo(*where.address, 0, socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # no host can have this name
        raise OSError(str(error)) from error
    first = next((one for one in addresses if one[0] == socket.AF_INET), addresses[0])
    return SocketAddress(first[0], (str(first[4][0]), where.address[1]))


def _remove_remains(where: SocketAddress) -> None:
    """Remove the socket file of a process that was killed, which would prevent listening."""
    path = where.address
    if not isinstance(path, str) or path.startswith("\0"):
        return
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def _own_address(family: int) -> str:
    """The address of this machine on its default route; of a listener at [::], either kind will do."""
    try:
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                return route_address(SocketAddress(family, (_FAR[socket.AF_INET6], 9)))
        return route_address(SocketAddress(socket.AF_INET, (_FAR[socket.AF_INET], 9)))
    except OSError as error:
        raise ConnectionFailed(
            "this machine has no default route, so peers cannot be told which of its addresses to dial; listen "
            "at one address (--bind tcp://ADDRESS:PORT) instead of at all of them"
        ) from error


def route_address(where: SocketAddress) -> str:
    """Return the address of this machine on its route to `where`."""
    with socket.socket(where.family, socket.SOCK_DGRAM) as probe:
        probe.connect(where.address)  # sends nothing
        return str(probe.getsockname()[0])
