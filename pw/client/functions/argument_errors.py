"""How errors name what a user has given: values with their shapes, and arrays that are gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.signature import aval_of, describe_leaf, signature_of
from pw.core.errors import ArrayDeleted


class _Words(str):
    """Text that a tree shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def in_words(tree: Any) -> str:
    """Return a tree as Python shows it, with the types of its arrays instead of their values."""
    return repr(jax.tree_util.tree_map(_leaf_in_words, tree))


def _leaf_in_words(leaf: Any) -> Any:
    if isinstance(leaf, Array):
        return _Words(leaf.aval.str_short())
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return _Words(aval_of(signature_of(leaf)).str_short())
    return leaf


def path_of_leaf(tree: Any, at: int) -> str:
    """Return the place of a leaf in a tree structure as Python writes it, as in `['a'][0]`."""
    numbers = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    return jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(numbers)[0][at][0])


def naming_argument(
    error: ArrayDeleted, name: str, arguments: Any, leaves: Sequence[Any]
) -> ArrayDeleted:
    """Return the error of a call with the argument that is gone; as it is if none of them is.

    Args:
        error: error of the call.
        name: name of the function.
        arguments: (args, kwargs).
        leaves: leaves of the arguments.
    """
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Array) and leaf.is_deleted():
            try:
                leaf._check_usable()
            except ArrayDeleted as own:
                return ArrayDeleted(f"{name}: {describe_leaf(arguments, index)}: {own}")
    return error


def naming_state(error: ArrayDeleted, name: str, state: Any) -> ArrayDeleted:
    """Return the error of a step that takes over its state with the array of it that is gone, if one is."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if isinstance(leaf, Array) and leaf.is_deleted():
            return ArrayDeleted(
                f"{name}: state{jax.tree_util.keystr(path)}, {leaf.aval.str_short()}, was donated to an "
                "earlier step, as all of a state is; pass the state that the earlier step returned, as in "
                "state, loss = step(state, x)"
            )
    return error
