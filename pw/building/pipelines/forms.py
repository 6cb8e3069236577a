"""The two forms of a model: a list of stage functions, and one function that is cut.

Both give the stages of a traced model, and say which leaf of the user's parameters is which parameter
("param", i) of which stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from pw.building.pipelines.choosing import Cuts, choose
from pw.building.pipelines.cutting import cut_stages
from pw.building.pipelines.rows import Rows, joined, rows_of, shape_of
from pw.building.pipelines.stages import Stage, described, inner, is_float, takes_key, trace_stages
from pw.client.arrays.mesh import OwnMesh
from pw.client.equations.graph import Graph
from pw.client.functions.function import JitFunction
from pw.client.functions.prefixes import spread
from pw.client.functions.wrapped import name_of
from pw.core.errors import ArgumentError

Slot = tuple[int, int]
Specs = dict[Slot, Any]
"""The user's sharding, or None, of value i of a stage."""


def shapes(tree: Any) -> Any:
    """Return the shapes and dtypes of a tree of values."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


class Listed:
    """A model that is a list of stage functions, with one tree of parameters for each.

    Args:
        functions: the stages.
        meshes: where they run.
        in_shardings: as for `pw.jit`, of the plain functions among them.
        tied: groups of paths (stage, key, ...) of parameters that are one weight.
    """

    folds_stage = True

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        meshes: Sequence[OwnMesh] | None,
        in_shardings: Any,
        tied: Sequence[Sequence[tuple[Any, ...]]],
    ) -> None:
        self._functions = list(functions)
        self._in_shardings = in_shardings
        self._tied = [sorted(group, key=lambda path: path[0]) for group in tied]
        self.name = "pipeline"
        self.takes_key = any(map(takes_key, self._functions))
        self.meshes = [self._mesh(number, meshes) for number in range(len(self._functions))]

    def mesh(self, number: int, count: int) -> OwnMesh:
        """Return the devices of a stage."""
        return self.meshes[number]

    def _mesh(self, number: int, meshes: Sequence[OwnMesh] | None) -> OwnMesh:
        function, count = self._functions[number], len(self._functions)
        if isinstance(function, JitFunction) and function._mesh is not None:
            return function._mesh
        if not meshes:
            raise ArgumentError(
                f"stage {number} ({name_of(function)!r}) has no devices: pass meshes=, or "
                f"pw.jit({name_of(function)}, mesh=mesh)"
            )
        return mesh_of(meshes, number, count)

    def trees(self, params: Any, batch: Sequence[Any]) -> list[Any]:
        """Return the parameters of each stage."""
        trees = list(params) if isinstance(params, (list, tuple)) else None
        if trees is None or len(trees) != len(self._functions):
            count = type(params).__name__ if trees is None else f"{len(trees)} trees"
            raise ArgumentError(
                f"the pipeline has {len(self._functions)} stages and takes as many trees of parameters, in "
                f"a list or tuple, not {count}"
            )
        return trees

    def user_params(self, trees: Sequence[Any]) -> Any:
        """Return the parameters in the user's form."""
        return tuple(trees)

    def numbered(self, trees: Sequence[Any]) -> list[dict[int, Any]]:
        """Return the leaves of each stage's tree by their numbers."""
        return [dict(enumerate(jax.tree.leaves(tree))) for tree in trees]

    def trace(self, trees: Sequence[Any], batch: Sequence[Any], key: Any) -> list[Stage]:
        """Trace the stages for a microbatch."""
        return trace_stages(self._functions, self.meshes, shapes(list(trees)), batch, key)

    def owners(self, trees: Sequence[Any]) -> dict[Slot, Slot]:
        """Return for each copy of a tied parameter the one that is updated: that of the first stage."""
        owners: dict[Slot, Slot] = {}
        for group in self._tied:
            slots = [self._slot(trees, path) for path in group]
            leaves = [jax.tree.leaves(trees[stage])[index] for stage, index in slots]
            if len({(tuple(leaf.shape), leaf.dtype) for leaf in leaves}) > 1:
                raise ArgumentError(
                    f"the parameters {list(group)} are tied, but are {described(leaves)}"
                )
            owners |= dict.fromkeys(slots[1:], slots[0])
        return owners

    def _slot(self, trees: Sequence[Any], path: tuple[Any, ...]) -> Slot:
        stage, *keys = path
        for index, (own, _) in enumerate(jax.tree_util.tree_flatten_with_path(trees[stage])[0]):
            if [_plain(key) for key in own] == keys:
                return stage, index
        raise ArgumentError(
            f"tied= has {path!r}, but stage {stage} has no such parameter; a path is (stage, key, ...)"
        )

    def specs(
        self, trees: Sequence[Any], stages: Sequence[Stage], batch: Sequence[Any]
    ) -> tuple[Specs, Specs, Specs]:
        """Return the user's shardings of parameters, of what stages take, and of parts of the batch."""
        xs: Specs = {}
        parts: Specs = {}
        for number, stage in enumerate(stages):
            wanted = self._entries(number, len(batch) - 1 if number == len(stages) - 1 else 0)
            what = f"in_shardings of stage {number} ({stage.name!r})"
            operand = stage.x if number else batch[0]
            for index, spec in enumerate(spread(wanted[1], operand, what)):
                (xs if number else parts)[number, index] = spec
            if number == len(stages) - 1:
                rest = spread(tuple(wanted[2:]), tuple(batch[1:]), what)
                first = len(jax.tree.leaves(batch[0]))
                parts |= {(number, first + index): spec for index, spec in enumerate(rest)}
        return self.param_specs(trees), xs, parts

    def param_specs(self, trees: Sequence[Any]) -> Specs:
        """Return the user's shardings of parameters."""
        specs: Specs = {}
        for number, tree in enumerate(trees):
            what = f"in_shardings of stage {number} ({name_of(self._functions[number])!r})"
            entries = enumerate(spread(self._entries(number, 0)[0], tree, what))
            specs |= {(number, index): spec for index, spec in entries}
        return specs

    def _entries(self, number: int, more: int) -> list[Any]:
        """Return the entry for each argument of a stage: the last one stands for all that follow."""
        function = self._functions[number]
        wanted = self._in_shardings
        if isinstance(function, JitFunction) and function._in_shardings is not None:
            wanted = function._in_shardings
        return entries(wanted, 2 + more)

    def loss(self, params: Any, batch: Sequence[Any], key: Any, microbatch: int) -> Any:
        """Return the loss of one microbatch without a pipeline, in plain JAX."""
        trees = self.trees(params, batch)
        owners = self.owners(trees)
        flat = [jax.tree.leaves(tree) for tree in trees]
        for (stage, index), (owner, at) in owners.items():
            flat[stage][index] = flat[owner][at]
        x: Any = batch[0]
        for number, function in enumerate(self._functions):
            tree = jax.tree.unflatten(jax.tree.structure(trees[number]), flat[number])
            named = {}
            if key is not None and takes_key(function):
                named = {"key": jax.random.fold_in(jax.random.fold_in(key, microbatch), number)}
            rest = batch[1:] if number == len(self._functions) - 1 else ()
            x = inner(function)(tree, x, *rest, **named)
        return x


