"""JAX in a process that was forked from one with a gateway: closed.

The fork has the parent's connection, and none of the threads of JAX's client. A request from the
fork would enter the parent's stream, and its answer would reach the parent. So the fork gets dead
descriptors for the connection, its objects of JAX live until it ends (their destructors send requests,
and wait), and each use of devices or of values that are not here raises Disconnected.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pw.client.connection import jax_backend
from pw.core.errors import Disconnected

_gateways: set[str] = set()
"""Addresses of the gateways of JAX in this process."""
_ARRAY = (
    *("_arrays", "_fully_replicated_shard", "_pjrt_layout", "_rewrap_with_aval_and_sharding"),
    *("_copy_single_device_array_to_host_async", "_single_device_array_to_np_array_did_copy"),
    *("block_until_ready", "clone", "delete", "is_ready", "on_device_size_in_bytes"),
)
"""Methods of arrays that ask devices."""
_BATCHED = (
    *("batched_block_until_ready", "batched_copy_array_to_devices_with_sharding"),
    *("batched_device_put", "reorder_shards"),
)
"""Functions over arrays that do."""


def close_in_forks_of(gateway: str) -> None:
    """Close JAX in all forks of this process.

    Args:
        gateway: where JAX reaches it: `grpc://unix:PATH` or `grpc://HOST:PORT`.
    """
    _gateways.add(gateway)


def _forked() -> None:
    if _gateways and jax_backend.client() is not None:
        _disconnect()
        _gateways.clear()  # a fork of this fork has nothing left to close
        _keep_for_good()
        _refuse()


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


def _keep_for_good() -> None:
    """Have no destructor of an object of JAX run in this process, and no wait at its end."""
    from jax._src import dispatch, xla_bridge

    tokens = dispatch.runtime_tokens
    kept: list[Any] = [tokens.current_tokens, tokens.output_runtime_tokens]
    for backend in xla_bridge._backends.values():
        kept += [backend, *backend.live_arrays(), *backend.live_executables()]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    tokens.clear()


def _refuse() -> None:
    """Have each use of JAX's devices raise; values that the parent has read can still be read."""
    from jax._src import pjit
    from jaxlib import _jax, xla_client

    # Calls that JAX would make without Python.
    pjit._cpp_pjit_cache_fun_only.clear()
    pjit._cpp_pjit_cache_explicit_attributes.clear()
    _jax.PjitFunctionCache.clear_all()
    _jax.Client.__getattribute__ = _raise
    _jax.LoadedExecutable.__getattribute__ = _raise
    for name in _BATCHED:
        setattr(xla_client, name, _raise)
    for name in _ARRAY:
        is_property = isinstance(getattr(xla_client.ArrayImpl, name), property)
        setattr(xla_client.ArrayImpl, name, property(_raise) if is_property else _raise)


def _raise(*_arguments: object, **_options: object) -> NoReturn:
    raise Disconnected(
        "this process was forked from one with virtual devices, and JAX does not survive a fork; use JAX in "
        'the parent only, or start the process with multiprocessing.get_context("spawn")'
    )
