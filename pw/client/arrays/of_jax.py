"""Meshes and shardings of `jax.sharding` over virtual devices, which users have, as pw's own.

JAX's meshes keep no data of ours, and hold their devices in a numpy array, which Python's collector does not
see through. So what lasts as long as a slice holds pw's own, which know slices and islands.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pw.client.arrays import jax_arrays
from pw.client.arrays.devices import VirtualDevice
from pw.client.arrays.mesh import OwnMesh, with_owner
from pw.client.arrays.sharding import OwnSharding
from pw.client.connection import jax_backend
from pw.core.errors import PlacementError

_own: weakref.WeakKeyDictionary[jax.sharding.Mesh, OwnMesh] = weakref.WeakKeyDictionary()


def own_mesh(mesh: Any) -> OwnMesh | None:
    """Return the mesh of pw with the same devices and axes; None if the devices are not virtual.

    Raises:
        PlacementError: some of the devices are not virtual, or they cannot be one mesh.
    """
    if isinstance(mesh, OwnMesh):
        return mesh
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
        return None
    own = _own.get(mesh)
    if own is not None:
        return own
    client = jax_backend.client()
    first = mesh.devices.flat[0]
    if any(isinstance(device, VirtualDevice) for device in mesh.devices.flat):
        return _own.setdefault(mesh, OwnMesh(mesh.devices, mesh.axis_names))
    if client is not None and first.client is client:
        return jax_arrays.front().mesh(mesh.devices, mesh.axis_names)
    return None


def given_mesh(mesh: Any) -> OwnMesh:
    """Return the mesh of a user as pw's own. Raises PlacementError if it is none of virtual devices."""
    own = own_mesh(mesh)
    if own is None:
        raise PlacementError(
            "a mesh is made of virtual devices, such as pw.Mesh(slice.devices, ('x',)) of "
            f"slice = add_slice(devices=4); {with_owner(mesh)} was given"
        )
    return own


def own_sharding(sharding: Any) -> OwnSharding | None:
    """Return the sharding of pw with the same shards; None if it is not over virtual devices.

    Raises:
        PlacementError: pw has no such mesh.
        ShardingError: the devices have no such memory.
    """
    if isinstance(sharding, OwnSharding):
        return sharding
    if isinstance(sharding, jax.Device):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
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
    return OwnSharding.over(mesh, spec, sharding.memory_kind)


def own_or_given(sharding: Any) -> Any:
    """Return a sharding over virtual devices as pw's own; anything else as it is."""
    return own_sharding(sharding) or sharding


def abstract(named: Any) -> Any:
    """Return a mesh or sharding over virtual devices without them, for tracing; anything else as it is."""
    if isinstance(named, jax.sharding.Mesh):
        return named if own_mesh(named) is None else named.abstract_mesh
    sharding = own_sharding(named)
    if sharding is None:
        return named
    if isinstance(named, jax.sharding.NamedSharding):
        mesh, kind = named.mesh.abstract_mesh, sharding.memory_kind
        return jax.sharding.NamedSharding(mesh, named.spec, memory_kind=kind)
    return sharding.abstract()
