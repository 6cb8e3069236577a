"""`PlacedValue`: a value of a program, with the place where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.core.programs.program import ValueRef


@dataclass(slots=True, eq=False)
class PlacedValue:
    """A value of a program that is placed: an array on a mesh, or a host value, which its consumers place."""

    aval: Any
    type: ArrayType | None
    """None for a host value."""
    ref: ValueRef | None
    """The result of a node, or the input, that it is; None for a host value."""
    source: Any
    """A host value: the number of a leaf of the call, or a `Constant`."""
    moved: object = None
    """Its identity, if it is a copy somewhere else."""
    counts: PlacedValue | None = None
    """The counts of rows of a `Ragged`: where the value moves, only rows that count do."""

    @property
    def sharding(self) -> OwnSharding | None:
        """The value's sharding; None for a host value."""
        return None if self.type is None else self.type.sharding

    @property
    def identity(self) -> object:
        """The key of the value for donation; None for a host value, which each consumer uploads for itself."""
        return self.ref if self.moved is None else self.moved


@dataclass(slots=True, eq=False)
class JoinedValue(PlacedValue):
    """A value over a mesh that joins islands: the part of each island."""

    parts: tuple[PlacedValue, ...] = ()

    @property
    def identity(self) -> object:
        """The first part's; parts are donated together."""
        return self.parts[0].identity
