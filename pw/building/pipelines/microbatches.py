"""`Microbatches`: how a batch is divided into equal parts, by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pw.client.arrays import jax_arrays
from pw.client.programs.placing.shardings import sharding_of
from pw.core.errors import ArgumentError


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of a pipeline; `name` is the pipeline's, for errors."""

    name: str
    count: int

    def divided(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        """Check a batch, and give values of this process a dimension for the microbatches.

        Raises:
            ArgumentError: there is no batch, or it cannot be divided.
        """
        if not batch:
            raise ArgumentError(f"{self.name!r} takes a batch behind the state")
        return tuple(jax.tree.map(self._divided_leaf, part) for part in batch)

    def part(self, leaf: Any, number: int) -> Any:
        """Return a microbatch of a part of the batch."""
        rows = self._rows(leaf.shape)
        return leaf[number * rows : (number + 1) * rows]

    def shapes(self, batch: Sequence[Any]) -> list[Any]:
        """Return the shapes of a microbatch, in the tree of the batch."""
        return [jax.tree.map(self._shape, part) for part in batch]

    def _divided_leaf(self, leaf: Any) -> Any:
        if sharding_of(leaf) is not None or jax_arrays.is_remote(leaf):
            self._rows(leaf.shape)
            return leaf
        value = leaf if hasattr(leaf, "reshape") else np.asarray(leaf)
        rows = self._rows(value.shape)
        return value.reshape(self.count, rows, *value.shape[1:])

    def _shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.core.Tracer) and sharding_of(leaf) is None:
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        value = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.ShapeDtypeStruct((self._rows(value.shape), *value.shape[1:]), dtype)

    def _rows(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows of a microbatch."""
        if not shape or shape[0] % self.count or not shape[0]:
            rows = f"{shape[0]} rows" if shape else "no rows: it is one number"
            raise ArgumentError(
                f"a part of the batch of {self.name!r} has {rows}, which cannot be divided into "
                f"{self.count} microbatches of equal size"
            )
        return shape[0] // self.count
