"""The parameters of a user's function, and which of them are donated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

Donated = tuple[frozenset[int], frozenset[str]]
"""The parameters that are donated, by position and by name."""


def donated_leaves(tree: Any, donated: Donated) -> Iterator[int]:
    """Yield the numbers of the leaves of donated arguments, in the tree (args, kwargs)."""
    nums, names = donated
    if not nums and not names:
        return
    args, kwargs = tree.children()
    start = 0
    count = len(args.children())
    chosen = {num if num >= 0 else num + count for num in nums}
    for num, child in enumerate(args.children()):
        if num in chosen:
            yield from range(start, start + child.num_leaves)
        start += child.num_leaves
    for name, child in zip(kwargs.node_data()[1], kwargs.children(), strict=True):
        if name in names:
            yield from range(start, start + child.num_leaves)
        start += child.num_leaves


def parameters_of(fun: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of `fun`, where Python can tell."""
    try:
        return inspect.signature(fun)
    except (ValueError, TypeError):
        return None
