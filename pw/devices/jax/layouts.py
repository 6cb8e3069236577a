"""Makes JAX shardings of specs and device addresses, and the shards of an array of host bytes.

The host's part of an array is a global `jax.Array`, of which only the shards on this host's devices
can be addressed. The rest of the system names shards by their positions in a mesh.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pw.core.errors import InternalError
from pw.core.jax_private.arrays import array_of, aval_on, batched_device_put
from pw.core.jax_private.releases import shards_by_device
from pw.core.sharding import (
    ALIGNMENT_BYTES,
    ArraySpec,
    Box,
    DeviceAddress,
    Sharding,
    box_shape,
    box_slices,
    dtype_of,
)
from pw.devices.host.backend import Part

_LAYOUTS_KEPT = 4096
_AVALS_KEPT = 16384
_listing = threading.Lock()


class DeviceLayout(NamedTuple):
    """A sharding over real devices. `local` maps the positions on this host to their devices."""

    sharding: NamedSharding
    local: dict[int, jax.Device]


class Layouts:
    """Makes and remembers layouts: equal ones are one object, which JAX compares fast."""

    def __init__(self, host: str, device: Callable[[DeviceAddress], jax.Device]) -> None:
        self._host = host
        self._device = device
        self._layouts: dict[tuple[Sharding, tuple[DeviceAddress, ...], str], DeviceLayout] = {}

    def of(self, spec: ArraySpec, devices: tuple[DeviceAddress, ...]) -> DeviceLayout:
        """The layout of an array with shards on `devices`; from any thread."""
        return self(spec.sharding, devices, spec.memory)

    def __call__(
        self, sharding: Sharding, devices: tuple[DeviceAddress, ...], memory: str = ""
    ) -> DeviceLayout:
        """The layout of `sharding` with `devices` at the positions of its mesh; from any thread.

        Raises ValueError if the devices have no such memory.
        """
        key = (sharding, devices, memory)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            # Threads that race here all get the layout that came first.
            layout = self._layouts.setdefault(key, self._make(*key))
        return layout

    def _make(
        self, sharding: Sharding, devices: tuple[DeviceAddress, ...], memory: str
    ) -> DeviceLayout:
        physical = np.empty(len(devices), object)
        physical[:] = [self._device(address) for address in devices]
        # A mesh without axes is one device here, but an error to `jax.jit`.
        names, sizes = sharding.axis_names or ("_",), sharding.axis_sizes or (1,)
        mesh = Mesh(physical.reshape(sizes), names)
        # In some comparisons, JAX treats ("x",) and "x" as different shardings.
        axes = [names[0] if len(names) == 1 else (names or None) for names in sharding.spec]
        local = {
            position: physical[position]
            for position, address in enumerate(devices)
            if address.host == self._host
        }
        kind = memory or None
        return DeviceLayout(NamedSharding(mesh, PartitionSpec(*axes), memory_kind=kind), local)


def local_shards(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """This host's shards of `array` by device, each an array that shares its buffer; from any thread.

    One thread at a time: while JAX makes the list of an array's shards, another thread would get a part
    of it, or see a shard twice.
    """
    with _listing:
        return shards_by_device(array)


def assemble(spec: ArraySpec, layout: DeviceLayout, shards: dict[int, jax.Array]) -> jax.Array:
    """The array whose shards on this host are `shards`, by position.

    Raises InternalError when one is missing.
    """
    _check_complete(layout, shards)
    return jax.make_array_from_single_device_arrays(
        spec.shape,
        layout.sharding,
        [shards[position] for position in layout.local],
        dtype=dtype_of(spec.dtype),
    )


def assemble_view(spec: ArraySpec, layout: DeviceLayout, shards: dict[int, jax.Array]) -> jax.Array:
    """The array whose shards on this host are `shards`, which have its shape, dtype and devices.

    Raises InternalError when one is missing.
    """
    _check_complete(layout, shards)
    aval = aval_of(spec.shape, spec.dtype, layout.sharding)
    placed: Any = [shards[position] for position in layout.local]
    return array_of(aval, layout.sharding, placed)


def _check_complete(layout: DeviceLayout, shards: Mapping[int, object]) -> None:
    if missing := layout.local.keys() - shards.keys():
        raise InternalError(f"the shards at positions {sorted(missing)} are missing")


def put(
    spec: ArraySpec, layout: DeviceLayout, shards: Mapping[int, np.ndarray[Any, Any]]
) -> jax.Array:
    """The array whose shards on this host are `shards`, by position, in host memory.

    Raises InternalError when one is missing. On CPU, aligned memory is aliased.
    """
    _check_complete(layout, shards)
    aval = aval_of(spec.shape, spec.dtype, layout.sharding)
    placed = [shards[position] for position in layout.local]
    array: jax.Array = batched_device_put(
        aval, layout.sharding, placed, list(layout.local.values())
    )
    return array


@lru_cache(maxsize=_AVALS_KEPT)
def aval_of(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Any:
    """The type of an array, as JAX describes it."""
    return aval_on(jax.core.ShapedArray(shape, dtype_of(dtype)), sharding)


def is_whole(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether `box` is all of an array of `shape`."""
    return box == tuple([(0, size) for size in shape])


