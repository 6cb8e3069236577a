"""Values of a program that no computation makes yet, while it is placed; see also `ordinary.Pending`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.programs.placing.ordinary import Pending
from pw.client.programs.writing.branch import Branch
from pw.client.programs.writing.values import PlacedValue


class Floating:
    """A result of an ordinary equation that is computed where it is needed: its operands are host values.

    So is the number that the predicate of a `cond` becomes, which nothing needs.
    """

    __slots__ = ("__weakref__", "aval", "equation", "index", "operands")

    def __init__(self, equation: Any, operands: Sequence[Any], index: int) -> None:
        self.equation = equation
        self.operands = operands
        self.index = index
        self.aval = equation.outvars[index].aval

    made_of = property(lambda self: self.operands)


class Stacked:
    """A result of each iteration of a loop, until something needs all of them as one array."""

    __slots__ = ("array", "aval", "parts")

    def __init__(self, aval: Any, parts: Sequence[Any]) -> None:
        self.aval = aval
        self.parts = parts
        self.array: Pending | None = None

    made_of = property(lambda self: self.parts)


class Apart:
    """A result of both branches of a `cond`, until something else than such with its predicate needs it."""

    __slots__ = ("branches", "index", "merged", "sides")

    def __init__(self, index: Any, branches: tuple[Branch, Branch], sides: tuple[Any, Any]) -> None:
        self.index = index
        self.branches = branches
        self.sides = sides
        """For a true predicate, and for a false one."""
        self.merged: PlacedValue | None = None

    made_of = property(lambda self: self.sides)


def mesh_of(value: Any) -> OwnMesh | None:
    """Return the mesh of a value while it is placed; None for a host value."""
    if isinstance(value, Pending):
        return value.group.mesh
    if isinstance(value, (Apart, Floating, Stacked)):
        return next((mesh for one in value.made_of if (mesh := mesh_of(one)) is not None), None)
    type_ = value.type if isinstance(value, PlacedValue) else None
    if isinstance(value, Array):
        type_ = value._type
    return None if type_ is None else type_.sharding.mesh
