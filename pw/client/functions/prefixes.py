"""Tree prefixes: one entry of the user's tree stands for all leaves of a subtree of the arguments."""

from __future__ import annotations

from typing import Any

import jax

from pw.client.arrays.mesh import OwnMesh, distinct_words, with_owner
from pw.client.arrays.of_jax import own_or_given, own_sharding
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.core.errors import ArgumentError, ShardingError


def _sharding_leaf(entry: Any) -> bool:
    return entry is None or isinstance(entry, (PartitionSpec, jax.sharding.Sharding))


def spread(prefix: Any, tree: Any, what: str) -> list[Any]:
    """A value for every leaf of `tree` from a tree that is a prefix of it; shardings of JAX as pw's own."""
    # boxed, so that a None of the prefix and a None of the tree are not taken for each other
    boxed = jax.tree_util.tree_map(lambda entry: [entry].__iter__, prefix, is_leaf=_sharding_leaf)
    try:
        leaves = jax.tree_util.tree_leaves(jax.tree.broadcast(boxed, tree))
    except ValueError as error:
        raise ArgumentError(f"{what} does not fit the tree of the values: {error}") from None
    return [own_or_given(next(entry())) for entry in leaves]


def on_mesh(mesh: OwnMesh, wanted: Any) -> OwnSharding:
    """Return what a user wants as a sharding over `mesh`. Raises ShardingError."""
    if isinstance(wanted, PartitionSpec):
        return OwnSharding(mesh, wanted)
    if not isinstance(wanted, OwnSharding):
        raise ShardingError(
            f"{with_owner(wanted)} is no sharding for it; use a PartitionSpec, a pw.NamedSharding, or None"
        )
    if wanted.mesh != mesh:
        there, here = distinct_words(wanted.mesh, mesh)
        raise ShardingError(
            f"a sharding over {there} was given to a computation on {here}; all shardings of "
            "one computation are over its own mesh"
        )
    return wanted


def mesh_in(*trees: Any) -> OwnMesh | None:
    """Return the mesh of the first sharding in these trees."""
    for leaf in jax.tree_util.tree_leaves(trees):
        sharding = own_sharding(leaf)
        if sharding is not None:
            return sharding.mesh
    return None
