"""Trees of dicts, lists and tuples, taken apart and put together without JAX.

A *skeleton* is a tree with the numbers of its leaves in their places. Processes that run clients'
functions use it, because to import JAX there takes a second and a hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pw.core.errors import ResultMismatch


class AnyLeaf(int):
    """The number of a leaf that may be a list or a tuple."""


_NODES = (dict, list, tuple, type(None))


def is_plain(skeleton: Any) -> bool:
    """Whether a tree has no nodes but dicts, lists, tuples and None."""
    if isinstance(skeleton, int):
        return True
    if type(skeleton) is dict:
        return all(map(is_plain, skeleton.values()))
    return skeleton is None or (type(skeleton) in _NODES and all(map(is_plain, skeleton)))


class PlainTree:
    """The structure of a tree with only plain nodes."""

    def __init__(self, skeleton: Any) -> None:
        self._skeleton = skeleton

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves."""
        return _filled(self._skeleton, leaves)

    def leaves_of(self, value: Any) -> list[Any]:
        """Return the leaves of a value with this structure. Raises ResultMismatch."""
        leaves: dict[int, Any] = {}
        if not _match(self._skeleton, value, leaves):
            raise ResultMismatch(
                f"it returned {_shown(value)}, but {_shown(self._skeleton)} is declared"
            )
        return [leaves[number] for number in range(len(leaves))]


def _filled(skeleton: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(skeleton, int):
        return leaves[skeleton]
    if skeleton is None:
        return None
    if type(skeleton) is dict:
        return {key: _filled(below, leaves) for key, below in skeleton.items()}
    return type(skeleton)(_filled(below, leaves) for below in skeleton)


def _match(skeleton: Any, value: Any, leaves: dict[int, Any]) -> bool:
    if isinstance(skeleton, int):
        leaves[skeleton] = value
        return type(skeleton) is AnyLeaf or not isinstance(value, _NODES)
    if type(value) is not type(skeleton):
        return False
    if skeleton is None:
        return True
    if len(value) != len(skeleton):
        return False
    if type(skeleton) is dict:
        return all(key in value and _match(skeleton[key], value[key], leaves) for key in skeleton)
    return all(_match(below, item, leaves) for below, item in zip(skeleton, value, strict=True))


def _shown(tree: Any) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(below)}" for key, below in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_shown, tree)) + "]"
    if isinstance(tree, tuple):
        return "(" + ", ".join(map(_shown, tree)) + ("," if len(tree) == 1 else "") + ")"
    return "None" if tree is None else "*"
