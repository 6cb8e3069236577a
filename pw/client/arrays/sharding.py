"""`NamedSharding`: which mesh axes split which dimension of an array, as in `jax.sharding`."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import jax
from jax.sharding import PartitionSpec

from pw.client.arrays import jaxtype
from pw.client.arrays.jaxtype import outside_traces
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.transformed import traces_for_hosts
from pw.core.errors import ShardingError
from pw.core.sharding import Placement, Sharding

__all__ = ["OwnSharding", "PartitionSpec"]


class OwnSharding(jax.sharding.Sharding):
    """How an array is split over a mesh: the axes that split each of its dimensions.

    Functions that are traced for the hosts can use it where JAX takes a sharding, as in
    `jax.lax.with_sharding_constraint`. Before lowering, `abstract` replaces it.

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
        known: OwnSharding | None = mesh.shardings.get(spec)
        if known is None:
            known = mesh.shardings[spec] = cls(mesh, spec)
        return known

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

    @property
    def _is_concrete(self) -> bool:
        """Read by functions that make an array like another, such as `jnp.zeros_like`."""
        if outside_traces():
            raise jaxtype.not_here(f"an array on {self.mesh!r}")
        return False

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device has a full copy."""
        return not any(self.core.spec)

    @property
    def _device_assignment(self) -> NoReturn:
        raise ShardingError(
            f"{self} is over virtual devices, to which jax cannot send or compute anything from this process: "
            "pw.put(x, sharding=sharding) puts values there, and pw.jit(f, mesh=mesh) computes there"
        )

    _internal_device_list = device_set = is_fully_addressable = _device_assignment

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.mesh.size

    def check_compatible_aval(self, aval_shape: tuple[int, ...]) -> None:
        """Raise ShardingError unless the traced computation can have an array of this shape here."""
        self.core.check(aval_shape)
        traced_for = traces_for_hosts()
        if traced_for is not None and traced_for != self.mesh:
            raise ShardingError(
                f"a sharding over {self.mesh!r} was given to a computation on {traced_for!r}; all "
                "shardings of one computation are over its own mesh"
            )

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
