"""Lays out results whose size only their function knows, as rows and counts (`pw.core.programs.counted`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pw.core.errors import ResultMismatch
from pw.core.functions.parts import HostPart
from pw.core.programs.counted import impossible
from pw.core.sharding import dtype_of


def filled(share: HostPart, results: Sequence[Any], ragged: Sequence[bool]) -> list[Any]:
    """Return the results with rows and counts in the place of each that is `ragged`.

    Such a result is an array with any number of rows; where there are several cells, a sequence with one
    for each; or rows and counts as they are declared, in attributes of these names.

    Raises:
        ResultMismatch: it has more rows than declared, or rows of another shape or dtype.
    """
    found: list[Any] = []
    for result, is_ragged in zip(results, ragged, strict=True):
        at = len(found)
        if not is_ragged:
            found.append(result)
        elif hasattr(result, "rows") and hasattr(result, "counts"):
            counts = np.asarray(result.counts, dtype_of(share.dtypes[at + 1]))
            if counts.shape == tuple(share.shapes[at + 1]):
                words = impossible(counts, share.shapes[at][counts.ndim])
                if words is not None:
                    raise ResultMismatch(f"result {at} of {share.name!r} has counts that {words}")
            found += [np.asarray(result.rows), counts]
        else:
            rows = np.zeros(share.shapes[at], dtype_of(share.dtypes[at]))
            counts = np.zeros(share.shapes[at + 1], dtype_of(share.dtypes[at + 1]))
            _fill(f"result {at} of {share.name!r}", result, rows, counts)
            found += [rows, counts]
    return found


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
