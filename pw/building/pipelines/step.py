"""`Step`: writes one training step as calls of `pw.jit` functions, in the order of a schedule.

It runs while `pw.program` traces, so it sees shapes and shardings only. The transfers between stages
follow from where the functions run. The order of the calls on each slice is the order of the schedule's row,
and lowering keeps it (`pw.core.programs.segments`).

Names of values are those of `pw.building.pipelines.stages`. `("x", i)` of a stage is `("y", i)` of the stage
before, and `("gy", i)`, the gradient of its result, is `("gx", i)` of the next stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pw.building.pipelines.gradients import Tasks, total_dtype
from pw.building.pipelines.schedule import Schedule
from pw.building.pipelines.segments import Segments, StageSegment, has_calls
from pw.building.pipelines.stages import Stage
from pw.building.pipelines.table import Task
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.equations.graph import Name, StagePiece
from pw.client.functions.jit import jit
from pw.client.functions.prefixes import on_mesh
from pw.client.programs.placing.shardings import sharding_of
from pw.core.errors import ArgumentError

Slot = tuple[int, int]
"""A parameter: its stage, and its number there."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A traced model, its schedule, and where everything lies."""

    stages: Sequence[Stage]
    tasks: Sequence[Tasks]
    schedule: Schedule
    order: Sequence[Task]
    param_specs: Mapping[Slot, Any]
    """The user's sharding of each parameter, or None."""
    x_specs: Mapping[Slot, Any]
    batch_specs: Mapping[Slot, Any]
    owner: Mapping[Slot, Slot]
    """Parameter that is updated, for each copy of a tied parameter."""
    folds_stage: bool
    """Whether the key of a microbatch is folded with the number of the stage, too."""

    def mesh(self, stage: int) -> OwnMesh:
        """The devices of a stage."""
        return self.stages[stage].mesh

    def check_state(self, params: Sequence[Mapping[int, Any]]) -> None:
        """Raise ArgumentError unless the parameters of experts lie on their devices."""
        for stage, own in zip(self.stages, params, strict=True):
            for number, home in stage.homes.items():
                lies = sharding_of(own[number])
                if lies is not None and lies.mesh != home.mesh:
                    raise ArgumentError(
                        f"stage {stage.number} ({stage.name!r}) has experts on {home.mesh!r}, whose parameters "
                        f"lie on {lies.mesh!r} in this state; make it with init(params, *batch)"
                    )


