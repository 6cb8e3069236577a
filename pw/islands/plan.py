"""A function over several islands as a list of steps, and the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

NUMBER = -1
"""The value with the number of each island, an int32."""


class Lies(NamedTuple):
    """The layout of an array on the devices of an island."""

    shape: tuple[int, ...]
    """Shape of the array on the whole island."""
    dtype: np.dtype[Any]
    axes: tuple[tuple[str, ...], ...]
    """Mesh axes of the island that split each of its first dimensions."""


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
    """Whether it calls functions in its client's process."""


class Ref(NamedTuple):
    """A value: its number, and the island that has it."""

    value: int
    island: int


@dataclass(frozen=True)
class PlanStep:
    """One computation on each island."""

    codes: tuple[Code, ...]
    inputs: tuple[tuple[Ref, ...], ...]
    """Values that the computation takes, by island."""
    outputs: tuple[int, ...]
    """Numbers of the results: each island has its own."""


@dataclass(frozen=True)
class Counter:
    """A value that a loop carries, and that is known before."""

    at: int
    """Position among what the loop carries."""
    start: np.generic
    step: int

    def value(self, iteration: int) -> np.generic:
        """Return the value in an iteration."""
        return self.start.dtype.type(int(self.start) + iteration * self.step)


@dataclass(frozen=True)
class PlanLoop:
    """Steps that run several times."""

    count: int
    counter: Counter
    operands: tuple[int, ...]
    """Values that the first iteration takes."""
    arguments: tuple[int, ...]
    """The numbers by which the steps know what they carry."""
    first: tuple[PlanStep | PlanLoop, ...]
    rest: tuple[PlanStep | PlanLoop, ...]
    """Steps of the later iterations: they take over the buffers of what they carry."""
    carried: tuple[int, ...]
    """Values that the next iteration takes."""
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A function that is cut; its arguments are the values 0, 1, and so on."""

    steps: tuple[PlanStep | PlanLoop, ...]
    results: tuple[int, ...]
    unused: tuple[int, ...]
    """Donated arguments that no computation takes."""

    @property
    def computations(self) -> list[Code]:
        """The computations of the first island, each once."""
        return list(dict.fromkeys(step.codes[0] for step in _all(self.steps)))


def _all(steps: Sequence[PlanStep | PlanLoop]) -> list[PlanStep]:
    flat: list[PlanStep] = []
    for step in steps:
        if isinstance(step, PlanLoop):
            flat += _all(step.first)
            flat += _all(step.rest) if step.count > 1 else []
        else:
            flat.append(step)
    return flat
