"""Checks what decides between branches, and whether a loop goes on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pw.client.arrays.signature import aval_of
from pw.client.functions.argument_errors import in_words
from pw.client.functions.function import signature_of_call
from pw.core.errors import ArgumentError


def check_is_one_value(pred: Any, prefix: str) -> None:
    """Raise ArgumentError if a predicate is a tree, as a list with a boolean in it.

    Args:
        pred: value that the user passes.
        prefix: beginning of the error, up to the predicate.
    """
    if pred is None or not jax.tree_util.all_leaves([pred]):
        raise ArgumentError(f"{prefix} {in_words(pred)}; compute one, as in x.sum() > 0")


def boolean(pred: Any, prefix: str) -> Any:
    """Return a predicate. Raises ArgumentError, beginning with `prefix`, if it is no scalar boolean."""
    check_is_one_value(pred, prefix)
    try:
        aval = aval_of(*signature_of_call([pred]))
    except ArgumentError:
        raise ArgumentError(f"{prefix} {pred!r}; compute one, as in x.sum() > 0") from None
    if aval.dtype != np.bool_:
        raise ArgumentError(f"{prefix} {aval.str_short()}; compute one, as in x.sum() > 0")
    if aval.shape:
        raise ArgumentError(
            f"{prefix} {aval.str_short()}; make one of all, as in x.any() or x.all()"
        )
    return pred
