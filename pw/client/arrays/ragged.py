"""`Ragged`: arrays that are filled in part, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from pw.core.errors import ArgumentError
from pw.core.programs.counted import impossible

TREES_KEPT = 4096


@dataclass(frozen=True, eq=False)
class Ragged:
    """A value whose size its producer decides: `counts` says how many of the `rows` are the value.

    It is a JAX pytree of two arrays, and works in `pw.jit`, in plain JAX and on the host. Where it goes to
    another slice, or is sharded another way, only the rows that count travel, and the padding is zeros there.
    Where nothing moves it stays as it is, also its padding.

    Args:
        rows: of the shape `(*lead, capacity, *rest)`: for each cell of `lead` (often there is just one), up to
            `capacity` rows of the shape `rest`.
        counts: integers of the shape `lead`: how many rows of each cell count, from 0 to `capacity`. An array
            that is computed from counts outside of this range, on another slice, raises `ResultMismatch`;
            a call that is given such counts from this process raises `ArgumentError`.
    """

    rows: Any
    counts: Any

    @property
    def capacity(self) -> int:
        """How many rows a cell can have."""
        return int(self.rows.shape[np.ndim(self.counts)])

    def mask(self) -> Any:
        """Return which rows count, as booleans of the shape `(*lead, capacity)`."""
        counts = self.counts if hasattr(self.counts, "shape") else np.asarray(self.counts)
        return counts[..., None] > np.arange(self.capacity)


jax.tree_util.register_dataclass(Ragged, ["rows", "counts"], [])


def is_ragged(value: Any) -> bool:
    """Whether a value is a `Ragged`; for `is_leaf`."""
    return isinstance(value, Ragged)


def pairs_of(tree: Any) -> tuple[tuple[int, int], ...]:
    """Return the positions of the rows and of the counts of each `Ragged` in a tree structure."""
    if tree is None or tree.num_leaves < 2:
        return ()
    try:
        return _pairs(tree)
    except TypeError:  # it cannot be hashed
        return _pairs.__wrapped__(tree)


@lru_cache(maxsize=TREES_KEPT)
def _pairs(tree: Any) -> tuple[tuple[int, int], ...]:
    numbers = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    leaves = jax.tree_util.tree_leaves(numbers, is_leaf=is_ragged)
    pairs = [leaf for leaf in leaves if isinstance(leaf, Ragged)]
    for one in pairs:
        for part, name in ((one.rows, "rows"), (one.counts, "counts")):
            if isinstance(part, (list, tuple)):
                raise ArgumentError(
                    f"a pw.Ragged has {name} in a {type(part).__name__} of {len(part)}; make one array of "
                    "them, as with np.array"
                )
    return tuple((one.rows, one.counts) for one in pairs if type(one.rows) is type(one.counts))


def check_pairs(pairs: tuple[tuple[int, int], ...], avals: Any, name: str) -> None:
    """Raise ArgumentError if rows and counts among these abstract values do not fit together."""
    for rows, counts in ((avals[first], avals[second]) for first, second in pairs):
        lead = len(counts.shape)
        if rows.shape[:lead] != counts.shape or len(rows.shape) <= lead:
            raise ArgumentError(
                f"{name}: a pw.Ragged has rows {rows.str_short()} and counts {counts.str_short()}; the counts "
                "have the first dimensions of the rows, and the next dimension of the rows is the capacity"
            )
        if not np.issubdtype(counts.dtype, np.integer):
            raise ArgumentError(
                f"{name}: a pw.Ragged has counts {counts.str_short()}; counts are integers, as in "
                "counts.astype(jnp.int32)"
            )


def check_counts(counts: Any, rows: Any, name: str) -> None:
    """Raise ArgumentError if counts that this process has are negative, or more than there are rows.

    Args:
        counts: counts of any kind; those on devices of the cluster, and tracers, are not read.
        rows: an array, or its abstract value.
        name: name of the function that takes them, for the user.
    """
    is_here = isinstance(counts, (int, np.ndarray, np.generic, jax.Array))
    if not is_here or isinstance(counts, jax.core.Tracer):
        return
    values, shape = np.asarray(counts), np.shape(rows)
    if shape[: values.ndim] != values.shape or len(shape) <= values.ndim:
        return
    words = impossible(values, shape[values.ndim])
    if words is not None:
        aval = jax.core.ShapedArray(shape, rows.dtype)
        raise ArgumentError(
            f"{name}: a pw.Ragged has counts for rows {aval.str_short()} that {words}"
        )
