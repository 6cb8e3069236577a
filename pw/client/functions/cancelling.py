"""`cancel`: ends computations whose results are not needed."""

from __future__ import annotations

from typing import Any

import jax

from pw.client.arrays.array import Array
from pw.client.functions.wrapped import under_jax_trace
from pw.core.errors import ArgumentError, TracerError


def cancel(tree: Any) -> None:
    """Cancel the computations that make the arrays of `tree`, and all that needs their results.

    Returns at once. All results of these calls fail with `Cancelled`, also those that are not in `tree`. Queued
    calls never start. Started calls have a second to end; then their island is formed again, which takes a
    moment (other clients keep their arrays, and their calls are replayed). Calls that have ended stay as they
    are.

    Args:
        tree: tree of pw arrays; other values beside them are ignored.

    Raises:
        ArgumentError: there is no pw array in it.
        ArrayDeleted: an array was deleted or donated before.
        TracerError: called in a function that is being traced.
    """
    leaves = jax.tree_util.tree_leaves(tree)
    if under_jax_trace(leaves):
        raise TracerError("pw.cancel was called in a function that JAX traces")
    arrays = [leaf for leaf in leaves if isinstance(leaf, Array)]
    if leaves and not arrays:
        raise ArgumentError(
            f"pw.cancel takes arrays of pw, and {leaves[0]!r} is none; a run is cancelled by its name with "
            "`pw cancel RUN`, and an array of JAX is one of pw after pw.jax.from_jax"
        )
    by_session: dict[Any, list[int]] = {}
    for array in arrays:
        array._check_usable()
        if not array.is_known_to_exist:
            ids = [member._id for member in array.members]
            by_session.setdefault(array._runtime, []).extend(ids)
    for session, numbers in by_session.items():
        session.cancel(numbers)
