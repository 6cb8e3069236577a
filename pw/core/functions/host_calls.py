"""A user's Python function as a host calls it: from numpy leaves to the host's part of the results.

Hosts import this without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pw.core.errors import ResultMismatch
from pw.core.functions.parts import HostPart, ResultPart
from pw.core.programs.counted import impossible
from pw.core.sharding import dtype_of


class Structure(Protocol):
    """The structure of a tree of arguments or results."""

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves."""

    def leaves_of(self, value: Any) -> list[Any]:
        """Return the leaves of a value with this structure. Raises ResultMismatch."""


class HostCall:
    """Calls a function with the tree of its arguments.

    Args:
        fun: the user's function.
        arguments: the structure of its positional and keyword arguments.
        results: the structure of what it returns.
        makes_part: it has the parameter `part`, and makes only that part.
        ragged: for each result, whether the size is known only afterwards; empty if of none.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        arguments: Structure,
        results: Structure,
        makes_part: bool,
        ragged: tuple[bool, ...] = (),
    ) -> None:
        self._fun = fun
        self._arguments = arguments
        self._results = results
        self._makes_part = makes_part
        self._ragged = ragged

    def __call__(self, share: HostPart, *leaves: Any) -> list[Any]:
        """Return the leaves of the host's part. Raises what the function raises, and ResultMismatch."""
        args, kwargs = self._arguments.filled(leaves)
        if self._makes_part:
            kwargs = {**kwargs, "part": part_of(share, self._results)}
        results = self._results.leaves_of(self._fun(*args, **kwargs))
        if self._ragged:
            results = _filled(share, results, self._ragged)
        return share.cut(results, is_part=self._makes_part)


def part_of(share: HostPart, results: Structure) -> ResultPart:
    """Return what a function is told of its share of results with this structure."""
    return ResultPart(share.index, share.count, results.filled(share.slices))


def _filled(share: HostPart, results: Sequence[Any], ragged: Sequence[bool]) -> list[Any]:
    """Return the results with rows and counts (`pw.core.programs.counted`) in the place of each `ragged` one.

    Such a result is an array with any number of rows; where there are several cells, a sequence with one
    for each; or rows and counts as they are declared, in attributes of these names.

    Raises:
        ResultMismatch: it has more rows than declared, or rows of another shape or dtype.
    """
    leaves: list[Any] = []
    for result, is_ragged in zip(results, ragged, strict=True):
        at = len(leaves)
        if not is_ragged:
            leaves.append(result)
        elif hasattr(result, "rows") and hasattr(result, "counts"):
            counts = np.asarray(result.counts, dtype_of(share.dtypes[at + 1]))
            if counts.shape == tuple(share.shapes[at + 1]):
                words = impossible(counts, share.shapes[at][counts.ndim])
                if words is not None:
                    raise ResultMismatch(f"result {at} of {share.name!r} has counts that {words}")
            leaves += [np.asarray(result.rows), counts]
        else:
            rows = np.zeros(share.shapes[at], dtype_of(share.dtypes[at]))
            counts = np.zeros(share.shapes[at + 1], dtype_of(share.dtypes[at + 1]))
            _fill(f"result {at} of {share.name!r}", result, rows, counts)
            leaves += [rows, counts]
    return leaves


def _fill(what: str, value: Any, rows: Any, counts: Any) -> None:
    if counts.ndim:
        cells = len(value) if hasattr(value, "__len__") else f"no sequence ({type(value).__name__})"
        if cells != len(counts):
            raise ResultMismatch(
                f"{what} has {cells} where {len(counts)} cells are declared; return a sequence with one array "
                "of rows for each cell"
            )
        for cell, (each, own) in enumerate(zip(value, rows, strict=True)):
            _fill(f"cell {cell} of {what}", each, own, counts[cell, ...])
        return
    array = np.asarray(value)
    if array.size == 0 and array.shape[:1] == (0,):
        return
    if array.shape[1:] != rows.shape[1:] or array.dtype != rows.dtype or not array.ndim:
        raise ResultMismatch(
            f"{what} has rows {array.dtype}{list(array.shape)}, and any number up to {rows.dtype}"
            f"{list(rows.shape)} is declared; make an array of these, as with np.asarray(rows, np.{rows.dtype})"
        )
    if len(array) > len(rows):
        raise ResultMismatch(
            f"{what} has {len(array)} rows, and at most {len(rows)} are declared; declare more"
        )
    rows[: len(array)] = array
    counts[...] = len(array)
