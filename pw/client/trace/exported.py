"""A function is traced and exported once, for all slices of one shape: what is sent to hosts names no devices.

`Alike` says what two calls have in common whose modules are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.of_jax import own_sharding
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.signature import ArrayType


@dataclass(frozen=True, eq=False)
class Made:
    """A function that was traced and exported for a mesh."""

    module: bytes
    """A portable StableHLO module."""
    captured: tuple[Array, ...]
    inputs: tuple[ArrayType, ...]
    """Of the explicit arguments, then of the captured arrays."""
    outputs: tuple[ArrayType, ...]
    checks: tuple[str, ...]
    tree: Any
    is_divided: bool
    """Whether the module says how each result is divided."""


_modules: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Made, tuple[Any, ...]]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Alike:
    """A function, and how it is called but for the types of its arguments and the devices."""

    function: Callable[..., Any]
    """The user's."""
    how: Any
    """Static arguments, options, and shardings without devices."""


def without_devices(shardings: Any) -> Any:
    """Return the user's shardings as a part of `Alike.how`."""
    leaves, tree = jax.tree_util.tree_flatten(shardings, is_leaf=_is_sharding)
    own = [own_sharding(one) for one in leaves]
    return tuple(a if b is None else b.core for a, b in zip(leaves, own, strict=True)), tree


def _is_sharding(entry: Any) -> bool:
    return isinstance(entry, (OwnSharding, PartitionSpec))


def made_once(
    alike: Alike | None, mesh: OwnMesh, inputs: Sequence[ArrayType], make: Callable[[], Made]
) -> Made:
    """Return what `make` makes for a mesh; or what it has made for another mesh, moved to this one."""
    if alike is None or mesh.parts:
        return make()
    types = tuple((type_.aval, type_.sharding.core) for type_ in inputs)
    key = alike.how, types, mesh.abstract_mesh, mesh.slice.platform
    try:
        kept = _modules.setdefault(alike.function, {})
        known = kept.get(key)
    except TypeError:  # something cannot be hashed, or not be held weakly
        return make()
    if known is None:
        made = make()
        if not made.captured:
            # Without types: these hold the mesh, and with it the slice.
            outputs = tuple((type_.aval, type_.sharding.spec) for type_ in made.outputs)
            bare = Made(made.module, (), (), (), made.checks, made.tree, made.is_divided)
            kept[key] = bare, outputs
        return made
    bare, outputs = known
    mesh.check_alive()
    return Made(
        bare.module,
        (),
        tuple(inputs),
        tuple(ArrayType.of(aval, OwnSharding(mesh, spec)) for aval, spec in outputs),
        bare.checks,
        bare.tree,
        bare.is_divided,
    )
