"""The order in which the computations of a plan run: loops one iteration after the other, transfers early.

What an island sends is computed before what waits for other islands, as far as that is possible: so the
weights of the next layer travel while a layer is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from pw.islands.plan import NUMBER, Code, Plan, PlanLoop, PlanStep, Ref

V = TypeVar("V")
Call = Callable[[Code, int, list[V]], Sequence[V]]
"""Adds a computation on an island, with these arguments; returns its results."""


class _Issued(NamedTuple):
    """A step as it runs once: its values have numbers of their own."""

    step: PlanStep
    inputs: tuple[tuple[Ref, ...], ...]
    outputs: tuple[int, ...]

    @property
    def waits(self) -> bool:
        """Whether it takes values of other islands."""
        return any(ref.island != island for island, own in enumerate(self.inputs) for ref in own)


def run(
    plan: Plan,
    arguments: Sequence[Sequence[V]],
    constant: Callable[[np.generic, int], V],
    call: Call[V],
) -> list[list[V]]:
    """Have `call` add all computations of a plan, in an order in which they can run.

    Args:
        plan: of the function.
        arguments: for each its part on each island.
        constant: makes a value of a number, for an island.
        call: adds a computation.

    Returns the results, by island.
    """
    islands = range(len(arguments[0]) if arguments else _islands(plan))
    order = _Order(len(arguments), islands)
    names = {number: number for number in range(len(arguments))}
    order.add(plan.steps, names)
    values: dict[int, list[V]] = {at: list(parts) for at, parts in enumerate(arguments)}
    used = {ref.value for one in order.issued for own in one.inputs for ref in own}
    for number in used.intersection(order.constants):
        constants = order.constants[number]
        values[number] = [constant(one, island) for island, one in enumerate(constants)]
    for issued in _early(order.issued):
        results_by_island = [
            call(code, island, [values[ref.value][ref.island] for ref in issued.inputs[island]])
            for island, code in enumerate(issued.step.codes)
        ]
        for place, number in enumerate(issued.outputs):
            values[number] = [results[place] for results in results_by_island]
    return [values[names[number]] for number in plan.results]


def _islands(plan: Plan) -> int:
    step = plan.steps[0]
    while isinstance(step, PlanLoop):
        step = step.first[0]
    return len(step.codes)


class _Order:
    """The steps of a plan, one after the other."""

    def __init__(self, arguments: int, islands: range) -> None:
        self.issued: list[_Issued] = []
        self.constants: dict[int, list[np.generic]] = {}
        self._islands = islands
        self._next = arguments
        self._number = self._constant([np.int32(island) for island in islands])

    def add(self, steps: Sequence[PlanStep | PlanLoop], names: dict[int, int]) -> None:
        """Add steps; `names` has the numbers of their values in this order."""
        names[NUMBER] = self._number
        for step in steps:
            if isinstance(step, PlanLoop):
                self._loop(step, names)
                continue
            inputs = tuple(
                tuple(Ref(names[ref.value], ref.island) for ref in own) for own in step.inputs
            )
            outputs = tuple(self._new() for _ in step.outputs)
            names.update(zip(step.outputs, outputs, strict=True))
            self.issued.append(_Issued(step, inputs, outputs))

    def _loop(self, loop: PlanLoop, names: dict[int, int]) -> None:
        carried = [names[number] for number in loop.operands]
        for iteration in range(loop.count + 1):
            counter = [loop.counter.value(iteration)] * len(self._islands)
            carried[loop.counter.at] = self._constant(counter)
            if iteration == loop.count:
                break
            inside = dict(zip(loop.arguments, carried, strict=True))
            self.add(loop.rest if iteration else loop.first, inside)
            carried = [inside[number] for number in loop.carried]
        names.update(zip(loop.outputs, carried, strict=True))

    def _constant(self, numbers: list[np.generic]) -> int:
        number = self._new()
        self.constants[number] = numbers
        return number

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


def _early(issued: Sequence[_Issued]) -> list[_Issued]:
    """Put each step whose values other islands take before the last one that waits for other islands."""
    sent = {
        ref.value
        for one in issued
        for island, own in enumerate(one.inputs)
        for ref in own
        if ref.island != island
    }
    order: list[_Issued] = []
    waiting = -1  # the place of the last step that waits
    for one in issued:
        later = order[waiting:] if waiting >= 0 else []
        outputs = {number for other in later for number in other.outputs}
        used = {ref.value for other in later for own in other.inputs for ref in own}
        needs = {ref.value for own in one.inputs for ref in own}
        donated = {
            one.inputs[island][at].value
            for island, code in enumerate(one.step.codes)
            for at in code.donated
        }
        is_free = not outputs & needs and not used & donated
        if later and is_free and not one.waits and sent.intersection(one.outputs):
            order.insert(waiting, one)
            waiting += 1
            continue
        if one.waits:
            waiting = len(order)
        order.append(one)
    return order
