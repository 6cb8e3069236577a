"""`OwnMesh`: what pw knows of a `jax.sharding.Mesh` of virtual devices: its slices, islands and placement.

The hosts of one slice are one gang, which launches a computation together. A mesh may join slices
of several islands, in any order. `pw.client.computations.joined` cuts a function over such a mesh into
computations for each island.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pw.client.arrays.devices import Slice, Slices, VirtualDevice, VirtualDeviceSet
from pw.client.arrays.factors import Factors, factors_of
from pw.client.connection import current
from pw.client.display.grid import Grid, of_mesh
from pw.core.errors import Disconnected, PlacementError, ShardingError
from pw.core.ids import serial_of
from pw.core.platforms import platform_of
from pw.core.sharding import Placement


class OwnMesh:
    """Virtual devices in an array with named axes; users have the mesh of JAX (`of_jax`).

    Args:
        devices: array-like of `VirtualDevice`s, of one slice or of several.
        axis_names: one name for each dimension (a single name for one).

    Raises:
        PlacementError: a device is not virtual, or occurs twice.
        ShardingError: the dimensions need as many different names.
    """

    slice: Slice | Slices

    def __init__(self, devices: Any, axis_names: str | Sequence[str]) -> None:
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        grid = np.array(devices, dtype=object)
        flat: list[Any] = list(grid.flat)
        if not flat or not all(isinstance(device, VirtualDevice) for device in flat):
            raise PlacementError(
                "a mesh is made of virtual devices, such as add_slice(devices=4).devices; "
                f"{with_owner(devices)} was given"
            )
        if grid.ndim != len(names) or len(set(names)) != len(names):
            raise ShardingError(
                f"a mesh of {grid.ndim} dimensions with shape {grid.shape} needs as many different "
                f"axis names; {names} was given"
            )
        if len(set(flat)) != len(flat):
            raise PlacementError("a device occurs twice in a mesh; every position needs its own")
        self._devices = tuple(flat)
        self._extent: tuple[int, ...] = grid.shape
        self.axis_names = names
        slices = {id(device.slice): device.slice for device in flat}
        self.slice = flat[0].slice if len(slices) == 1 else Slices.of(tuple(slices.values()))
        self.factors: Factors | None = None
        """Factors of the axes along which the islands lie, if there are several and they have such factors."""
        self.parts: tuple[OwnMesh, ...] = ()
        """The mesh of each island, if there are several."""
        starts = dict.fromkeys(slices, 0)
        if len(slices) > 1:
            numbers = {one: at for at, one in enumerate(slices)}
            owners = np.array([numbers[id(device.slice)] for device in flat])
            self.factors = factors_of(owners.reshape(grid.shape), names)
            self.parts = tuple(self._part(owners == at) for at in range(len(slices)))
            ends = itertools.accumulate(one.size for one in slices.values())
            starts = dict(zip(slices, [0, *ends], strict=False))
        self.placement = Placement(
            self.slice.id, tuple(starts[id(device.slice)] + device.index for device in flat)
        )
        self.shardings: dict[Any, Any] = {}
        """Shardings over it that were asked for, by their partition specs and kinds of memory."""
        self._hash = hash((id(self.slice), self.placement, grid.shape, names))

    def _part(self, is_own: np.ndarray[Any, Any]) -> OwnMesh:
        """Return the mesh of an island's devices, in their order here."""
        own = [device for device, is_here in zip(self._devices, is_own, strict=True) if is_here]
        axes = (self.factors and self.factors.inner) or {"devices": len(own)}
        grid = np.empty(len(own), dtype=object)
        grid[:] = own
        return OwnMesh(grid.reshape(tuple(axes.values())), tuple(axes))

    @property
    def devices(self) -> np.ndarray[Any, Any]:
        """The virtual devices, in the shape of the mesh; read-only."""
        # Not kept: the collector does not see through numpy, and meshes and slices are in cycles.
        grid = np.empty(len(self._devices), dtype=object)
        grid[:] = self._devices
        grid = grid.reshape(self._extent)
        grid.flags.writeable = False
        return grid

    @property
    def shape(self) -> collections.OrderedDict[str, int]:
        """Size of every axis by its name."""
        return collections.OrderedDict(zip(self.axis_names, self._extent, strict=True))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self._extent)

    @property
    def runtime(self) -> Any:
        """The session that the devices belong to."""
        return self.slice.runtime

    @property
    def memories(self) -> tuple[str, ...]:
        """JAX's names of the memories of each device; the first is the default."""
        return platform_of(self.slice.platform).memories

    @property
    def abstract_mesh(self) -> jax.sharding.AbstractMesh:
        """The mesh as functions see it while they are traced."""
        # As JAX describes the devices, so that functions may name a mesh of JAX of the same ones.
        device = jax.sharding.AbstractDevice(self.slice.kind, None, self.slice.platform)
        return jax.sharding.AbstractMesh(self._extent, self.axis_names, abstract_device=device)

    @property
    def of_jax(self) -> jax.sharding.Mesh:
        """The mesh of JAX with these devices and axes, as users see it. Not kept, as `devices`."""
        return jax.sharding.Mesh(self.devices, self.axis_names)

    def check_alive(self) -> None:
        """Raise Disconnected, or the session's error, if the session of the devices has ended."""
        if not self.runtime.alive:
            if (ended := self.runtime.ended) is not None:
                raise ended
            raise Disconnected(
                "the session that these virtual devices belong to is closed; connect again and make "
                "new ones with pw.make_virtual_device_set()"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnMesh):
            return NotImplemented
        return self is other or (
            self.slice is other.slice
            and self.placement == other.placement
            and self.axis_names == other.axis_names
            and self._extent == other._extent
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Mesh({self._axes}, island={self.slice.island!r}, platform={self.slice.platform!r})"

    @property
    def _where(self) -> str:
        """The number of devices, their island and platform, in words."""
        devices = f"{self.size} device{'' if self.size == 1 else 's'}"
        several = "s" if self.parts else ""
        return f"{devices} of island{several} {self.slice.island} ({self.slice.platform})"

    @property
    def _axes(self) -> str:
        """The axes with their sizes, in words."""
        return ", ".join(f"{name}={size}" for name, size in self.shape.items())

    @property
    def named_devices(self) -> list[tuple[str, int]]:
        """The island and the number of the device at each position."""
        islands = {one: one.island for one in {device.slice for device in self._devices}}
        return [(islands[device.slice], device.index) for device in self._devices]

    def _drawing(self) -> Grid:
        """Return the devices by island."""
        return of_mesh(f"Mesh({self._axes}) on {self._where}", self._extent, self.named_devices)


_defaults: dict[tuple[Any, int], OwnMesh] = {}


def default_mesh(size: int = 1) -> OwnMesh:
    """The mesh of `size` devices on which calls run that name no devices; allocated once a session."""
    session = current.runtime()
    mesh = _defaults.get((session, size))
    if mesh is None:
        for key in [key for key in list(_defaults) if not key[0].alive]:
            _defaults.pop(key, None)
        fresh = OwnMesh(VirtualDeviceSet(session).add_slice(devices=size).devices, ("devices",))
        mesh = _defaults.setdefault((session, size), fresh)
    return mesh


def with_owner(value: Any) -> str:
    """Return a value in words that a user gave in the place of something over virtual devices."""
    devices = value
    if isinstance(value, jax.sharding.Sharding):
        devices = list(value.device_set)
    elif isinstance(value, jax.sharding.Mesh):
        devices = value.devices
    if any(isinstance(device, jax.Device) for device in np.array(devices, dtype=object).flat):
        return f"{value!r}, whose devices are this process's own and not the cluster's,"
    return repr(value)


def distinct_words(one: OwnMesh, other: OwnMesh) -> tuple[str, str]:
    """Return two meshes in words that differ: with their slices and devices where needed."""
    if repr(one) != repr(other):
        return repr(one), repr(other)
    words = []
    for mesh in (one, other):
        devices = ", ".join(map(str, mesh.placement.devices))
        words.append(f"{mesh!r} on devices {devices} of slice {serial_of(mesh.slice.id)}")
    return words[0], words[1]


_NO_DEVICES: tuple[tuple[Any, str], ...] = (
    (int, "pass pw.make_virtual_device_set().add_slice(devices={0}).devices"),
    (
        (jax.sharding.Mesh, OwnMesh),
        "pass pw.NamedSharding(mesh, spec) to pw.put, mesh=mesh to pw.jit and pw.host_function, or the devices "
        "of the mesh: list(mesh.devices.flat)",
    ),
    (PartitionSpec, "pass pw.NamedSharding(mesh, {0}), or sharding={0} beside devices="),
)
"""Types that users pass in the place of devices, each with the way out."""


def mesh_of(devices: Any) -> OwnMesh:
    """The one-axis mesh over `devices` (a slice, one device, or a sequence), axis "devices".

    Raises:
        PlacementError: these are no virtual devices.
    """
    for kind, way in _NO_DEVICES:
        if isinstance(devices, kind):
            raise PlacementError(
                f"{devices!r} was given where virtual devices are needed; {way.format(devices)}"
            )
    if isinstance(devices, (Slice, Slices)):
        devices = devices.devices
    elif isinstance(devices, VirtualDevice):
        devices = (devices,)
    elif isinstance(devices, Iterable):
        devices = list(devices)
    return OwnMesh(devices, ("devices",))