def aligned_empty(
    shape: tuple[int, ...], dtype: np.dtype[Any], make: Callable[..., Any] = np.empty
) -> np.ndarray[Any, Any]:
    """Memory that JAX can alias on CPU."""
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = make(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    aligned: np.ndarray[Any, Any] = raw[start : start + size_bytes].view(dtype).reshape(shape)
    return aligned


def aligned_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of an array in memory that JAX can alias on CPU."""
    copied = aligned_empty(array.shape, array.dtype)
    copied[...] = array
    return copied


def bytes_to_copy(spec: ArraySpec, parts: Sequence[Part]) -> int:
    """How many bytes must be copied on the host to make shards of `parts`."""
    shape = spec.sharding.shard_shape(spec.shape)
    return sum(
        array.nbytes
        for _, box, array in parts
        if not (is_whole(box, shape) and array.ctypes.data % ALIGNMENT_BYTES == 0)
    )


def host_shards(
    spec: ArraySpec, positions: Sequence[int], parts: Sequence[Part], *, over_zeros: bool = False
) -> dict[int, np.ndarray[Any, Any]]:
    """The shards at `positions` in host memory; those made of the same parts are one array.

    Raises InternalError when the parts do not cover a shard exactly once; unless the rest is zeros.
    """
    shape, dtype = spec.sharding.shard_shape(spec.shape), dtype_of(spec.dtype)
    used: dict[int, list[int]] = {position: [] for position in positions}
    for index, (holders, box, array) in enumerate(parts):
        if array.shape != box_shape(box) or array.dtype != dtype:
            raise InternalError(
                f"a part of {array.dtype}{list(array.shape)} was given for a box of "
                f"{dtype}{list(box_shape(box))}"
            )
        for position in holders:
            used[position].append(index)
    by_recipe: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}
    shards = {}
    for position, indices in used.items():
        recipe = tuple(indices)
        if recipe not in by_recipe:
            chosen = [parts[index] for index in indices]
            by_recipe[recipe] = _host_shard(shape, dtype, chosen, over_zeros=over_zeros)
        shards[position] = by_recipe[recipe]
    return shards


def _host_shard(
    shape: tuple[int, ...], dtype: np.dtype[Any], parts: Sequence[Part], *, over_zeros: bool
) -> np.ndarray[Any, Any]:
    covered = sum(array.size for _, _, array in parts)
    if covered != math.prod(shape) and not (over_zeros and covered < math.prod(shape)):
        raise InternalError(f"the parts of a shard of shape {shape} cover {covered} elements of it")
    if len(parts) == 1 and is_whole(parts[0][1], shape):
        return parts[0][2]
    shard = aligned_empty(shape, dtype, np.zeros if over_zeros else np.empty)
    for _, box, array in parts:
        shard[box_slices(box)] = array
    return shard
