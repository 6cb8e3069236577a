"""Has JAX forget virtual devices, so that a slice is released with the last reference of the user.

JAX keeps meshes in tables of what it has computed from them, and every function of `jax.pmap` for ever. To
fill the tables again takes microseconds, and a trace of the function. They are emptied when a slice is added,
and when a program with functions of JAX has been traced.

Public: `jax.clear_caches`, which forgets all compiled functions, too.
"""

from __future__ import annotations

from typing import Any

from jax._src import api, mesh, named_sharding, pjit, pmap, shard_map, sharding, sharding_impls
from jax._src.interpreters import partial_eval

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
    sharding._addressable_devices_indices_map,
    sharding._common_shard_shape,
    sharding.common_devices_indices_map,
    sharding_impls.cached_named_sharding,
    sharding_impls.canonicalize_sharding,
    sharding_impls.device_replica_id_map,
    sharding_impls.get_process_index_and_count,
)
_PMAPPED: Any = pmap._cached_shard_map.cache_clear.__self__.data
"""Calls that JAX has compiled, by their function: their keys have the devices."""


def forget_devices(kind: type) -> None:
    """Empty the tables in which virtual devices, of this class, are."""
    for table in _TABLES:
        table.cache_clear()
    for calls in list(_PMAPPED.values()):
        for key in [key for key in list(calls) if _has(kind, key)]:
            calls.pop(key, None)


def _has(kind: type, key: Any) -> bool:
    if isinstance(key, tuple):
        return any(_has(kind, one) for one in key)
    return isinstance(key, kind)
