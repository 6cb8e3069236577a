"""Meshes and shardings of `jax.sharding` over virtual devices: the own ones of pw that mean the same.

JAX's meshes are interned and keep no data of ours, and JAX keeps meshes in tables, so pw has its own.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from pw.client.arrays import jax_arrays
from pw.client.arrays.devices import VirtualDevice
from pw.client.arrays.mesh import Mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.connection import jax_backend
from pw.core.errors import PlacementError, ShardingError


def own_mesh(mesh: Any) -> Mesh | None:
    """Return the mesh of pw with the same devices and axes; None if the devices are not virtual.

    Raises:
        PlacementError: some of the devices are not virtual, or they cannot be one mesh.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
        return None
    client = jax_backend.client()
    first = mesh.devices.flat[0]
    if any(isinstance(device, VirtualDevice) for device in mesh.devices.flat):
        return Mesh(mesh.devices, mesh.axis_names)
    if client is not None and first.client is client:
        return jax_arrays.front().mesh(mesh.devices, mesh.axis_names)
    return None


def given_mesh(mesh: Any) -> Mesh | None:
    """Return the mesh of a user as pw's own. Raises PlacementError if it is none of virtual devices."""
    own = own_mesh(mesh)
    if own is None and mesh is not None:
        raise PlacementError(
            f"mesh= takes a pw.Mesh, or a jax.sharding.Mesh of virtual devices, not {mesh!r}"
        )
    return own


def own_sharding(sharding: Any) -> NamedSharding | None:
    """Return the sharding of pw with the same shards; None if it is not over virtual devices.

    Raises:
        PlacementError, ShardingError: pw has no such mesh, or no such memory.
    """
    if isinstance(sharding, NamedSharding):
        return sharding
    if isinstance(sharding, jax.Device):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding._device_assignment
        mesh, spec = own_mesh(jax.sharding.Mesh([device], ("devices",))), PartitionSpec()
    elif isinstance(sharding, jax.sharding.NamedSharding):
        mesh = own_mesh(sharding.mesh)
        spec = PartitionSpec(
            *(None if part is PartitionSpec.UNCONSTRAINED else part for part in sharding.spec)
        )
    else:
        return None
    if mesh is None:
        return None
    if sharding.memory_kind not in (None, "device"):
        raise ShardingError(
            f"{sharding!r} is in the memory {sharding.memory_kind!r}; arrays of pw are in the memory of "
            "their devices"
        )
    return NamedSharding(mesh, spec)


def abstract(named: Any) -> Any:
    """Return a mesh or sharding over virtual devices without them, for tracing; anything else as it is."""
    if isinstance(named, jax.sharding.Mesh):
        return named if own_mesh(named) is None else named.abstract_mesh
    sharding = own_sharding(named)
    if sharding is None:
        return named
    if isinstance(named, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(named.mesh.abstract_mesh, named.spec)
    return sharding.abstract()
