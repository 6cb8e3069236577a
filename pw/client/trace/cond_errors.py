"""The errors of `pw.cond`, and its name for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pw.client.trace.wrapped import name_of
from pw.core.errors import ArgumentError

PREDICATE = "pw.cond takes a scalar boolean as its predicate, and was given"


def name_of_both(functions: Sequence[Callable[..., Any]]) -> str:
    """Return the name of a `cond` of two functions, for the user."""
    return f"cond({', '.join(map(name_of, functions))})"


def unequal_trees(names: Sequence[str], returned: Sequence[str]) -> ArgumentError:
    """Return the error of branches with different trees; both for the true and the false branch, in words."""
    return ArgumentError(
        f"the branches of a pw.cond must return the same tree: the true branch {names[0]!r} returns "
        f"{returned[0]}, and the false branch {names[1]!r} returns {returned[1]}"
    )


def unequal_results(names: Sequence[str], path: str, avals: Sequence[Any]) -> ArgumentError:
    """Return the error of a result with two shapes or dtypes; both for the true and the false branch."""
    true, false = (aval.str_short() for aval in avals)
    return ArgumentError(
        f"the branches of a pw.cond must return the same shapes and dtypes: {path} is "
        f"{true} from the true branch {names[0]!r}, and {false} "
        f"from the false branch {names[1]!r}; convert one of them there, as with astype or reshape"
    )


def no_result(name: str, which: str, leaf: Any) -> ArgumentError:
    """Return the error of a branch, the "true" or "false" one, that returns something else than arrays."""
    return ArgumentError(
        f"{name!r}, the {which} branch of a pw.cond, returns "
        f"{leaf!r} of type {type(leaf).__name__}; branches return trees of arrays and numbers"
    )
