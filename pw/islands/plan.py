"""A function over several islands as a list of steps, and the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

NUMBER = -1
"""The value with the number of each island, an int32."""


class Lies(NamedTuple):
    """How an array lies on the devices of an island."""

    shape: tuple[int, ...]
    """Of the array of the whole island."""
    dtype: np.dtype[Any]
    axes: tuple[tuple[str, ...], ...]
    """For each of its first dimensions the mesh axes of the island that split it."""


@dataclass(frozen=True)
class Code:
    """A computation on one island."""

    name: str
    artifact: bytes
    inputs: tuple[Lies, ...]
    outputs: tuple[Lies, ...]
    donated: tuple[int, ...] = ()
    """Positions of the inputs whose buffers it takes."""
    calls_back: bool = False
    """It calls functions in its client's process."""


class Ref(NamedTuple):
    """A value: its number, and the island that has it."""

    value: int
    island: int


@dataclass(frozen=True)
class Step:
    """One computation on each island."""

    codes: tuple[Code, ...]
    inputs: tuple[tuple[Ref, ...], ...]
    """By island."""
    outputs: tuple[int, ...]
    """The numbers of the results: each island has its own."""


@dataclass(frozen=True)
class Counter:
    """A value that a loop carries, and that is known before."""

    at: int
    """Its position among what the loop carries."""
    start: np.generic
    step: int

    def value(self, iteration: int) -> np.generic:
        """Return the value in an iteration."""
        return self.start.dtype.type(int(self.start) + iteration * self.step)


@dataclass(frozen=True)
class Loop:
    """Steps that run several times."""

    count: int
    counter: Counter
    operands: tuple[int, ...]
    """What the first iteration takes."""
    arguments: tuple[int, ...]
    """The numbers by which the steps know what they carry."""
    first: tuple[Step | Loop, ...]
    rest: tuple[Step | Loop, ...]
    """Of the later iterations: they take over the buffers of what they carry."""
    carried: tuple[int, ...]
    """What the next iteration takes."""
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A function that is cut; its arguments are the values 0, 1, and so on."""

    steps: tuple[Step | Loop, ...]
    results: tuple[int, ...]
    unused: tuple[int, ...]
    """Donated arguments that no computation takes."""

    @property
    def computations(self) -> list[Code]:
        """The computations of the first island, each once."""
        return list(dict.fromkeys(step.codes[0] for step in _all(self.steps)))


def _all(steps: Sequence[Step | Loop]) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            found += _all(step.first)
            found += _all(step.rest) if step.count > 1 else []
        else:
            found.append(step)
    return found
