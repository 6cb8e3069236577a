"""`pw.moe`: a layer of experts that lie on other slices than the rows that they work on.

A call is a part of a program:

1. On the devices of the rows, `route` chooses experts, and makes a `pw.Ragged` for each slice of experts.
2. Its rows that count go to the slice, which applies its experts to them.
3. Of the results those that count come back, and `combine` adds them up.

A slice to which no row goes is skipped (`pw.cond`). Gradients go the same ways backwards.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pw.building.experts import routing
from pw.building.pipelines.stage_trace import outside_of_stage
from pw.client.arrays.island_parts import is_divided, parts_of
from pw.client.arrays.mesh import OwnMesh, default_mesh, mesh_of
from pw.client.arrays.of_jax import own_mesh
from pw.client.arrays.ragged import Ragged
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.equations.calls import program_trace
from pw.client.equations.island_parts import apart, together
from pw.client.functions.cond import cond
from pw.client.functions.jit import jit
from pw.client.functions.program import program
from pw.client.functions.tracebacks import leave_out_runtime
from pw.client.functions.transfer import put
from pw.client.functions.wrapped import name_of, under_jax_trace
from pw.client.keywords import checks_keywords
from pw.client.programs.placing.shardings import sharding_of
from pw.core.errors import ArgumentError, ShardingError

tree_leaves, tree_map = jax.tree_util.tree_leaves, jax.tree_util.tree_map


@checks_keywords
def moe(
    expert: Callable[..., Any], *, devices: Any, top_k: int = 1, capacity_factor: float = 1.25
) -> MixtureOfExperts:
    """Make a layer of experts on their own devices: each row goes to the experts that a router chooses for it.

    `y, balance = layer(params, x, logits)`, in a `pw.program` or alone. Only rows that were chosen travel, and
    only slices with such rows compute. Each group of rows, which is a shard of `x`, has room for `capacity =
    ceil(top_k * rows / experts * capacity_factor)` rows at each expert. Rows beyond that are dropped there:
    they add zero to `y`, so use `x + y`. Earlier rows come first, and first choices before second ones.
    Capacity, weights and `balance` are those of GShard (Lepikhin et al., 2020) and Switch Transformer (Fedus
    et al., 2021).

    Args:
        expert: a JAX function of the parameters of one expert and rows (n, d), row by row. It returns
            (n, e). It sees zeros behind the rows, up to the capacity.
        devices: of the experts: a slice, or a `pw.Mesh`, whose first axis is that of the experts; or a list of
            these, of any islands, each with equally many experts, in this order.
        top_k: how many experts a row goes to. One result is weighted by the probability of its expert,
            several by their probabilities divided by the sum of them.
        capacity_factor: room for rows, relative to that which equal shares need.

    Returns:
        A function of (params, x, logits). `params` is a tree of arrays whose leading axis is that of the
        experts; if `devices` is a list, it is a list of trees, one for each of them. `put` makes them.
        `x` (rows, d) may be split along its rows, also over islands, and `logits` (rows, experts) is what the
        router says. It returns `y` (rows, e), where `x` lies, and `balance`, a float32: the load-balancing
        loss, 1 for equal shares. Add some of it to the loss of the model.

    Raises:
        ArgumentError: `top_k` or `capacity_factor` is not positive; at a call, shapes do not fit together.
        ShardingError: the experts' devices cross islands; at a call, the experts do not divide over the
            devices, or `x` lies on several islands and is not split over them.
    """
    if not callable(expert):
        raise TypeError(f"pw.moe takes the function of one expert, not {expert!r}")
    try:
        count = 0 if isinstance(top_k, bool) else operator.index(top_k)
    except TypeError:
        count = 0
    if count < 1:
        raise ArgumentError(f"top_k is a number of experts, 1 or more, not {top_k!r}")
    try:
        has_room = 0 < capacity_factor < float("inf")
    except TypeError:
        has_room = False
    if not has_room:
        raise ArgumentError(
            f"capacity_factor is a positive number, not {capacity_factor!r}: with 1.0 there is room if all "
            "experts have equal shares"
        )
    is_list = isinstance(devices, (list, tuple))
    places = list(devices) if is_list else [devices]
    if is_list and not places:
        raise ArgumentError("pw.moe takes a list with the devices of at least one expert")
    meshes = [own_mesh(one) or mesh_of(one) for one in places]
    for mesh in meshes:
        if mesh.parts:
            raise ShardingError(
                f"the experts of a pw.moe lie on a mesh over several islands, {mesh!r}; give a list of slices"
            )
    return MixtureOfExperts(expert, tuple(meshes), is_list, count, float(capacity_factor))


@dataclass(frozen=True)
class _Steps:
    """The computations of a call, for rows that lie in one way."""

    route: Any
    combine: Any
    empty: Any
    """Makes results of which no row counts."""
    lie: Ragged
    """Sharding of rows for a slice before they go there."""


class _Assignment(NamedTuple):
    """The parts of `routing.ExpertAssignment` that `combine` needs, with a leading axis for the groups."""

    slots: Any
    choices: Any
    weights: Any


class MixtureOfExperts:
    """A layer of experts; made by `pw.moe`."""

    def __init__(
        self,
        expert: Callable[..., Any],
        meshes: tuple[OwnMesh, ...],
        is_list: bool,
        top_k: int,
        capacity_factor: float,
    ) -> None:
        self._expert = expert
        self._name = name_of(expert)
        self._meshes = meshes
        self._is_list = is_list
        self._top_k = top_k
        self._capacity_factor = capacity_factor
        self._steps: dict[OwnSharding, _Steps] = {}
        self._making = threading.Lock()
        self._apply = tuple(map(self._apply_on, meshes))
        self._alone = program(self._recorded)

    def __repr__(self) -> str:
        return f"<pw.moe {self._name}>"

    def put(self, params: Any) -> Any:
        """Place parameters of all experts on their devices, for calls.

        Args:
            params: a tree of arrays, each with one entry for each expert along its leading axis.

        Raises:
            ArgumentError: the arrays have different numbers of experts.
            ShardingError: the experts do not divide over the devices.
        """
        experts = self._experts_of([params])
        share = experts // len(self._meshes)
        placed = []
        for at, mesh in enumerate(self._meshes):
            own = slice(at * share, (at + 1) * share)
            part = tree_map(operator.itemgetter(own), params)
            placed.append(put(part, sharding=_over_experts(mesh)))
        return placed if self._is_list else placed[0]

    def __call__(self, params: Any, x: Any, logits: Any) -> tuple[Any, Any]:
        """Return `y` and `balance`: see `pw.moe`."""
        try:
            with outside_of_stage() as stage:
                if program_trace() is not None:
                    return self._recorded(params, x, logits, stage)
            if under_jax_trace(tree_leaves((params, x, logits))):
                raise ArgumentError(
                    f"{self!r} was called in a function that JAX traces, and it moves rows between the "
                    "devices of several computations: call it beside pw.jit functions, in a pw.program"
                )
            result: tuple[Any, Any] = self._alone(params, x, logits)
            return result
        except Exception as error:
            leave_out_runtime(error)
            raise

    def _recorded(
        self, params: Any, x: Any, logits: Any, stage: OwnMesh | None = None
    ) -> tuple[Any, Any]:
        """Record a call; in a pipeline, rows lie on the devices of the `stage`."""
        trees = self._trees(params)
        experts = self._experts_of(trees)
        self._check_rows(x, logits, experts)
        placed = [_placed(tree, mesh) for tree, mesh in zip(trees, self._meshes, strict=True)]
        lie = _sharding_of_rows(stage, x, logits)
        if not lie.mesh.parts:
            return self._on_island(placed, x, logits, lie)
        islands = parts_of(lie, x.shape)
        xs, scores = (apart(one, lie) for one in (x, logits))
        results = [
            self._on_island(placed, own, logits, island.sharding)
            for island, own, logits in zip(islands, xs, scores, strict=True)
        ]
        parts, balances = zip(*results, strict=True)
        shape = (x.shape[0], *parts[0].shape[1:])
        rows = [island.shape[0] for island in islands]
        return together(parts, lie, shape), _mean(balances, rows, lie.mesh.parts[0])

    def _on_island(
        self, params: Sequence[Any], x: Any, logits: Any, lie: OwnSharding
    ) -> tuple[Any, Any]:
        """Record a call whose rows lie on one island."""
        steps = self._steps_for(lie)
        rows, is_used, assignment, balance = steps.route(x, logits)
        results = [
            self._applied(at, tree, rows[at], is_used[at], steps) for at, tree in enumerate(params)
        ]
        return steps.combine(results, assignment), balance

    def _applied(self, at: int, params: Any, rows: Ragged, is_used: Any, steps: _Steps) -> Ragged:
        """Apply the experts of a slice, if there are rows for them."""
        output: Ragged = rows

        def apply() -> Ragged:
            nonlocal output
            output = self._apply[at](params, rows)
            return output

        def nothing() -> Ragged:  # no row of it counts
            alike = output.rows.shape == rows.rows.shape and output.rows.dtype == rows.rows.dtype
            if alike:
                return rows
            empty: Ragged = steps.empty(rows, output.rows.shape[-1], output.rows.dtype)
            return empty

        if len(self._meshes) == 1:
            return apply()
        result: Ragged = cond(is_used, apply, nothing, out_shardings=steps.lie)
        return result

    # --- the computations ----------------------------------------------------------------------------

    def _steps_for(self, lie: OwnSharding) -> _Steps:
        with self._making:
            steps = self._steps.get(lie)
            if steps is None:
                steps = self._steps[lie] = self._make_steps(lie)
            return steps

    def _make_steps(self, lie: OwnSharding) -> _Steps:
        """Return the computations for rows that lie so."""
        mesh, own = lie.mesh, lie.spec
        axes = own[0] if own else None
        groups = _size(mesh, axes)
        split, replicated, among = PartitionSpec(axes), PartitionSpec(), PartitionSpec(None, axes)
        slices, top_k, factor = len(self._meshes), self._top_k, self._capacity_factor

        def in_groups(function: Any, in_specs: Any, out_specs: Any) -> Any:
            if groups == 1:
                return function
            return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)

        def route(x: Any, logits: Any) -> Any:
            experts = logits.shape[1]
            share = experts // slices
            rows = x.shape[0] // groups
            capacity = routing.capacity_of(rows, experts, top_k, factor)

            def group(x: Any, logits: Any) -> Any:
                assignment = routing.assign(logits, top_k, capacity)
                sent = [
                    routing.dispatch(x, assignment, at * share, share)[:, None]
                    for at in range(slices)
                ]
                kept = _Assignment(assignment.slots, assignment.choices[None], assignment.weights)
                return sent, assignment.counts[:, None], kept, assignment.balance[None]

            specs = [among] * slices, among, _Assignment(split, split, split), split
            sent, counts, kept, balance = in_groups(group, (split, split), specs)(x, logits)
            counts = counts.reshape(slices, share, groups)
            ragged = [Ragged(rows, own) for rows, own in zip(sent, counts, strict=True)]
            return ragged, [own.any() for own in counts], kept, balance.mean()

        def combine(results: Any, kept: Any) -> Any:
            def group(parts: Any, kept: Any) -> Any:
                together = jnp.concatenate([rows[:, 0] for rows in parts])
                return routing.combine(together, kept.slots, kept.choices[0], kept.weights)

            specs = [among] * slices, _Assignment(split, split, split)
            return in_groups(group, specs, split)([one.rows for one in results], kept)

        def empty(rows: Any, width: int, dtype: Any) -> Any:
            return Ragged(jnp.zeros((*rows.rows.shape[:-1], width), dtype), rows.counts)

        ragged = Ragged(among, replicated)
        kept = _Assignment(split, split, split)
        return _Steps(
            jit(
                route,
                mesh=mesh,
                in_shardings=(split, split),
                out_shardings=([ragged] * slices, replicated, kept, replicated),
            ),
            jit(combine, mesh=mesh, in_shardings=([ragged] * slices, kept), out_shardings=split),
            jit(
                empty,
                mesh=mesh,
                static_argnums=(1, 2),
                in_shardings=(ragged,),
                out_shardings=ragged,
            ),
            Ragged(OwnSharding(mesh, among), OwnSharding(mesh, replicated)),
        )

    def _apply_on(self, mesh: OwnMesh) -> Any:
        """Return the computation of the experts of a slice."""
        expert = self._expert

        def apply(params: Any, received: Ragged) -> Ragged:
            share, groups, capacity, width = received.rows.shape
            rows = received.rows.reshape(share, groups * capacity, width)
            result = jax.vmap(expert)(params, rows)
            if getattr(result, "ndim", 0) != 3 or result.shape[:2] != rows.shape[:2]:
                raise ArgumentError(
                    f"{self!r}: the function of one expert was given rows {rows.shape[1:]} and returned "
                    f"{_described(result)}; it returns an array with one row for each"
                )
            return Ragged(result.reshape(share, groups, capacity, -1), received.counts)

        apply.__name__ = self._name if self._name.isidentifier() else "expert"
        over = PartitionSpec(mesh.axis_names[0])
        ragged = Ragged(over, PartitionSpec())
        return jit(apply, mesh=mesh, in_shardings=(None, ragged), out_shardings=ragged)

    # --- checks --------------------------------------------------------------------------------------

    def _trees(self, params: Any) -> list[Any]:
        if not self._is_list:
            return [params]
        if not isinstance(params, (list, tuple)) or len(params) != len(self._meshes):
            has = (
                f"{len(params)} entries"
                if isinstance(params, (list, tuple))
                else f"a {type(params).__name__}"
            )
            raise ArgumentError(
                f"{self!r} has experts on a list of {len(self._meshes)} slices, so its parameters are a "
                f"list with a tree for each, and not {has}; its method put makes them"
            )
        return list(params)

    def _experts_of(self, trees: Sequence[Any]) -> int:
        """Return the number of all experts, by the leading axes of parameters."""
        sizes = {np.shape(leaf)[:1] for tree in trees for leaf in tree_leaves(tree)}
        if len(sizes) != 1 or () in sizes:
            raise ArgumentError(
                f"{self!r}: each array of the parameters has a leading axis with one entry for each "
                f"expert of its slice, equally many; found {sorted(sizes)}"
            )
        ((count,),) = sizes
        experts = int(count) * len(trees)
        for mesh in self._meshes:
            parts = len(self._meshes) * mesh.shape[mesh.axis_names[0]]
            if experts % parts or not experts:
                raise ShardingError(
                    f"{self!r}: {experts} experts do not divide over {parts} devices; give each equally many"
                )
        return experts

    def _check_rows(self, x: Any, logits: Any, experts: int) -> None:
        sizes = tuple(np.shape(x)), tuple(np.shape(logits))
        if len(sizes[0]) != 2 or sizes[1] != (sizes[0][0], experts) or not sizes[0][0]:
            raise ArgumentError(
                f"{self!r} takes x of the shape (rows, d), with a row or more, and logits (rows, {experts}), "
                f"a score of each row for each expert; x {sizes[0]} and logits {sizes[1]} were given"
            )
        if self._top_k > experts:
            raise ArgumentError(f"{self!r}: top_k={self._top_k}, but there are {experts} experts")


def _mean(balances: Sequence[Any], rows: Sequence[int], mesh: OwnMesh) -> Any:
    """Return the mean of the balances of several islands, which have so many rows."""

    def mean(*balances: Any) -> Any:
        return sum(one * n for one, n in zip(balances, rows, strict=True)) / sum(rows)

    key = ("mean of balances", mesh, *rows)
    compute = mesh.slice.compiled.get_or_make(key, lambda: jit(mean, mesh=mesh))
    return compute(*balances)


def _over_experts(mesh: OwnMesh) -> OwnSharding:
    return OwnSharding(mesh, PartitionSpec(mesh.axis_names[0]))


def _placed(tree: Any, mesh: OwnMesh) -> Any:
    """Return parameters on a mesh: those that lie there as they lie, and others split over its experts."""

    def place(leaf: Any) -> Any:
        sharding = sharding_of(leaf)
        is_there = sharding is not None and sharding.mesh == mesh
        return leaf if is_there else put(leaf, sharding=_over_experts(mesh))

    return tree_map(place, tree)


def _sharding_of_rows(stage: OwnMesh | None, *values: Any) -> OwnSharding:
    """Return how rows lie: as the first of these values that lies on devices, or as a stage says of them."""
    for value in values:
        sharding = sharding_of(value)
        if sharding is None and stage is not None:
            sharding = _constrained(value, stage)
        if sharding is not None:
            lie = OwnSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
            shape = value.shape
            if lie.mesh.parts and not is_divided(parts_of(lie, shape), shape):
                raise ShardingError(
                    f"the rows of a pw.moe lie on a mesh over several islands, {lie.mesh!r}, and are not "
                    f"split over them; split their first dimension over all axes: P({lie.mesh.axis_names})"
                )
            return lie
    return OwnSharding.replicated(stage or default_mesh())


def _constrained(value: Any, stage: OwnMesh) -> OwnSharding | None:
    """Return what `jax.lax.with_sharding_constraint` says of a value in a stage, if that made it."""
    trace = program_trace()
    producer = None if trace is None else trace.producer_of(value)
    if producer is None or producer[0].primitive.name != "sharding_constraint":
        return None
    return OwnSharding(stage, producer[0].params["sharding"].spec)


def _size(mesh: OwnMesh, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(mesh.shape[name] for name in names)


def _described(value: Any) -> str:
    leaves = tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return f"an array {value.shape[1:]}"
    return f"a tree of {len(leaves)} arrays"
