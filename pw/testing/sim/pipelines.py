"""Programs with the shape of a pipeline's training step, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pw.building.pipelines.schedules import named
from pw.building.pipelines.table import Task
from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec
from pw.testing.sim.programs import Drafting, ProgramDraft, SimSlice, random_spec

_ACTIVATIONS = ((8, 4), (16,), (8, 512))


def random_pipeline(
    random: Random, slices: Sequence[SimSlice], kinds: Sequence[ArraySpec], name: str
) -> ProgramDraft:
    """A step of a pipeline whose stages lie on these slices in turn.

    It takes an array of parameters for each stage and a batch, donates the parameters, and returns new ones and
    a loss. So one step can use the results of another.
    """
    order = random.sample(list(slices), random.randint(1, len(slices)))
    stages, microbatches = random.randint(2, 4), random.randint(2, 4)
    parts = [order[stage % len(order)] for stage in range(stages)]
    places = list(dict.fromkeys(part.number for part in parts))
    groups = [places.index(part.number) for part in parts]
    schedule = named(random.choice(("gpipe", "1f1b", "zero-bubble")), groups, microbatches)
    shape = random.choice(_ACTIVATIONS)
    params, flows = [], []
    for part in parts:
        own = [kind for kind in kinds if kind.placement.slice == part.number]
        spec = random.choice(own) if own else random_spec(random, part, (16,), "uint8")
        params.append(spec)
        flows.append(random_spec(random, part, shape, "uint8", spec.placement.devices))
    step = _PipelineDraft(name, params)
    batch = ValueRef(-1, stages)
    totals = [step.do(f"{s}/begin", s, [ValueRef(-1, s)], [params[s]])[0] for s in range(stages)]
    results: dict[tuple[Task, str], ValueRef] = {}
    new = list(totals)
    last = stages - 1
    operands: list[ValueRef | tuple[ValueRef, ArraySpec]]
    for task in schedule.timetable().order:
        stage, each, kind = task
        flow = flows[stage]
        if kind == "F":
            x = results[Task(stage - 1, each, "F"), "y"] if stage else batch
            y, saved = step.do(f"{stage}/F", stage, [ValueRef(-1, stage), (x, flow)], [flow, flow])
            results |= {(task, "y"): y, (task, "saved"): saved}
        elif kind == "B":
            saved = results[Task(stage, each, "F"), "saved"]
            above = Task(stage + 1, each, "B") if stage < last else Task(stage, each, "F")
            gradient = results[above, "x" if stage < last else "y"]
            operands = [ValueRef(-1, stage), saved, (gradient, flow)]
            if stage in schedule.split:
                x, kept = step.do(f"{stage}/B", stage, operands, [flow, flow])
                results[task, "kept"] = kept
            else:
                operands.append(totals[stage])
                x, totals[stage] = step.do(
                    f"{stage}/B", stage, operands, [flow, params[stage]], donated=(3,)
                )
            results[task, "x"] = x
        elif kind == "W":
            operands = [results[Task(stage, each, "B"), "kept"], totals[stage]]
            (totals[stage],) = step.do(f"{stage}/W", stage, operands, [params[stage]], donated=(1,))
        else:
            operands = [ValueRef(-1, stage), totals[stage]]
            (new[stage],) = step.do(f"{stage}/U", stage, operands, [params[stage]], donated=(0, 1))
    losses = [results[Task(last, each, "F"), "y"] for each in range(microbatches)]
    (loss,) = step.do("loss", last, losses, [flows[last]])
    outputs = [Output(value, spec) for value, spec in zip(new, params, strict=True)]
    outputs.append(Output(loss, flows[last]))
    return step.draft([*params, flows[0]], outputs, tuple(range(stages)))


class _PipelineDraft(Drafting):
    """A step under construction; a computation that is called again is the same one."""

    def __init__(self, name: str, params: Sequence[ArraySpec]) -> None:
        super().__init__(name)
        self._params = params
        self._numbers: dict[str, int] = {}
        """Number of each computation, by what it does."""
        self._specs: dict[ValueRef, ArraySpec] = {}

    def do(
        self,
        what: str,
        stage: int,
        operands: Sequence[ValueRef | tuple[ValueRef, ArraySpec]],
        makes: Sequence[ArraySpec],
        donated: tuple[int, ...] = (),
    ) -> list[ValueRef]:
        """Add a call; an argument comes with the spec in which it is taken, if that may be another one."""
        pairs = [one if isinstance(one, tuple) else (one, self._spec(one)) for one in operands]
        args = [value for value, _ in pairs]
        if (number := self._numbers.get(what)) is not None:
            values = self.call(number, args)
        else:
            self._numbers[what] = len(self.computations)
            place, name = self._params[stage].placement, f"{self.name}/{what}"
            takes = [spec for _, spec in pairs]
            values = self.compute(name, takes, makes, args, placement=place, donated=donated)
        self._specs |= dict(zip(values, makes, strict=True))
        return values

    def _spec(self, value: ValueRef) -> ArraySpec:
        return self._specs[value] if value.node >= 0 else self._params[value.index]
