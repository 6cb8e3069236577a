"""`pw.pipeline`: a model in stages on several slices, trained step by step as one program.

See `docs/pipelines.md`. The stages are traced (`forms`, `stages`, `cutting`; `choosing` for models without
marks), each becomes a few computations (`gradients`), a schedule orders them (`schedule`, `schedules`), and one
program calls them (`step`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pw.building.pipelines.forms import Listed, Marked, check_floats
from pw.building.pipelines.gradients import Tasks, tasks_of
from pw.building.pipelines.measured import Measured, Names, measured
from pw.building.pipelines.microbatches import Microbatches
from pw.building.pipelines.optimizing import Optimizer, first_state, stage_gradients, update_stage
from pw.building.pipelines.plan import PipelinePlan
from pw.building.pipelines.schedule import Schedule, task_times
from pw.building.pipelines.schedules import named
from pw.building.pipelines.stages import Stage
from pw.building.pipelines.step import Step, StepPlan, by_mesh, placed
from pw.building.pipelines.table import Task
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.of_jax import given_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.functions.argument_errors import naming_state
from pw.client.functions.prefixes import on_mesh
from pw.client.functions.program import program
from pw.client.functions.transfer import put
from pw.client.functions.wrapped import tree_unflatten
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError, ArrayDeleted
from pw.operating.timeline.timeline import Timeline


class Pipeline:
    """A model in stages; made by `pw.pipeline`."""

    def __init__(
        self,
        form: Listed | Marked,
        schedule: str | Schedule,
        microbatches: int,
        optimizer: Optimizer | None,
        recompute: bool,
        timeout: float | None,
    ) -> None:
        self._form = form
        self._asked = schedule
        self.microbatches = microbatches
        self._parts = Microbatches(form.name, microbatches)
        self._names: Names = {}
        """The computations that are tasks; known after a step was traced."""
        self._optimizer = optimizer
        self._recompute = recompute
        self._schedule: Schedule | None = None
        if form.meshes is not None:
            self._schedule = self._schedule_for(form.meshes)
        self._train = program(self._train_step, timeout=timeout)
        self._differentiate = program(self._gradient_step, timeout=timeout)

    def __repr__(self) -> str:
        schedule = self._schedule
        shown = f"{schedule.stages} stages, {schedule.name}" if schedule else f"{self._asked!r}"
        return f"<pw.pipeline {self._form.name}: {shown}, {self.microbatches} microbatches>"

    @property
    def schedule(self) -> Schedule:
        """The schedule; of a function with marks and no `stages` it is known after `init`."""
        if self._schedule is None:
            raise ArgumentError(
                f"how many stages {self._form.name!r} has is not known yet; call init(params, *batch) first"
            )
        return self._schedule

    def init(self, params: Any, *batch: Any) -> tuple[dict[str, Any], ...]:
        """Put parameters on the devices of their stages, and make the optimizer's states there.

        Args:
            params: for a list of stages a tree for each of them; for one function its tree.
            batch: for one function, also a batch, or `jax.ShapeDtypeStruct`s like it.

        Returns:
            The state: for each stage a dict with "params" and, if there is an optimizer, "optimizer". A tied
            parameter is in each of its stages, and in the optimizer's state of the first.
        """
        micro = self._parts.shapes(batch)
        trees = self._form.trees(params, micro)
        numbered = self._form.numbered(trees)
        check_floats(self._form.name, numbered)
        meshes = self._meshes(len(trees))
        if self._schedule is None:
            self._schedule = self._schedule_for(meshes)
        owners = self._form.owners(trees)
        specs = self._form.param_specs(trees)
        homes = (
            [stage.homes for stage in self._stages(params, batch)] if batch else [{}] * len(trees)
        )
        state = []
        for stage, tree in enumerate(trees):
            own = {
                index: put(
                    numbered[owner[0]][owner[1]],
                    sharding=homes[stage].get(index)
                    or self._placed(specs.get((stage, index)), meshes[stage], value),
                )
                for index, value in numbered[stage].items()
                for owner in [owners.get((stage, index), (stage, index))]
            }
            own_params = jax.tree.unflatten(jax.tree.structure(tree), own.values())
            state.append({"params": own_params})
            if self._optimizer is not None:
                mine = {i: value for i, value in own.items() if (stage, i) not in owners}
                lie = {index: value._type.sharding for index, value in mine.items()}
                states = [
                    first_state(self._optimizer, _tree(tree, own, there), mesh)
                    for mesh, there in by_mesh(meshes[stage], mine, lie).items()
                ]
                state[-1]["optimizer"] = _one_or_all(states)
        return tuple(state)

    def __call__(
        self, state: Sequence[dict[str, Any]], *batch: Any, key: Any = None
    ) -> tuple[tuple[dict[str, Any], ...], Any]:
        """Run one training step; returns the next state and the mean loss, as futures.

        Args:
            state: of `init`, or of the step before; it is donated.
            batch: trees of arrays whose first dimension is divided into microbatches; the first goes to the
                first stage, the others to the last (of one function: to the stages that use them).
            key: a PRNG key, for stage functions with a parameter `key`. A stage gets
                `fold_in(fold_in(key, microbatch), stage)`, one function `fold_in(key, microbatch)`,
                whatever the schedule.

        Raises:
            ArgumentError: the arguments do not fit the stages, or the stages do not fit each other; nothing has
                been launched then.
        """
        if self._optimizer is None:
            raise ArgumentError(
                f"{self!r} has no optimizer; pass optimizer= (as optax.adam(1e-3)), or call gradients()"
            )
        wanted = {"params", "optimizer"}
        if (self._schedule and len(state) != self._schedule.stages) or any(
            not isinstance(stage, dict) or set(stage) != wanted for stage in state
        ):
            raise ArgumentError(
                f"{self!r} takes the state that init() or the step before returned: for each stage a dict with "
                "'params' and 'optimizer'"
            )
        after: tuple[tuple[dict[str, Any], ...], Any]
        try:
            after = self._train(tuple(state), self._parts.divided(batch), self._checked_key(key))
        except ArrayDeleted as error:
            raise naming_state(error, repr(self), state) from None
        return after

    def gradients(self, params: Any, *batch: Any, key: Any = None) -> tuple[Any, Any]:
        """Compute the mean loss and its gradients by the schedule, without an update; returns both as futures.

        Args:
            params: in the form that `init` takes, or as `params(state)` returns them.
            batch, key: as in a step.
        """
        result: tuple[Any, Any] = self._differentiate(
            params, self._parts.divided(batch), self._checked_key(key)
        )
        return result

    def params(self, state: Sequence[dict[str, Any]]) -> Any:
        """Return the parameters of a state in the form that `init` takes."""
        return self._form.user_params([stage["params"] for stage in state])

    def unpipelined(self, params: Any, *batch: Any, key: Any = None) -> Any:
        """Return the loss as plain JAX computes it, without stages: what a pipeline is compared with.

        It can be differentiated and compiled by JAX. The gradient of a tied parameter is that of its copy
        in the first stage.
        """
        total: Any = 0.0
        for number in range(self.microbatches):
            micro = jax.tree.map(lambda leaf: self._parts.part(leaf, number), batch)  # noqa: B023
            total = total + self._form.loss(params, micro, key, number)
        return total / self.microbatches

    def plan(self, params: Any, *batch: Any) -> PipelinePlan:
        """Return what each stage costs, has and sends; prints as a table. Nothing runs.

        Args:
            params, batch: as for `gradients`, or `jax.ShapeDtypeStruct`s like them.
        """
        return PipelinePlan.of(self._form.name, self._stages(params, batch))

    def activation_bytes(self, params: Any, *batch: Any) -> list[int]:
        """Return the most that each stage keeps of forward passes for its backward passes, in bytes.

        It is what one microbatch keeps, times the most microbatches at a time by the schedule, on all devices
        of the stage together. Parameters, gradients and temporaries are not in it.

        Args:
            params, batch: as for `gradients`, or `jax.ShapeDtypeStruct`s like them.
        """
        stages = self._stages(params, batch)
        if self._schedule is None:
            self._schedule = self._schedule_for([stage.mesh for stage in stages])
        each = [self._tasks(stage, self._schedule).kept_bytes() for stage in stages]
        most = [max(steps) for steps in self._schedule.activations(task_times(self._schedule))]
        return [size * count for size, count in zip(each, most, strict=True)]

    def measured(self, timeline: Timeline) -> Measured:
        """Return the bubble, the tasks' times and the kept activations of the steps in a timeline.

            with pw.trace(None) as timeline:
                state, loss = step(state, *batch)
                jax.block_until_ready(state)
            print(step.measured(timeline))

        It counts the whole steps of all clients that have stages of the same names.

        Args:
            timeline: of `pw.trace`, after its block.

        Raises:
            ArgumentError: the timeline shows no whole step, or no step was called.
        """
        if not self._names:
            raise ArgumentError(
                f"{self!r} has done no step; call one inside of the block of pw.trace"
            )
        return measured(self.schedule, self._names, timeline)

    def _stages(self, params: Any, batch: Sequence[Any]) -> list[Stage]:
        """Trace the stages, for shapes of parameters and of a batch."""
        micro = self._parts.shapes(batch)
        trees = self._form.trees(params, micro)
        key = jax.eval_shape(lambda: jax.random.key(0)) if self._form.takes_key else None
        return self._form.trace(trees, micro, key)

    # --- the program ---------------------------------------------------------------------------------

    def _train_step(self, state: Any, batch: Any, key: Any) -> Any:
        assert self._optimizer is not None
        trees = [stage["params"] for stage in state]
        plan, numbered = self._planned(trees, batch, key)
        plan.check_state(numbered)
        step = Step(plan, numbered, jax.tree.leaves(batch), key)
        params: list[dict[int, Any]] = [{} for _ in trees]
        optimizer: list[Any] = [None] * len(trees)

        def update(number: int) -> None:
            groups = step.updated(number)
            before = state[number]["optimizer"]
            states = before if len(groups) > 1 else [before]
            after = []
            for (mesh, own), each in zip(groups.items(), states, strict=True):
                tree = jax.tree.structure(_tree(trees[number], numbered[number], own))
                moved, state_after = update_stage(
                    self._optimizer,  # type: ignore[arg-type]
                    step,
                    plan.stages[number],
                    mesh,
                    own,
                    tree,
                    each,
                    self.microbatches,
                )
                params[number] |= moved
                after.append(state_after)
            optimizer[number] = _one_or_all(after)

        loss = step.run(update)
        after = self._with_copies(plan, step, trees, params)
        new = zip(after, optimizer, strict=True)
        return tuple({"params": tree, "optimizer": own} for tree, own in new), loss

    def _gradient_step(self, params: Any, batch: Any, key: Any) -> Any:
        micro = self._parts.shapes(batch)
        trees = self._form.trees(params, micro)
        plan, numbered = self._planned(trees, batch, key)
        step = Step(plan, numbered, jax.tree.leaves(batch), key)
        by_stage: list[dict[int, Any]] = [{} for _ in trees]

        def update(number: int) -> None:
            for mesh, own in step.updated(number).items():
                stage = plan.stages[number]
                by_stage[number] |= stage_gradients(step, stage, mesh, own, self.microbatches)

        loss = step.run(update)
        return loss, self._form.user_params(self._with_copies(plan, step, trees, by_stage))

    def _with_copies(
        self, plan: StepPlan, step: Step, trees: Sequence[Any], gradients: Sequence[dict[int, Any]]
    ) -> list[Any]:
        """Return a tree for each stage, with what the owners of tied parameters have made."""
        for (stage, index), (owner, at) in plan.owner.items():
            gradients[stage][index] = put(
                gradients[owner][at], sharding=step.param_sharding(stage, index)
            )
        return [
            tree_unflatten(jax.tree.structure(tree), [own[index] for index in sorted(own)])
            for tree, own in zip(trees, gradients, strict=True)
        ]

    def _planned(
        self, trees: Sequence[Any], batch: Sequence[Any], key: Any
    ) -> tuple[StepPlan, list[dict[int, Any]]]:
        """Trace the stages, and plan the step."""
        form = self._form
        numbered = form.numbered(trees)
        check_floats(form.name, numbered)
        micro = self._parts.shapes(batch)
        described = None if key is None else jax.ShapeDtypeStruct(key.shape, key.dtype)
        stages = form.trace(trees, micro, described)
        if self._schedule is None:
            self._schedule = self._schedule_for([stage.mesh for stage in stages])
        schedule = self._schedule
        tasks = [self._tasks(stage, schedule) for stage in stages]
        self._names = {
            piece.name: (stage.number, kind)
            for stage, own in zip(stages, tasks, strict=True)
            for kind, piece in own.pieces.items()
        }
        params, xs, parts = form.specs(trees, stages, micro)
        order = schedule.timetable(task_times(schedule)).order
        owners = form.owners(trees)
        plan = StepPlan(stages, tasks, schedule, order, params, xs, parts, owners, form.folds_stage)
        return plan, numbered

    def _tasks(self, stage: Stage, schedule: Schedule) -> Tasks:
        last = stage.number == schedule.stages - 1
        return tasks_of(
            stage,
            is_last=last,
            split=stage.number in schedule.split,
            recompute=self._recompute,
            fuse=last and (self._recompute or _backward_follows(schedule)),
        )

    # --- arguments -----------------------------------------------------------------------------------

    def _meshes(self, count: int) -> list[OwnMesh]:
        return [self._form.mesh(number, count) for number in range(count)]

    def _schedule_for(self, meshes: Sequence[OwnMesh]) -> Schedule:
        """Return the schedule for stages on these meshes; checked."""
        places = list(dict.fromkeys(mesh.placement for mesh in meshes))
        groups = [places.index(mesh.placement) for mesh in meshes]
        if isinstance(self._asked, str):
            schedule = named(self._asked, groups, self.microbatches)
            schedule.check()
            return schedule
        schedule = self._asked
        schedule.check()
        if schedule.stages != len(meshes):
            raise ArgumentError(
                f"the schedule {schedule.name!r} has {schedule.stages} stages, and the pipeline {len(meshes)}"
            )
        if schedule.microbatches != self.microbatches:
            raise ArgumentError(
                f"the schedule {schedule.name!r} has {schedule.microbatches} microbatches, and microbatches= "
                f"says {self.microbatches}"
            )
        for stage, group in enumerate(groups):
            if [groups[each] == group for each in range(schedule.stages)] != [
                schedule.group_of[each] == schedule.group_of[stage]
                for each in range(schedule.stages)
            ]:
                raise ArgumentError(
                    f"the schedule {schedule.name!r} has stage {stage} in row {schedule.group_of[stage]}, but "
                    "stages of one row run on the same devices, and other stages on others; see meshes="
                )
        return schedule

    def _placed(self, wanted: Any, mesh: OwnMesh, value: Any) -> OwnSharding:
        if wanted is not None:
            return on_mesh(mesh, wanted)
        return placed(value, None, mesh)

    def _checked_key(self, key: Any) -> Any:
        if (key is None) == self._form.takes_key:
            takes = "takes" if key is None else "does not take"
            raise ArgumentError(
                f"{self._form.name!r} {takes} a PRNG key: "
                + ("pass key=" if key is None else "no stage function has a parameter 'key'")
            )
        return key


def _one_or_all(states: Sequence[Any]) -> Any:
    """Return the optimizer's state of a stage: a tuple if its parameters lie on several meshes."""
    return states[0] if len(states) == 1 else tuple(states)


