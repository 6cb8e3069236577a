"""`Loop`: the two functions of a `pw.while_loop`, which keep the tree, shapes and dtypes of the carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pw.client.arrays.signature import aval_of
from pw.client.functions.argument_errors import in_words, path_of_leaf
from pw.client.functions.function import signature_of_call
from pw.client.functions.predicate import boolean
from pw.client.functions.wrapped import name_of, tree_flatten, tree_unflatten
from pw.core.errors import ArgumentError, ShardingError


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """The two functions of a loop, and the tree of its carry."""

    cond_fun: Callable[[Any], Any]
    body_fun: Callable[[Any], Any]
    tree: Any

    @property
    def name(self) -> str:
        """The name of its computations and programs."""
        return f"while_loop({name_of(self.body_fun)})"

    def signature(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the types of the first carry. Raises ArgumentError."""
        types: list[Any] = []
        for leaf in leaves:
            try:
                types += signature_of_call([leaf])
            except ArgumentError:
                raise ArgumentError(
                    f"pw.while_loop was given {leaf!r} of type {type(leaf).__name__} in its first carry, which "
                    "is a tree of arrays and numbers"
                ) from None
        return types

    def goes_on(self, leaves: Sequence[Any]) -> Any:
        """Return the predicate for a carry. Raises ArgumentError if it is no scalar boolean."""
        name = name_of(self.cond_fun)
        return boolean(
            self.cond_fun(tree_unflatten(self.tree, leaves)),
            f"pw.while_loop: {name!r} must return a scalar boolean, and returns",
        )

    def step(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of the carry after an iteration. Raises ArgumentError if they are unlike those."""
        carry = tree_unflatten(self.tree, leaves)
        name, returned = name_of(self.body_fun), self.body_fun(carry)
        results, tree = tree_flatten(returned)
        if tree != self.tree:
            raise ArgumentError(
                f"pw.while_loop: {name!r} must return a carry of the tree that it takes, {in_words(carry)}, "
                f"and returns {in_words(returned)}"
            )
        for at, (result, before) in enumerate(zip(results, leaves, strict=True)):
            try:
                aval, wanted = map(aval_of, signature_of_call([result, before]))
            except ArgumentError:
                raise ArgumentError(
                    f"pw.while_loop: {name!r} returns {result!r} of type {type(result).__name__} as "
                    f"{self.path(at)}; a carry is a tree of arrays and numbers"
                ) from None
            if (tuple(aval.shape), aval.dtype) != (tuple(wanted.shape), wanted.dtype):
                raise ArgumentError(
                    f"pw.while_loop: the carry must keep its shapes and dtypes, but {name!r} takes "
                    f"{self.path(at)} as {wanted.str_short()} and returns {aval.str_short()}; convert it "
                    "there, as with astype or reshape, or begin with another first carry"
                )
        return results

    def path(self, at: int) -> str:
        """Return the user's name of a leaf of the carry."""
        return f"carry{path_of_leaf(self.tree, at)}"

    def moves(self, at: int, before: Any, after: Any) -> ShardingError:
        """Return the error of a leaf that the body leaves elsewhere each time."""
        return ShardingError(
            f"pw.while_loop: {name_of(self.body_fun)!r} takes {self.path(at)} as {before} and "
            f"returns it as {after}, and so on in each iteration; give its functions out_shardings"
        )
