"""Arrays of JAX without the checks of the public functions, which take several times as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import array, core
from jax._src.interpreters import pxla
from jaxlib import _jax, xla_client

ArrayImpl = array.ArrayImpl
"""The class of arrays on devices. Public: none; `jax.Array` is the class of tracers, too."""
ArrayCopySemantics = xla_client.ArrayCopySemantics
"""What may happen to an array that is moved: it is copied, reused or donated. Public: none."""
shard_arg_handlers = pxla.shard_arg_handlers
"""How the arguments of a call get to their devices, by class. Public: none."""
shard_args = pxla.shard_args
"""Put the arguments of a call on their devices. Public: `jax.device_put`."""
batched_device_put = pxla.batched_device_put
"""Put the shards of an array on devices. Public: `jax.make_array_from_callback`, three times as slow."""


def array_of(aval: Any, sharding: Any, shards: Sequence[Any]) -> jax.Array:
    """Return the array that has these shards.

    Public: `jax.make_array_from_single_device_arrays`, six times as slow.
    """
    return ArrayImpl(aval, sharding, shards, committed=True, _skip_checks=True)


def aval_on(aval: Any, sharding: Any) -> Any:
    """Return the type of an array with a sharding. Public: none."""
    return core.update_aval_with_sharding(aval, sharding)


def result_handler(aval: Any, sharding: Any) -> Any:
    """Return what makes an array of the shards that an executable returns. Public: none."""
    return _jax.array_result_handler(aval, sharding, True, _skip_checks=True)


def result_handlers(avals: Sequence[Any], shardings: Sequence[Any]) -> Any:
    """Return what makes arrays of all results of an executable, typed keys too. Public: none."""
    return pxla.global_avals_to_results_handler(avals, shardings, True).handlers


def devices_of(sharding: Any) -> tuple[Any, ...]:
    """Return the devices of a sharding in their order. Public: `device_set`, without the order."""
    devices: tuple[Any, ...] = sharding._device_assignment
    return devices
