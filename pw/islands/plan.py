"""A function over several islands as a list of steps, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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
class Loop:
    """Steps that run several times."""

    count: int
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


V = TypeVar("V")
Call = Callable[[Code, int, list[V]], Sequence[V]]
"""Adds a computation on an island, with these arguments; returns its results."""


def run(
    plan: Plan, arguments: Sequence[Sequence[V]], numbers: Sequence[V], call: Call[V]
) -> list[list[V]]:
    """Have `call` add all computations of a plan, in their order; return the results, by island.

    Args:
        plan: of the function.
        arguments: for each its part on each island.
        numbers: of the islands.
        call: adds a computation.
    """
    values: dict[int, list[V]] = {at: list(parts) for at, parts in enumerate(arguments)}
    values[NUMBER] = list(numbers)
    _run(plan.steps, values, call)
    return [values[number] for number in plan.results]


def _run(steps: Sequence[Step | Loop], values: dict[int, list[V]], call: Call[V]) -> None:
    for step in steps:
        if isinstance(step, Loop):
            _run_loop(step, values, call)
            continue
        made = [
            call(code, island, [values[ref.value][ref.island] for ref in step.inputs[island]])
            for island, code in enumerate(step.codes)
        ]
        for place, number in enumerate(step.outputs):
            values[number] = [results[place] for results in made]


def _run_loop(loop: Loop, values: dict[int, list[V]], call: Call[V]) -> None:
    carried = [values[number] for number in loop.operands]
    for iteration in range(loop.count):
        inside = {NUMBER: values[NUMBER]}
        inside.update(zip(loop.arguments, carried, strict=True))
        _run(loop.rest if iteration else loop.first, inside, call)
        carried = [inside[number] for number in loop.carried]
    values.update(zip(loop.outputs, carried, strict=True))