class Marked:
    """A model that is one function of (params, *batch), cut at its marks or into `count` stages."""

    folds_stage = False

    def __init__(
        self,
        function: Callable[..., Any],
        meshes: Sequence[OwnMesh] | None,
        in_shardings: Any,
        count: int | None,
    ) -> None:
        if not meshes:
            raise ArgumentError(
                f"{name_of(function)!r} has no devices to run on: pass meshes=, one for each stage"
            )
        self._function = inner(function)
        self.name = name_of(function)
        self._meshes = meshes
        self._in_shardings = in_shardings
        self._count = count
        self.meshes = None if count is None else [self.mesh(n, count) for n in range(count)]
        """Meshes of the stages; None if the marks say how many there are."""
        self._cuts: Cuts | None = None
        """Cuts of a function that has no marks; None until it was traced."""
        self.takes_key = takes_key(function)

    def trees(self, params: Any, batch: Sequence[Any]) -> list[Any]:
        """Return the parameters of each stage: the user's tree, with None for those of other stages.

        Of a parameter whose rows are divided among stages, each has its `Rows`.
        """
        if not batch:
            raise ArgumentError(
                f"which stage of {self.name!r} has which parameters depends on the batch too: pass a batch, or "
                "its shapes, behind the parameters"
            )
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.takes_key else None
        stages = self._cut(shapes(params), batch, key)
        leaves, tree = jax.tree.flatten(params)
        used = [{index for kind, index in stage.takes if kind == "param"} for stage in stages]
        used[0] |= set(range(len(leaves))) - set().union(*used)

        def own(stage: Stage, index: int, leaf: Any) -> Any:
            if index in stage.rows:
                return rows_of(leaf, stage.rows[index], stage.mesh)
            return leaf if index in used[stage.number] else None

        return [
            jax.tree.unflatten(tree, [own(stage, *leaf) for leaf in enumerate(leaves)])
            for stage in stages
        ]

    def user_params(self, trees: Sequence[Any]) -> Any:
        """Return the parameters in the user's form."""
        return self._merged(trees, lambda leaf: joined(leaf) if _is_rows(leaf[0]) else leaf[0])

    def _merged(self, trees: Sequence[Any], merge: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the tree of the parameters, with what `merge` makes of the stages' values of each."""
        leaves = [[value for value in leaf if value is not None] for leaf in self._leaves(trees)]
        structure = jax.tree.structure(trees[0], is_leaf=_is_leaf)
        return jax.tree.unflatten(structure, [merge(leaf) if leaf else None for leaf in leaves])

    def _leaves(self, trees: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return what each stage has of each parameter: its value, some `Rows`, or None."""
        flat = [jax.tree.leaves(tree, is_leaf=_is_leaf) for tree in trees]
        return list(zip(*flat, strict=True))

    def numbered(self, trees: Sequence[Any]) -> list[dict[int, Any]]:
        """Return the leaves of each stage's tree by their numbers in the whole tree."""
        return [
            {index: value.value if _is_rows(value) else value for index, value in own.items()}
            for own in self._numbered(trees)
        ]

    def _numbered(self, trees: Sequence[Any]) -> list[dict[int, Any]]:
        leaves = [leaf for leaf in self._leaves(trees) if any(v is not None for v in leaf)]
        return [
            {index: leaf[stage] for index, leaf in enumerate(leaves) if leaf[stage] is not None}
            for stage in range(len(trees))
        ]

    def trace(self, trees: Sequence[Any], batch: Sequence[Any], key: Any) -> list[Stage]:
        """Trace the function for a microbatch, and cut it."""
        stages = self._cut(self._shapes(trees), batch, key)
        for stage, own in zip(stages, self._numbered(trees), strict=True):
            rows = {index: leaf.range for index, leaf in own.items() if _is_rows(leaf)}
            missing = {index for kind, index in stage.takes if kind == "param"} - set(own)
            missing |= {index for index, _ in rows.items() ^ stage.rows.items()}
            if missing:
                raise ArgumentError(
                    f"stage {stage.number} of {self.name!r} uses {len(missing)} parameters that its part of "
                    "the state does not have; make the state with init(params, *batch)"
                )
        return stages

    def _shapes(self, trees: Sequence[Any]) -> Any:
        """Return the shapes of the parameters in the user's form."""
        return self._merged(trees, lambda leaf: shape_of(leaf[0]))

    def _cut(self, params: Any, batch: Sequence[Any], key: Any) -> list[Stage]:
        return cut_stages(self._function, self.mesh, params, batch, key, self._count, self._chosen)

    def _chosen(self, graph: Graph) -> Cuts:
        assert self._count is not None
        self._cuts = choose(graph, self._count, self.name, self._cuts)
        return self._cuts

    def mesh(self, number: int, count: int) -> OwnMesh:
        """Return the devices of a stage, given how many there are; 0 while that is not known."""
        return (
            self._meshes[number % len(self._meshes)]
            if count == 0
            else mesh_of(self._meshes, number, count)
        )

    def owners(self, trees: Sequence[Any]) -> dict[Slot, Slot]:
        """Return for each copy of a parameter the one that is updated: that of the first stage."""
        first: dict[int, Slot] = {}
        owners: dict[Slot, Slot] = {}
        for stage, own in enumerate(self._numbered(trees)):
            for index, leaf in own.items():
                owner = first.setdefault(index, (stage, index))
                if owner[0] != stage and not _is_rows(leaf):
                    owners[stage, index] = owner
        return owners

    def specs(
        self, trees: Sequence[Any], stages: Sequence[Stage], batch: Sequence[Any]
    ) -> tuple[Specs, Specs, Specs]:
        """Return the user's shardings of parameters, of what stages take, and of parts of the batch."""
        rows = spread(tuple(self._entries(len(batch))[1:]), tuple(batch), self._what)
        parts = {
            (stage, index): spec for stage in range(len(stages)) for index, spec in enumerate(rows)
        }
        return self.param_specs(trees), {}, parts

    def param_specs(self, trees: Sequence[Any]) -> Specs:
        """Return the user's shardings of parameters."""
        flat = spread(self._entries(0)[0], self._shapes(trees), self._what)
        numbered = enumerate(self.numbered(trees))
        return {(stage, index): flat[index] for stage, own in numbered for index in own}

    @property
    def _what(self) -> str:
        return f"in_shardings of {self.name!r}"

    def _entries(self, parts: int) -> list[Any]:
        """Return the entries for the parameters and for each part of the batch."""
        return entries(self._in_shardings, 1 + parts)

    def loss(self, params: Any, batch: Sequence[Any], key: Any, microbatch: int) -> Any:
        """Return the loss of one microbatch without a pipeline, in plain JAX."""
        named = {}
        if key is not None and self.takes_key:
            named = {"key": jax.random.fold_in(key, microbatch)}
        return self._function(params, *batch, **named)


def entries(wanted: Any, count: int) -> list[Any]:
    """Return the user's shardings for each of `count` arguments: the last one stands for all that follow."""
    several = isinstance(wanted, (tuple, list)) and not isinstance(wanted, PartitionSpec)
    specs = list(wanted) if several else [wanted]
    return ((specs or [None]) + [(specs or [None])[-1]] * count)[:count]


def mesh_of(meshes: Sequence[OwnMesh], number: int, count: int) -> OwnMesh:
    """Return the mesh of a stage: the meshes are for the stages in turn."""
    if count % len(meshes):
        raise ArgumentError(
            f"the pipeline has {count} stages and {len(meshes)} meshes; pass a mesh for each stage, or a "
            "number of meshes that divides the number of stages"
        )
    return meshes[number % len(meshes)]


def check_floats(name: str, numbered: Sequence[Mapping[int, Any]]) -> None:
    """Raise ArgumentError if a parameter is not of floating-point numbers."""
    for stage, own in enumerate(numbered):
        for value in own.values():
            if not is_float(value):
                raise ArgumentError(
                    f"stage {stage} of {name!r} has a parameter {described(value)}, and gradients need "
                    "floating-point numbers; pass other values as parts of the batch, or close over them"
                )


def _plain(key: Any) -> Any:
    """Return a key of a tree path as a user writes it."""
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return getattr(key, field)
    return key


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, Rows)


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, Rows)
