"""JAX in a process that was forked from one with a gateway: closed.

The fork has the parent's connection, and none of the threads of JAX's client. A request from the
fork would enter the parent's stream, and its answer would reach the parent. So the fork gets dead
descriptors for the connection, its objects of JAX live until it ends (their destructors send requests,
and wait), and each use of devices or of values that are not here raises Disconnected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from pw.client.connection import jax_backend
from pw.core.errors import Disconnected

_gateways: set[str] = set()
"""Addresses of the gateways of JAX in this process."""


def close_in_forks_of(gateway: str) -> None:
    """Close JAX in all forks of this process.

    Args:
        gateway: where JAX reaches it: `grpc://unix:PATH` or `grpc://HOST:PORT`.
    """
    # A fork should read no files of modules.
    from pw.core.jax_private import forks as private  # noqa: F401

    _gateways.add(gateway)


def _forked() -> None:
    if _gateways and jax_backend.client() is not None:
        from pw.core.jax_private import forks as private

        _disconnect()
        _gateways.clear()  # a fork of this fork has nothing left to close
        private.keep_for_good()
        private.refuse(_raise)


os.register_at_fork(after_in_child=_forked)


def _disconnect() -> None:
    """Put /dev/null in the place of the connections, and of what waits for them with the parent."""
    connections = {descriptor for descriptor in _descriptors() if _leads_to_gateway(descriptor)}
    pollers = {one for one in _descriptors() if connections & _watched(one)}
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in connections | pollers:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _descriptors() -> Iterator[int]:
    yield from map(int, os.listdir("/dev/fd"))


def _leads_to_gateway(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        peer = socket.socket(fileno=os.dup(descriptor))
        with peer:
            name = peer.getpeername()
    except OSError:  # it is not connected, or was the listing's own
        return False
    ends = f"unix:{name}" if isinstance(name, str) else f":{name[1]}"
    return any(gateway.endswith(ends) for gateway in _gateways)


def _watched(descriptor: int) -> set[int]:
    """Return the descriptors that an epoll instance watches: the fork shares it with its parent."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
        return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
    return set()


def _raise(*_arguments: object, **_options: object) -> NoReturn:
    raise Disconnected(
        "this process was forked from one with virtual devices, and JAX does not survive a fork; use JAX in "
        'the parent only, or start the process with multiprocessing.get_context("spawn")'
    )
