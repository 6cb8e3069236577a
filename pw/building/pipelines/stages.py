"""`Stage`: one stage of a model, traced; and how a list of stage functions becomes stages.

A stage is a function of named values: its parameters ("param", i), what the stage before returns ("x", i),
parts of the batch ("batch", i) and a PRNG key ("key", 0). Its results are ("y", i): the next stage's "x", or
the loss.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp

from pw.building.pipelines.stage_trace import tracing_stages
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.equations.graph import Graph, Literal, Name
from pw.client.functions.function import JitFunction
from pw.client.functions.wrapped import name_of
from pw.core.errors import ArgumentError

KEY: Name = ("key", 0)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a model, traced for a microbatch."""

    number: int
    name: str
    mesh: OwnMesh
    closed: Any
    takes: tuple[Name, ...]
    gives: tuple[Name, ...]
    x: Any = None
    """Tree of the values from the stage before; None for the first stage."""
    rows: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """First row and end of each parameter of which the stage has only some rows."""

    @cached_property
    def homes(self) -> Mapping[int, OwnSharding]:
        """Return the shardings of parameters on other devices, which the stage only hands to experts there."""
        graph = Graph(self.closed, self.takes, self.gives)
        uses: defaultdict[int, set[Any]] = defaultdict(set)
        for equation in graph.equations:
            moves = equation.params["devices"] if equation.primitive.name == "device_put" else ()
            for operand, to in zip_longest(equation.invars, moves):
                if not isinstance(operand, Literal):
                    kind, index = graph.arguments.get(operand, KEY)
                    uses[index if kind == "param" else -1].add(to)
        alone = {index: to for index, (to, *rest) in uses.items() if not rest}
        return {n: to for n, to in alone.items() if n >= 0 and isinstance(to, OwnSharding)}

    @property
    def outputs(self) -> list[Any]:
        """The shapes and dtypes of the results."""
        return list(self.closed.out_avals)


def takes_key(function: Any) -> bool:
    """Whether a function has a parameter `key`."""
    try:
        return "key" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def trace_stages(
    functions: Sequence[Callable[..., Any]],
    meshes: Sequence[OwnMesh],
    params: Sequence[Any],
    batch: Sequence[Any],
    key: Any,
) -> list[Stage]:
    """Trace a list of stage functions, each with what the one before returns.

    Args:
        functions: the first takes (params, batch[0]), the others (params, x), the last also batch[1:].
        meshes: one for each stage.
        params: for each stage a tree of `jax.ShapeDtypeStruct`s.
        batch: trees of shapes of one microbatch.
        key: the type of a PRNG key, or None.

    Raises:
        ArgumentError: a stage does not take what the one before returns, or the last one gives no loss.
    """
    stages: list[Stage] = []
    x: Any = batch[0]
    last = len(functions) - 1
    for number, function in enumerate(functions):
        rest = tuple(batch[1:]) if number == last else ()
        own_key = key if takes_key(function) else None
        kind = "x" if number else "batch"
        before = len(jax.tree.leaves(batch[0]))
        stage, x = _trace(
            number, function, meshes[number], params[number], x, rest, own_key, kind, before
        )
        stages.append(stage)
    _check_loss(stages[-1].name, last, x)
    return stages


def _trace(
    number: int,
    function: Callable[..., Any],
    mesh: OwnMesh,
    params: Any,
    x: Any,
    rest: tuple[Any, ...],
    key: Any,
    kind: str,
    before: int,
) -> tuple[Stage, Any]:
    """Trace one stage; return it, and the tree of the shapes of its results."""
    trees = []

    def flat(params: Any, x: Any, rest: Any, key: Any) -> list[Any]:
        named = {} if key is None else {"key": key}
        leaves, tree = jax.tree.flatten(function(params, x, *rest, **named))
        trees.append(tree)
        return leaves

    name = name_of(function)
    try:
        with tracing_stages(mesh):
            closed = jax.make_jaxpr(flat)(params, x, rest, key)
    except Exception as error:
        if number == 0 or isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"stage {number} ({name!r}) does not take what stage {number - 1} returns, "
            f"{described(x)}: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    counts = [len(jax.tree.leaves(tree)) for tree in (params, x, rest, key)]
    takes = (
        *(("param", index) for index in range(counts[0])),
        *((kind, index) for index in range(counts[1])),
        *(("batch", before + index) for index in range(counts[2])),
        *(KEY for _ in range(counts[3])),
    )
    gives = tuple(("y", index) for index in range(len(closed.out_avals)))
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.out_avals]
    stage = Stage(number, name, mesh, closed, takes, gives, x if number else None)
    return stage, jax.tree.unflatten(trees[-1], shapes)


def _check_loss(name: str, number: int, result: Any) -> None:
    leaves = jax.tree.leaves(result)
    if len(leaves) != 1 or leaves[0].shape or not is_float(leaves[0]):
        raise ArgumentError(
            f"stage {number} ({name!r}) is the last one and returns {described(result)}; it has to return the "
            "loss, one floating-point number: the mean over the microbatch"
        )


def is_float(aval: Any) -> bool:
    """Whether gradients flow through values of this type."""
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def described(tree: Any) -> str:
    """Return a tree of shapes in short words, such as float32[4,8]."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return "nothing"
    words = [f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]" for leaf in leaves[:4]]
    return ", ".join(words) + (f" and {len(leaves) - 4} more" if len(leaves) > 4 else "")


def inner(function: Any) -> Any:
    """Return what a `pw.jit` function calls; another function as it is."""
    return function.__wrapped__ if isinstance(function, JitFunction) else function
