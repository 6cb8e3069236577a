"""A process that was forked from one with a client of JAX: nothing of JAX's reaches the parent's devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

from jax._src import dispatch, pjit, xla_bridge
from jaxlib import _jax, xla_client

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


def keep_for_good() -> None:
    """Have no destructor of an object of JAX run in this process, and no wait at its end. Public: none."""
    tokens = dispatch.runtime_tokens
    kept: list[Any] = [tokens.current_tokens, tokens.output_runtime_tokens]
    for backend in xla_bridge._backends.values():
        kept += [backend, *backend.live_arrays(), *backend.live_executables()]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    tokens.clear()


def refuse(error: Callable[..., NoReturn]) -> None:
    """Have each use of JAX's devices call `error`; values that the parent has read can still be read.

    Public: none.
    """
    # Calls that JAX would make without Python.
    pjit._cpp_pjit_cache_fun_only.clear()
    pjit._cpp_pjit_cache_explicit_attributes.clear()
    _jax.PjitFunctionCache.clear_all()
    _jax.Client.__getattribute__ = error
    _jax.LoadedExecutable.__getattribute__ = error
    for name in _BATCHED:
        setattr(xla_client, name, error)
    for name in _ARRAY:
        is_property = isinstance(getattr(xla_client.ArrayImpl, name), property)
        setattr(xla_client.ArrayImpl, name, property(error) if is_property else error)
