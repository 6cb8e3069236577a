"""`pw.arrays_lost`: which arrays of a tree are lost with their islands."""

from __future__ import annotations

from typing import Any

import jax

from pw.client.arrays.array import Array
from pw.client.arrays.joined import JoinedArray
from pw.client.connection.waiting import time_left
from pw.client.keywords import checks_keywords
from pw.core.errors import ArrayLost, HostLost


@checks_keywords
def arrays_lost(tree: Any, timeout: float | None = None) -> dict[str, HostLost | ArrayLost]:
    """Return which arrays of a tree are lost, by their paths in it (`jax.tree_util.keystr`), with their errors.

    After a `pw.IslandLost` it says what of a script's state is left: `lost = pw.arrays_lost(state)`. An array
    that lies whole on several islands is lost only with all of them: `pw.put` takes it from one that is left.
    The call waits until each array exists or has failed: until an island that is away is back or given up.

    Args:
        tree: arrays of this session in any tree; other leaves are left out.
        timeout: how long to wait, in seconds; None for no limit.

    Raises:
        TimeoutError: some arrays have neither come nor failed in that time.
        ArrayDeleted: the tree has an array that was deleted or donated.
        ArgumentError: `timeout` is no number of seconds.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    waits = {path: _left(leaf).start_wait() for path, leaf in leaves if isinstance(leaf, Array)}
    left_s = time_left(timeout)
    errors = {jax.tree_util.keystr(path): one.exception(left_s()) for path, one in waits.items()}
    return {path: one for path, one in errors.items() if isinstance(one, (HostLost, ArrayLost))}


def _left(array: Array) -> Array:
    """Return the part of an array that lies whole on an island that is left, if one is lost."""
    survivor = array.surviving() if isinstance(array, JoinedArray) and array.has_lost else None
    return array if survivor is None else survivor
