"""Checks what decides between branches, and whether a loop goes on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pw.client.arrays.signature import aval_of
from pw.client.trace.argument_errors import in_words
from pw.client.trace.function import signature_of_call
from pw.core.errors import ArgumentError


def check_is_one_value(pred: Any, said: str) -> None:
    """Raise ArgumentError if a predicate is a tree, as a list with a boolean in it.

    Args:
        pred: what the user gives.
        said: the beginning of the error, up to the predicate.
    """
    if pred is None or not jax.tree_util.all_leaves([pred]):
        raise ArgumentError(f"{said} {in_words(pred)}; compute one, as in x.sum() > 0")


def boolean(pred: Any, said: str) -> Any:
    """Return a predicate. Raises ArgumentError if it is no scalar boolean."""
    check_is_one_value(pred, said)
    try:
        aval = aval_of(*signature_of_call([pred]))
    except ArgumentError:
        raise ArgumentError(f"{said} {pred!r}; compute one, as in x.sum() > 0") from None
    _check_is_scalar_boolean(aval, said)
    return pred


def _check_is_scalar_boolean(aval: Any, said: str) -> None:
    is_boolean = aval.dtype == np.bool_
    if aval.shape or not is_boolean:
        next_step = (
            "make one of all, as in x.any() or x.all()"
            if is_boolean
            else "compute one, as in x.sum() > 0"
        )
        raise ArgumentError(f"{said} {aval.str_short()}; {next_step}")