class Step:
    """One step under construction."""

    def __init__(
        self, plan: StepPlan, params: Sequence[Mapping[int, Any]], batch: Sequence[Any], key: Any
    ) -> None:
        self._plan = plan
        self._params = params
        self._values: defaultdict[tuple[int, int], dict[Name, Any]] = defaultdict(dict)
        """Values of each stage and microbatch, by name."""
        self._segments: dict[tuple[int, str], Segments | None] = {}
        """The parts of tasks with calls on other devices; None for others."""
        self._compiled: dict[tuple[int, str], Any] = {}
        self.totals: list[dict[int, Any]] = []
        """Sums of the gradients of parameters, for each stage."""
        for number in range(len(plan.stages)):
            self._prepare(number, batch, key)

    def run(self, update: Callable[[int], None]) -> Any:
        """Call the functions of all tasks; `update` those of an update. Returns the mean loss."""
        plan = self._plan
        waiting = {task.stage: self._done_before(task.stage) for task in plan.order}
        done: set[Task] = set()
        late = []
        for task in plan.order:
            if task.kind != "U":
                self._do(task)
                done.add(task)
            elif waiting[task.stage] <= done:
                update(task.stage)
            else:  # a copy of a tied parameter lies on a stage that is not finished
                late.append(task.stage)
        for stage in late:
            update(stage)
        return self._loss()

    def _done_before(self, stage: int) -> set[Task]:
        """Return the tasks whose gradients an update takes."""
        schedule = self._plan.schedule
        copies = {slot[0] for slot, owner in self._plan.owner.items() if owner[0] == stage}
        return {
            needed for each in (stage, *copies) for needed in schedule.needs(Task(each, -1, "U"))
        }

    def param_sharding(self, stage: int, number: int) -> OwnSharding:
        """Return how a parameter lies: on its stage's devices, or where the experts are whose it is."""
        plan, mesh = self._plan, self._plan.mesh(stage)
        home = plan.stages[stage].homes.get(number)
        return home or placed(
            self._params[stage][number], plan.param_specs.get((stage, number)), mesh
        )

    def updated(self, stage: int) -> dict[OwnMesh, dict[int, Any]]:
        """Return the parameters that are updated in a stage, by the devices on which they lie."""
        owner = self._plan.owner
        own = {n: value for n, value in self._params[stage].items() if (stage, n) not in owner}
        return self._by_mesh(stage, own)

    def _by_mesh(self, stage: int, params: Mapping[int, Any]) -> dict[OwnMesh, dict[int, Any]]:
        lie = {number: self.param_sharding(stage, number) for number in params}
        return by_mesh(self._plan.mesh(stage), params, lie)

    def tied(self, stage: int, number: int) -> list[Any]:
        """Return the gradient sums of a parameter: its own, and those of its copies in later stages."""
        copies = [slot for slot, owner in self._plan.owner.items() if owner == (stage, number)]
        slots = [(stage, number), *sorted(copies)]
        return [self.totals[at].pop(each) for at, each in slots]

    def _prepare(self, number: int, batch: Sequence[Any], key: Any) -> None:
        """Divide a stage's part of the batch, fold the key, and make empty gradient sums."""
        plan, stage = self._plan, self._plan.stages[number]
        mesh, count = stage.mesh, plan.schedule.microbatches
        used = {name for piece in plan.tasks[number].pieces.values() for name in piece.takes}
        leaves = sorted(index for kind, index in used if kind == "batch")
        rows = [_spec(plan.batch_specs.get((number, index)), mesh) for index in leaves]
        # Values of this process are divided before they come here.
        divided = [sharding_of(batch[index]) is None for index in leaves]
        groups = self._by_mesh(number, self._params[number])
        params = groups.pop(mesh, {})
        with_key = key is not None and any(kind == "key" for kind, _ in used)

        def prepare(parts: Sequence[Any], key: Any) -> Any:
            stacks = [
                part if is_divided else part.reshape(count, -1, *part.shape[1:])
                for part, is_divided in zip(parts, divided, strict=True)
            ]
            micro = [[part[index] for part in stacks] for index in range(count)]
            keys = [] if key is None else list(jax.lax.map(partial(fold, key), jnp.arange(count)))
            return micro, keys, zeros(params)

        def zeros(params: Mapping[int, Any]) -> list[Any]:
            return [jnp.zeros(p.shape, total_dtype(p.dtype)) for p in params.values()]

        def fold(key: Any, index: Any) -> Any:
            folded = jax.random.fold_in(key, index)
            return jax.random.fold_in(folded, number) if plan.folds_stage else folded

        replicated = OwnSharding.replicated(mesh)
        batch_shardings = [
            OwnSharding(mesh, PartitionSpec(None, *row)) if is_divided else OwnSharding(mesh, row)
            for row, is_divided in zip(rows, divided, strict=True)
        ]
        prepare.__name__ = f"{stage.name}_{number}_begin"
        micro, keys, sums = jit(
            prepare,
            mesh=mesh,
            in_shardings=(batch_shardings, replicated),
            out_shardings=(
                [[OwnSharding(mesh, row) for row in rows] for _ in range(count)],
                [replicated] * (count if with_key else 0),
                [self.param_sharding(number, index) for index in params],
            ),
        )([batch[index] for index in leaves], key if with_key else None)
        totals = dict(zip(params, sums, strict=True))
        for far, own in groups.items():
            lie = [self.param_sharding(number, index) for index in own]
            empty = jit(partial(zeros, own), mesh=far, out_shardings=lie)
            totals.update(zip(own, empty(), strict=True))
        self.totals.append(totals)
        for index in range(count):
            values = self._values[number, index]
            values |= {("batch", at): leaf for at, leaf in zip(leaves, micro[index], strict=True)}
            if with_key:
                values["key", 0] = keys[index]

    def _do(self, task: Task) -> None:
        """Call the function of a forward or backward task."""
        key = task.stage, task.kind
        piece = self._plan.tasks[task.stage].pieces.get(task.kind)
        if piece is None:
            return
        values = self._values[task.stage, task.microbatch]
        operands = [self._look(task, name) for name in piece.takes]
        if key not in self._segments:
            self._segments[key] = self._divided(task, piece) if has_calls(piece) else None
        segments = self._segments[key]
        if segments is None:
            segment = StageSegment(piece, self._plan.mesh(task.stage))
            results: Sequence[Any] = self._call(task, segment, operands)
        else:
            results = segments(operands, partial(self._call, task))
        for name, result in zip(piece.gives, results, strict=True):
            if name[0] == "total":
                self.totals[task.stage][name[1]] = result
            else:
                values[name] = result

    def _look(self, task: Task, name: Name) -> Any:
        """Return a value that a task takes."""
        stage, microbatch, _ = task
        kind, index = name
        if kind == "param":
            return self._params[stage][index]
        if kind == "total":
            return self.totals[stage][index]
        if kind == "x":
            return self._values[stage - 1, microbatch]["y", index]
        if kind == "gy":
            return self._values[stage + 1, microbatch]["gx", index]
        return self._values[stage, microbatch][name]

    def _divided(self, task: Task, piece: StagePiece) -> Segments:
        """Return the parts of a task with calls on other devices."""
        stage, lie = self._plan.mesh(task.stage), {}
        for name in piece.takes:
            kind, index = name
            if kind in ("param", "total"):
                lie[name] = self.param_sharding(task.stage, index).mesh
            elif kind in ("x", "gy"):
                lie[name] = stage
            else:
                sharding = sharding_of(self._look(task, name))
                lie[name] = stage if sharding is None else sharding.mesh
        return Segments(piece, stage, lie)

    def _call(self, task: Task, segment: StageSegment, operands: Sequence[Any]) -> Sequence[Any]:
        """Call a computation of a task."""
        key = task.stage, segment.piece.name
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(task, segment, operands)
        results: Sequence[Any] = compiled(*operands)
        return results

    def _compile(self, task: Task, segment: StageSegment, operands: Sequence[Any]) -> Any:
        """Compile a computation for values that lie as the `operands`."""
        stage, piece, mesh = task.stage, segment.piece, segment.mesh
        takes = [
            self._operand_sharding(task, name, value)
            for name, value in zip(piece.takes, operands, strict=True)
        ]
        donated = [at for at, (kind, _) in enumerate(piece.takes) if kind == "total"]
        gives: list[Any] = []
        for kind, index in piece.gives:
            if kind == "total":
                gives.append(self.param_sharding(stage, index))
            elif kind == "gx":
                gives.append(
                    self._operand_sharding(task, ("x", index), self._look(task, ("x", index)))
                )
            else:
                gives.append(None)
        return jit(
            piece.function(),
            mesh=mesh,
            in_shardings=tuple(map(partial(_there, mesh), takes)),
            out_shardings=list(map(partial(_there, mesh), gives)),
            donate_argnums=donated,
        )

    def _operand_sharding(self, task: Task, name: Name, value: Any) -> OwnSharding | None:
        """Return the sharding in which a task takes a value."""
        kind, index = name
        plan, mesh = self._plan, self._plan.mesh(task.stage)
        if kind == "param":
            return self.param_sharding(task.stage, index)
        if kind == "x":
            return placed(value, plan.x_specs.get((task.stage, index)), mesh)
        if kind == "gy":  # as the value whose gradient it is
            return sharding_of(self._values[task.stage, task.microbatch]["y", index])
        return None

    def _loss(self) -> Any:
        """Return the mean of the microbatches' losses, added in their order."""
        last = len(self._plan.stages) - 1
        count = self._plan.schedule.microbatches
        losses = [self._values[last, index]["y", 0] for index in range(count)]

        def loss(losses: Sequence[Any]) -> Any:
            total = losses[0]
            for one in losses[1:]:
                total = total + one
            return total / count

        return jit(loss, mesh=self._plan.mesh(last))(losses)


