"""How the islands of a mesh lie along its axes.

An axis of a mesh is a product of factors, the slowest first: along a *crossing* factor the islands change,
an *inner* one stays inside of islands. So an axis of 8 devices over two islands of 4 has a crossing factor of 2
and an inner one of 4. If the crossing factors of all axes together have one position for each island, the
inner ones are the axes of each island's own mesh. There are assignments of devices that have no such factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Factor(NamedTuple):
    """A factor of a mesh axis."""

    size: int
    name: str
    """Name of the axis of each island's mesh; empty if the factor crosses islands."""


@dataclass(frozen=True)
class Factors:
    """The factors of all axes of a mesh, and where each island is."""

    of_axis: dict[str, tuple[Factor, ...]]
    places: tuple[dict[str, tuple[int, ...]], ...]
    """Position of each island along the factors of each axis; 0 along inner ones."""

    @property
    def inner(self) -> dict[str, int]:
        """The axes of each island's mesh, with their sizes."""
        every = (factor for factors in self.of_axis.values() for factor in factors)
        return {factor.name: factor.size for factor in every if factor.name}


def factors_of(owners: np.ndarray[Any, Any], names: Sequence[str]) -> Factors | None:
    """Return the factors of a mesh with the axes `names`; None if there are none.

    Args:
        owners: the number of the island of each device, in the shape of the mesh.
        names: names of the axes.
    """
    of_axis: dict[str, tuple[Factor, ...]] = {}
    used = set(names)
    for at, name in enumerate(names):
        rows = np.moveaxis(owners, at, 0).reshape(owners.shape[at], -1)
        factors = _factors(np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1))
        inner = sum(not crosses for _, crosses in factors)
        own = iter([name] if inner == 1 else _fresh(name, inner, used))
        of_axis[name] = tuple(
            Factor(size, "" if crosses else next(own)) for size, crosses in factors
        )
    every = (factor for factors in of_axis.values() for factor in factors)
    islands = len(np.unique(owners))
    if math.prod(factor.size for factor in every if not factor.name) != islands:
        return None
    return Factors(of_axis, tuple(_place(owners, island, of_axis) for island in range(islands)))


def _factors(kinds: np.ndarray[Any, Any]) -> list[tuple[int, bool]]:
    """Return the factors of an axis, and whether each crosses islands.

    Args:
        kinds: one number for each position: where it is the same, the islands are the same.
    """
    factors: list[tuple[int, bool]] = []
    while len(kinds) > 1:
        sizes = [size for size in range(2, len(kinds) + 1) if len(kinds) % size == 0]
        same = [size for size in sizes if _is_constant(kinds.reshape(-1, size))]
        if same:
            factors.append((same[-1], False))
            kinds = kinds[:: same[-1]]
            continue
        for size in sizes:
            rows = np.unique(kinds.reshape(-1, size), axis=0, return_inverse=True)[1].reshape(-1)
            count = len(rows)
            if any(
                _is_constant(rows.reshape(-1, n)) for n in range(2, count + 1) if count % n == 0
            ):
                break
        factors.append((size, True))
        kinds = rows
    return factors[::-1] or [(1, False)]


def _is_constant(rows: np.ndarray[Any, Any]) -> bool:
    return bool((rows == rows[:, :1]).all())


def _fresh(name: str, count: int, used: set[str]) -> list[str]:
    """Return `count` names that no axis has."""
    names: list[str] = []
    for number in range(count):
        names.append(f"{name}_{number}")
        while names[-1] in used:
            names[-1] += "_"
        used.add(names[-1])
    return names


def _place(
    owners: np.ndarray[Any, Any], island: int, of_axis: dict[str, tuple[Factor, ...]]
) -> dict[str, tuple[int, ...]]:
    place = {}
    first = np.argwhere(owners == island)[0]
    for position, (name, factors) in zip(first, of_axis.items(), strict=True):
        along = np.unravel_index(position, [factor.size for factor in factors])
        place[name] = tuple(
            0 if factor.name else int(at) for at, factor in zip(along, factors, strict=True)
        )
    return place