def _tree(tree: Any, all_leaves: Mapping[int, Any], own: Mapping[int, Any]) -> Any:
    """Return the tree of a stage's parameters with only some of them."""
    kept = [own.get(index) for index in all_leaves]
    return tree_unflatten(jax.tree.structure(tree), kept)


def _backward_follows(schedule: Schedule) -> bool:
    """Whether the last stage does each microbatch's backward pass right after its forward pass."""
    last = schedule.stages - 1
    row = [task for task in schedule.rows[schedule.group_of[last]] if task.kind != "U"]
    return all(
        index + 1 < len(row) and row[index + 1] == Task(last, task.microbatch, "B")
        for index, task in enumerate(row)
        if task.stage == last and task.kind == "F"
    )


@checks_keywords
def pipeline(
    model: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule = "1f1b",
    meshes: Sequence[jax.sharding.Mesh] | None = None,
    in_shardings: Any = None,
    optimizer: Optimizer | None = None,
    tied: Sequence[Sequence[tuple[Any, ...]]] = (),
    recompute: bool = False,
    timeout: float | None = None,
) -> Pipeline:
    """Train a model in stages on several slices, of any islands, as one program.

    A step divides a batch into microbatches. Each goes forward through the stages, and its gradients go
    back; stages work on different microbatches at the same time, in the order of the schedule. Loss and
    gradients are those of the whole model, up to the rounding of sums.

    Args:
        model: a list of functions, plain ones or of `pw.jit`. The first takes (params, inputs), the others
            (params, x) with what the one before returns, and the last one also the further parts of the batch;
            it returns the loss, the mean over a microbatch. Or one function of (params, *batch) that returns
            the loss; it is cut where it calls `pw.stage_boundary`, or, without such calls, where stages cost
            alike.
        stages: into how many stages one function without marks is cut.
        microbatches: into how many parts a batch is divided, by rows; a schedule of your own says it too.
        schedule: "gpipe", "1f1b", "interleaved", "zero-bubble", or a `pw.Schedule`.
        meshes: a mesh for each stage. If there are fewer, the stages take them in turn, so that several
            stages run on one slice. `pw.jit` functions with a mesh need none.
        in_shardings: as for `pw.jit`: of the parameters, of what a stage takes, and of further parts of the
            batch (the last entry stands for all that follow). With None, parameters and batches are replicated,
            and what comes from another stage keeps its PartitionSpec. `pw.jit` functions have their own.
        optimizer: an optax transformation, or an object with such `init` and `update`; each stage has a
            state of its own, so a norm over all gradients is one over a stage's.
        tied: groups of parameters that are one weight in several stages, as paths (stage, key, ...): their
            gradients are added, the first stage's optimizer updates it, and the others get a copy. Of one
            function, parameters that several stages use are tied by themselves.
        recompute: keep only the inputs of a stage's forward pass, and compute it again in the backward pass.
            With False, keep what the backward pass needs (`jax.checkpoint` inside of a stage changes that).
        timeout: seconds that a step may take, as for `pw.program`.

    Raises:
        ArgumentError: stages, meshes and schedule do not fit together.

    Methods: `init` makes the state, a call is a step, `gradients` gives loss and gradients, `schedule` can
    be printed.
    """
    count = microbatches
    if isinstance(schedule, Schedule) and count is None:
        count = schedule.microbatches
    if count is None or int(count) != count or count < 1:
        raise ArgumentError(
            f"pw.pipeline needs microbatches=, a positive number of them, not {count!r}"
        )
    if stages is not None and (not isinstance(stages, int) or stages < 1):
        raise ArgumentError(f"stages= is how many stages there are, not {stages!r}")
    own = None if meshes is None else list(map(given_mesh, meshes))
    if callable(model):
        if tied:
            raise ArgumentError(
                "tied= is for lists of stages; parameters that several stages of one function use are tied by "
                "themselves"
            )
        form: Listed | Marked = Marked(model, own, in_shardings, stages)
    else:
        functions = list(model)
        wrong = next((one for one in functions if not callable(one)), None)
        if not functions or wrong is not None:
            raise ArgumentError(
                f"pw.pipeline takes functions, not {wrong if functions else model!r}"
            )
        if stages is not None and stages != len(functions):
            raise ArgumentError(
                f"stages= says {stages}, and the list has {len(functions)} stage functions; leave out stages="
            )
        form = Listed(functions, own, in_shardings, tied)
    return Pipeline(form, schedule, int(count), optimizer, recompute, timeout)