def by_mesh(
    stage: OwnMesh, params: Mapping[int, Any], lie: Mapping[int, OwnSharding]
) -> dict[OwnMesh, dict[int, Any]]:
    """Return parameters by the devices on which they lie; those of a stage, if there are none."""
    groups: defaultdict[OwnMesh, dict[int, Any]] = defaultdict(dict)
    for number, value in params.items():
        groups[lie[number].mesh][number] = value
    return dict(groups) or {stage: {}}


def _there(mesh: OwnMesh | None, sharding: OwnSharding | None) -> OwnSharding | None:
    """Return a sharding if it is over this mesh; values of others move as they are."""
    return sharding if sharding is not None and sharding.mesh == mesh else None


def placed(value: Any, wanted: Any, mesh: OwnMesh) -> OwnSharding:
    """Return how a value lies on a mesh: as wanted, or where it lies there, or as on the mesh it comes from."""
    if wanted is not None:
        return on_mesh(mesh, wanted)
    sharding = sharding_of(value)
    if sharding is None:
        return OwnSharding.replicated(mesh)
    if sharding.mesh == mesh:
        return sharding
    entries = [
        entry if _fits(entry, size, mesh) else None
        for entry, size in zip(sharding.spec, value.shape, strict=False)
    ]
    return OwnSharding(mesh, PartitionSpec(*entries))


def _fits(entry: Any, size: int, mesh: OwnMesh) -> bool:
    """Whether a mesh has the axes of one dimension's entry, and they divide its size."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    parts = 1
    for axis in axes:
        parts *= mesh.shape.get(axis, size + 1)
    return size % parts == 0


def _spec(wanted: Any, mesh: OwnMesh) -> PartitionSpec:
    return PartitionSpec() if wanted is None else on_mesh(mesh, wanted).spec
