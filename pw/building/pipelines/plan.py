"""`PipelinePlan`: what each stage of a pipeline costs, has and sends; what a choice of cuts is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from pw.building.pipelines.costs import cost_of_jaxpr
from pw.building.pipelines.stages import Stage
from pw.building.pipelines.units import line_of
from pw.client.display.tables import Shown, Table
from pw.client.equations.graph import size_bytes
from pw.core.sizes import size_in_words


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage, for one microbatch."""

    cost: float
    """Floating-point operations of its forward pass; bytes that it touches are counted as operations, too."""
    param_bytes: int
    """Size of its parameters."""
    sent_bytes: int
    """Size of what it sends to the next stage; the gradient that comes back is as large."""
    begins: str
    """Line of the first operation on what the stage before sends, or on the batch."""

    @classmethod
    def of(cls, stage: Stage, is_last: bool) -> PlannedStage:
        """Describe a stage."""
        jaxpr = stage.closed.jaxpr
        names = dict(zip(jaxpr.invars, stage.takes, strict=True))
        params = [v for v, (kind, _) in names.items() if kind == "param"]
        inputs = [v for v, (kind, _) in names.items() if kind == ("x" if stage.number else "batch")]

        def is_before(eqn: Any) -> bool:
            return not any(atom is value for atom in eqn.invars for value in inputs)

        lines = map(line_of, dropwhile(is_before, jaxpr.eqns))
        return cls(
            cost_of_jaxpr(jaxpr),
            sum(size_bytes(v.aval) for v in params),
            0 if is_last else sum(map(size_bytes, stage.outputs)),
            next(filter(None, lines), "?"),
        )


@dataclass(frozen=True, slots=True, repr=False)
class PipelinePlan(Shown):
    """The stages of a pipeline; prints as a table."""

    name: str
    stages: tuple[PlannedStage, ...]

    @classmethod
    def of(cls, name: str, stages: Sequence[Stage]) -> PipelinePlan:
        """Describe the stages of a model."""
        last = len(stages) - 1
        return cls(name, tuple(PlannedStage.of(stage, stage.number == last) for stage in stages))

    @property
    def imbalance(self) -> float:
        """The cost of the slowest stage, for each unit of the mean cost."""
        costs = [stage.cost for stage in self.stages]
        return max(costs) * len(costs) / (sum(costs) or 1.0)

    @property
    def head(self) -> str:
        """One line about all stages."""
        return f"{self.name}: {len(self.stages)} stages; the slowest costs {self.imbalance:.2f} times the mean"

    def tables(self) -> tuple[Table, ...]:
        """Return the table of the stages."""
        total = sum(stage.cost for stage in self.stages) or 1.0
        columns = {
            "stage": lambda number, _: number,
            "cost": lambda _, s: f"{s.cost / total:.1%}",
            "parameters": lambda _, s: size_in_words(s.param_bytes),
            "sends": lambda _, s: size_in_words(s.sent_bytes),
            "begins at": lambda _, s: s.begins,
        }
        return (Table.of("Stages, for one microbatch", enumerate(self.stages), columns),)
