"""`Call`: a function to trace and export, and `Export`: its StableHLO module.

Tracing is done once for all slices of one shape: modules name no devices. `Alike` says what two calls have in
common whose modules are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.of_jax import own_sharding
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.signature import ArrayType
from pw.core.sharding import Sharding


@dataclass(frozen=True, eq=False)
class Export:
    """A function that was traced and exported for a mesh."""

    module: bytes
    """A portable StableHLO module."""
    captured: tuple[Array, ...]
    """Arrays that the function closes over."""
    inputs: tuple[ArrayType, ...]
    """Types of the explicit arguments, then of the captured arrays."""
    outputs: tuple[ArrayType, ...]
    """Types of the results."""
    checks: tuple[str, ...]
    """Names of the results that are checked for NaNs."""
    tree: Any
    """Tree of the results."""
    is_divided: bool
    """Whether the module says how each result is divided."""


_modules: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Export, tuple[Any, ...]]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Alike:
    """A function, and how it is called but for the types of its arguments and the devices."""

    function: Callable[..., Any]
    """Function of the user."""
    how: Any
    """Static arguments, options, and shardings without devices."""


OutShardings = Callable[[Any, Sequence[Any]], Sequence[OwnSharding | None]]
"""Maps the tree of results and their avals to their shardings; None for the compiler's choice."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function on a mesh: the function to trace, and the types of its arguments."""

    function: Callable[..., Any]
    name: str
    mesh: OwnMesh
    types: tuple[ArrayType, ...]
    """Types of the leaves of the arguments."""
    out_shardings: OutShardings
    arguments: Any = None
    """Tree of the arguments, (args, kwargs); None if the leaves are the arguments."""
    donated: tuple[int, ...] = ()
    """Numbers of the leaves whose memory may be reused."""
    check_nans: bool = False
    """Whether results with NaNs raise `NaNFound`."""
    alike: Alike | None = None
    """Key of the calls that have the same module."""

    @property
    def tree(self) -> Any:
        """The tree of the arguments."""
        if self.arguments is None:
            return jax.tree_util.tree_structure((self.types, {}))
        return self.arguments


def without_devices(shardings: Any) -> Any:
    """Return the user's shardings as a part of `Alike.how`."""
    leaves, tree = jax.tree_util.tree_flatten(shardings, is_leaf=_is_sharding)
    own = [own_sharding(one) for one in leaves]
    return tuple(a if b is None else _bare(b) for a, b in zip(leaves, own, strict=True)), tree


def _bare(sharding: OwnSharding) -> tuple[Sharding, str]:
    """Return a sharding without its devices."""
    return sharding.core, sharding.memory


def _is_sharding(entry: Any) -> bool:
    return isinstance(entry, (OwnSharding, PartitionSpec))


def export_once(call: Call, export: Callable[[Call], Export]) -> Export:
    """Return the export of a call, or that of an earlier call alike, moved to the mesh of this one."""
    alike, mesh = call.alike, call.mesh
    if alike is None or mesh.parts:
        return export(call)
    types = tuple((type_.aval, *_bare(type_.sharding)) for type_ in call.types)
    key = alike.how, types, mesh.abstract_mesh, mesh.slice.platform
    try:
        exports = _modules.setdefault(alike.function, {})
        earlier = exports.get(key)
    except TypeError:  # something cannot be hashed, or not be held weakly
        return export(call)
    if earlier is None:
        result = export(call)
        if not result.captured:
            # Without types: these hold the mesh, and with it the slice.
            outputs = tuple(
                (one.aval, one.sharding.spec, one.sharding.memory) for one in result.outputs
            )
            exports[key] = replace(result, inputs=(), outputs=()), outputs
        return result
    bare, outputs = earlier
    mesh.check_alive()
    own = tuple(
        ArrayType.of(aval, OwnSharding(mesh, spec, memory or None))
        for aval, spec, memory in outputs
    )
    return replace(bare, inputs=call.types, outputs=own)
