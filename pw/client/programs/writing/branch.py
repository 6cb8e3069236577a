"""`Branch`: a part of a program that happens only if a predicate says so, while it is traced."""

from __future__ import annotations

from dataclasses import dataclass

from pw.client.programs.writing.values import PlacedValue


@dataclass(slots=True, eq=False)
class Branch:
    """One of the two functions of a `pw.cond`."""

    name: str
    predicate: PlacedValue
    """If the branch lies in another one, it is computed there, so it is skipped with the other one."""
    unless: bool
    """The branch is taken if the predicate is false."""
    outer: Branch | None
    is_iteration: bool = False
    """It belongs to an iteration of a loop, whose operands go ahead of the predicate."""
    other: Branch | None = None
    """The branch that is taken instead."""
    donated: dict[object, str] | None = None
    """What was donated before it and in it, by `PlacedValue.identity`; None before it is traced."""

    def encloses(self, other: Branch | None) -> bool:
        """Whether another branch is this one, or lies in it."""
        while other is not None:
            if other is self:
                return True
            other = other.outer
        return False
