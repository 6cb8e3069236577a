"""`cancel`: what a user does about computations whose results nobody wants any more."""

from __future__ import annotations

from typing import Any

import jax

from pw.client.arrays.array import Array
from pw.client.trace.function import under_jax_trace
from pw.client.trace.tracer import ProgramTracer
from pw.core.errors import TracerError

__all__ = ["cancel"]


def cancel(tree: Any) -> None:
    """Give up computations: those that are to make the arrays of `tree`, and all that needs their results.

    Returns at once. All results of these calls fail with `Cancelled`, also those that are not in `tree`. What
    is queued never starts. What has started has a second to end by itself; then its island is taken out of
    work for a moment to get rid of it (what others have there is kept, and what they run is repeated). What
    has ended already stays as it is.

    Args:
        tree: tree of pw arrays; anything else in it is in this process, and left alone.

    Raises:
        ArrayDeleted: an array was deleted or donated before.
        TracerError: called in a function that is being traced.
    """
    leaves = jax.tree_util.tree_leaves(tree)
    if under_jax_trace(leaves):
        raise TracerError("pw.cancel was called in a function that JAX traces")
    by_session: dict[Any, list[int]] = {}
    for leaf in leaves:
        if isinstance(leaf, ProgramTracer):
            leaf._needed("pw.cancel()")
        elif isinstance(leaf, Array):
            leaf._check_usable()
            if not leaf.is_known_to_exist:
                by_session.setdefault(leaf._runtime, []).append(leaf._id)
    for session, arrays in by_session.items():
        session.cancel(arrays)
