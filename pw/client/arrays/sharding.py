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
        memory_kind: JAX's name of the memory beside each device in which the shards lie; None for the
            devices' own.

    Raises:
        ShardingError: the spec names an axis that the mesh does not have, or is no partition spec; or the
            devices have no such memory.
    """

    def __init__(self, mesh: OwnMesh, spec: PartitionSpec, memory_kind: str | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.core = Sharding(mesh.axis_names, mesh._extent, _axes_of(spec))
        self.core.check((math.prod(mesh._extent),) * len(self.core.spec))
        self.memory = _memory_of(mesh, memory_kind)
        """Memory in which the shards lie, as `ArraySpec.memory`: empty for the devices' own."""
        self._hash = hash((mesh, self.core, self.memory))

    @classmethod
    def replicated(cls, mesh: OwnMesh) -> OwnSharding:
        """A full copy on every device; one object for a mesh."""
        return cls.over(mesh, PartitionSpec())

    @classmethod
    def over(
        cls, mesh: OwnMesh, spec: PartitionSpec, memory_kind: str | None = None
    ) -> OwnSharding:
        """One object for a mesh, a spec and a memory."""
        key = spec, memory_kind
        sharding: OwnSharding | None = mesh.shardings.get(key)
        if sharding is None:
            sharding = mesh.shardings[key] = cls(mesh, spec, memory_kind)
        return sharding

    def with_memory_kind(self, kind: str | None) -> OwnSharding:
        """Return the sharding with the same shards in another memory. Raises ShardingError."""
        return OwnSharding.over(self.mesh, self.spec, kind)

    def in_space(self, space: Any) -> OwnSharding:
        """Return the sharding in a memory of this space: in its own memory, if that is one."""
        if space_of(self.memory) is space or space not in _KIND_OF:
            return self
        return self.with_memory_kind(_KIND_OF[space])

    @property
    def of_jax(self) -> jax.sharding.NamedSharding:
        """The sharding of JAX over the same mesh, as users see it."""
        kind = self.memory or None
        return jax.sharding.NamedSharding(self.mesh.of_jax, self.spec, memory_kind=kind)

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
            return OwnSharding.over(self.mesh, PartitionSpec(), self.memory)
        return self

    # --- the interface of JAX's shardings ------------------------------------------------------------

    _is_concrete = False

    @property
    def memory_kind(self) -> str:
        """JAX's name of the memory in which the shards lie."""
        return self.memory or self.mesh.memories[0]

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
        mesh, kind = self.mesh.abstract_mesh, self.memory_kind
        return jax.sharding.NamedSharding(mesh, self.spec, memory_kind=kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnSharding):
            return NotImplemented
        return self is other or (
            self.core == other.core and self.memory == other.memory and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        memory = f", memory_kind={self.memory!r}" if self.memory else ""
        return f"NamedSharding({self.mesh!r}, {self.spec}{memory})"

    @property
    def _words(self) -> str:
        """The spec, in words."""
        words = f"{self.spec}" if any(self.core.spec) else f"{self.spec}: replicated"
        return f"{words} in {self.memory}" if self.memory else words

    def _drawing(self, what: str = "an array", shape: tuple[int, ...] | None = None) -> Grid:
        """Return the shards by device, of an array of a shape or of the smallest one."""
        each = "" if shape is None else f" of shape {self.core.shard_shape(shape)}"
        shape = self.core.partitions(len(self.core.spec)) if shape is None else shape
        count = math.prod(self.core.partitions(len(shape)))
        copies = f", each on {self.mesh.size // count} devices" if self.mesh.size > count else ""
        shards = f"{count} shard{'' if count == 1 else 's'}{each}{copies}"
        head = f"{what} as {self._words}: {shards}; on {self.mesh._where}"
        return of_shards(head, self.core, shape, self.mesh.named_devices)


_KIND_OF = {jax.memory.Space.Device: None, jax.memory.Space.Host: "pinned_host"}
"""Kinds of memory by the spaces that JAX's types name."""


def space_of(memory: str) -> Any:
    """Return the space that JAX's types have for a memory of a spec."""
    return jax.memory.Space.Host if memory == "pinned_host" else jax.memory.Space.Device


def _memory_of(mesh: OwnMesh, name: str | None) -> str:
    """Return a user's kind of memory as a spec has it. Raises ShardingError if the devices have none."""
    own, *more = mesh.memories
    if name is None or name == own:
        return ""
    if name not in more:
        raise ShardingError(
            f"{name!r} is no memory of devices of the platform {mesh.slice.platform!r}, which have "
            f"{', '.join(map(repr, mesh.memories))}; pass one of these as memory_kind"
        )
    return name


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
