"""Has JAX forget virtual devices, so that a slice is released with the last reference of the user.

JAX keeps meshes in tables of what it has computed from them, and every function of `jax.pmap` for ever. The
tables are private to JAX. To fill them again takes microseconds, and a trace of the function.
"""

from __future__ import annotations

from typing import Any

from jax._src import api, mesh, named_sharding, pjit, pmap, shard_map, sharding
from jax._src.interpreters import partial_eval

from pw.client.arrays.devices import VirtualDevice

_TABLES: tuple[Any, ...] = (
    api._check_sharding,
    api._check_string_compatible_sharding,
    mesh._get_local_mesh,
    named_sharding.check_pspec,
    named_sharding.named_sharding_to_xla_hlo_sharding,
    partial_eval._cached_abstract_eval,
    pjit._check_and_canonicalize_out_shardings,
    pjit._process_in_axis_resources,
    pmap._get_mesh_devices,
    shard_map._as_manual_mesh,
    sharding._common_shard_shape,
)
_PMAPPED: Any = pmap._cached_shard_map.cache_clear.__self__.data
"""By function, the calls that JAX has compiled: their keys have the devices."""


def forget_devices() -> None:
    """Empty the tables in which virtual devices are."""
    for table in _TABLES:
        table.cache_clear()
    for calls in list(_PMAPPED.values()):
        for key in [key for key in list(calls) if _has_virtual(key)]:
            calls.pop(key, None)


def _has_virtual(key: Any) -> bool:
    if isinstance(key, tuple):
        return any(map(_has_virtual, key))
    return isinstance(key, VirtualDevice)
