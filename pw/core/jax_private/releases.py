"""What differs between the releases of JAX that pw works with; imports no jax.

Each function has what it works around, and the release that ends it.
"""

from __future__ import annotations

from typing import Any


def shards_by_device(array: Any) -> dict[Any, Any]:
    """Return the addressable shards of a `jax.Array` by device, each an array that shares its buffer.

    Before 0.10.2, an array keeps the list of its shards, and the shard of an array on one device is the array
    itself. This cycle would hold device memory until the garbage collector runs. From 0.10.2 on,
    `addressable_shards` suffices.

    Public: `jax.Array.addressable_shards`.
    """
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    if len(shards) == 1:
        array.__dict__.pop("addressable_shards", None)
    return shards
