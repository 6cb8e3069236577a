"""`OwnSharding`: which mesh axes split which dimension of an array, as `jax.sharding.NamedSharding` says."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import OwnMesh
from pw.client.display.grid import Grid, of_shards
from pw.core.errors import ShardingError
from pw.core.sharding import Placement, Sharding

__all__ = ["OwnSharding", "PartitionSpec"]


class OwnSharding(jax.sharding.Sharding):
    """How an array is split over a mesh: the axes that split each of its dimensions.

    Users have `jax.sharding.NamedSharding`. In programs that JAX traces, this is the target of `device_put`.

    Args:
        mesh: the virtual devices.
        spec: for each dimension a mesh axis, several of them in a tuple, or None.

    Raises:
        ShardingError: the spec names an axis that the mesh does not have, or is no partition spec.
    """

    def __init__(self, mesh: OwnMesh, spec: PartitionSpec) -> None:
        super().__init__()
        self.mesh = mesh
        self.core = Sharding(mesh.axis_names, mesh._extent, _axes_of(spec))
        self.core.check((math.prod(mesh._extent),) * len(self.core.spec))
        self._hash = hash((mesh, self.core))

    @classmethod
    def replicated(cls, mesh: OwnMesh) -> OwnSharding:
        """A full copy on every device; one object for a mesh."""
        return cls.over(mesh, PartitionSpec())

    @classmethod
    def over(cls, mesh: OwnMesh, spec: PartitionSpec) -> OwnSharding:
        """One object for a mesh and a spec."""
        sharding: OwnSharding | None = mesh.shardings.get(spec)
        if sharding is None:
            sharding = mesh.shardings[spec] = cls(mesh, spec)
        return sharding

    @property
    def of_jax(self) -> jax.sharding.NamedSharding:
        """The sharding of JAX over the same mesh, as users see it."""
        return jax.sharding.NamedSharding(self.mesh.of_jax, self.spec)

    @property
    def spec(self) -> PartitionSpec:
        """The axes that split each dimension, as JAX writes them."""
        entries: list[Any] = []
        for axes in self.core.spec:
            entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return PartitionSpec(*entries)

    @property
    def placement(self) -> Placement:
        """The devices at the positions of the mesh."""
        return self.mesh.placement

    def fitting(self, shape: tuple[int, ...]) -> OwnSharding:
        """Return this sharding, or the replicated one if an array of `shape` cannot be split so."""
        try:
            self.core.check(shape)
        except ShardingError:
            return OwnSharding.replicated(self.mesh)
        return self

    # --- the interface of JAX's shardings ------------------------------------------------------------

    memory_kind = None

    _is_concrete = False

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device has a full copy."""
        return not any(self.core.spec)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.mesh.size

    def check_compatible_aval(self, aval_shape: tuple[int, ...]) -> None:
        """Raise ShardingError unless an array can have this shape here."""
        self.core.check(aval_shape)

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
        return self.abstract()._to_xla_hlo_sharding(num_dimensions)

    def abstract(self) -> jax.sharding.NamedSharding:
        """The same sharding over the abstract mesh, for tracing."""
        return jax.sharding.NamedSharding(self.mesh.abstract_mesh, self.spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnSharding):
            return NotImplemented
        return self is other or (self.core == other.core and self.mesh == other.mesh)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"NamedSharding({self.mesh!r}, {self.spec})"

    @property
    def _words(self) -> str:
        """The spec, in words."""
        return f"{self.spec}" if any(self.core.spec) else f"{self.spec}: replicated"

    def _drawing(self, what: str = "an array", shape: tuple[int, ...] | None = None) -> Grid:
        """Return the shards by device, of an array of a shape or of the smallest one."""
        each = "" if shape is None else f" of shape {self.core.shard_shape(shape)}"
        shape = self.core.partitions(len(self.core.spec)) if shape is None else shape
        count = math.prod(self.core.partitions(len(shape)))
        copies = f", each on {self.mesh.size // count} devices" if self.mesh.size > count else ""
        shards = f"{count} shard{'' if count == 1 else 's'}{each}{copies}"
        head = f"{what} as {self._words}: {shards}; on {self.mesh._where}"
        return of_shards(head, self.core, shape, self.mesh.named_devices)


def _axes_of(spec: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"expected a PartitionSpec such as P('x', None), not {spec!r}")
    if spec.unreduced or spec.reduced:
        raise ShardingError(
            f"{spec} has unreduced or reduced axes, which arrays at rest cannot have"
        )
    axes: list[tuple[str, ...]] = []
    for entry in spec:
        if entry is None:
            axes.append(())
        elif isinstance(entry, str):
            axes.append((entry,))
        elif isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry):
            axes.append(entry)
        else:
            raise ShardingError(
                f"{entry!r} in {spec} is neither None, a mesh axis, nor a tuple of mesh axes"
            )
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)
