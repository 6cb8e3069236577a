"""The end of a step: each stage's update, and the gradients for users who make their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from pw.building.pipelines.stages import Stage
from pw.building.pipelines.step import Step
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.functions.jit import jit
from pw.client.functions.wrapped import tree_unflatten
from pw.client.programs.placing.shardings import sharding_of


class Optimizer(Protocol):
    """A gradient transformation, as optax has them."""

    def init(self, params: Any) -> Any:
        """Return the first state."""

    def update(self, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Return what to add to the parameters, and the next state."""


def mean(parts: Sequence[Any], count: int, dtype: Any) -> Any:
    """Return the mean gradient of a parameter from the sums of its copies, added in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return (total / count).astype(dtype)


def first_state(optimizer: Optimizer, params: Any, mesh: OwnMesh) -> Any:
    """Return the optimizer's state for parameters on a mesh; what looks like the parameters lies as they do."""
    structure: Any = jax.tree.structure(params)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = jax.eval_shape(optimizer.init, shapes)
    replicated = OwnSharding.replicated(mesh)
    shardings = jax.tree.map(sharding_of, params)

    def is_like(node: Any) -> bool:
        return bool(jax.tree.structure(node) == structure)

    def placed(node: Any) -> Any:
        return shardings if is_like(node) else replicated

    wanted = jax.tree.leaves(jax.tree.map(placed, state, is_leaf=is_like))

    def optimizer_init(params: Any) -> list[Any]:
        return jax.tree.leaves(optimizer.init(params))

    leaves = jit(optimizer_init, mesh=mesh, out_shardings=wanted)(params)
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def update_stage(
    optimizer: Optimizer,
    step: Step,
    stage: Stage,
    mesh: OwnMesh,
    params: Mapping[int, Any],
    tree: Any,
    state: Any,
    count: int,
) -> tuple[dict[int, Any], Any]:
    """Call the update of the parameters that a stage has on a mesh.

    Args:
        optimizer: the transformation.
        step: has the gradient sums.
        stage: the stage.
        mesh: the devices.
        params: the parameters that are updated there, by number.
        tree: their tree structure.
        state: the optimizer's state of these.
        count: the number of microbatches.

    Returns:
        The new parameters by number, and the next state.
    """
    sums = [step.tied(stage.number, number) for number in params]
    leaves, state_tree = jax.tree.flatten(state)

    def update(params: Any, leaves: Any, sums: Any) -> tuple[Any, Any]:
        gradients = [mean(parts, count, p.dtype) for parts, p in zip(sums, params, strict=True)]
        before = tree_unflatten(tree, params)
        updates, after = optimizer.update(
            tree_unflatten(tree, gradients), tree_unflatten(state_tree, leaves), before
        )
        moved = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), before, updates)
        return jax.tree.leaves(moved), jax.tree.leaves(after)

    shardings = [step.param_sharding(stage.number, number) for number in params]
    alike = [[s] * len(parts) for s, parts in zip(shardings, sums, strict=True)]
    update.__name__ = f"{stage.name}_{stage.number}_U"
    moved, after = jit(
        update,
        mesh=mesh,
        in_shardings=(shardings, None, alike),
        out_shardings=(shardings, list(map(sharding_of, leaves))),
        donate_argnums=(0, 1),
    )(list(params.values()), leaves, sums)
    return dict(zip(params, moved, strict=True)), tree_unflatten(state_tree, after)


def stage_gradients(
    step: Step, stage: Stage, mesh: OwnMesh, params: Mapping[int, Any], count: int
) -> dict[int, Any]:
    """Call the function that makes mean gradients of the sums that a stage has on a mesh."""
    sums = [step.tied(stage.number, number) for number in params]
    shardings = [step.param_sharding(stage.number, number) for number in params]
    dtypes = [value.dtype for value in params.values()]

    def gradients(own: Any, copies: Any) -> list[Any]:
        parts = zip(own, copies, dtypes, strict=True)
        return [mean([first, *rest], count, dtype) for first, rest, dtype in parts]

    gradients.__name__ = f"{stage.name}_{stage.number}_gradients"
    own = [first for first, *_ in sums]
    reused = all(one.dtype == dtype for one, dtype in zip(own, dtypes, strict=True))
    results = jit(
        gradients,
        mesh=mesh,
        in_shardings=(
            shardings,
            [[s] * (len(p) - 1) for s, p in zip(shardings, sums, strict=True)],
        ),
        out_shardings=shardings,
        donate_argnums=(0,) if reused else (),
    )(own, [rest for _, *rest in sums])
    return dict(zip(params, results, strict=True))
