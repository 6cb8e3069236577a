"""A user's Python function as a host calls it: from numpy leaves to the host's part of the results.

Hosts import this without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pw.core.functions.filling import filled
from pw.core.functions.parts import HostPart, ResultPart


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
            results = filled(share, results, self._ragged)
        return share.taken(results, whole=not self._makes_part)


def part_of(share: HostPart, results: Structure) -> ResultPart:
    """Return what a function is told of its share of results with this structure."""
    return ResultPart(share.index, share.count, results.filled(share.slices))
