"""Chooses shardings for results that depend on no argument's values, such as `jnp.zeros_like(x)`.

The compiler has nothing to propagate to them. An optimizer's state begins as such results, and each
belongs to a parameter: it has the parameter's shape, and its path ends with the parameter's path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax
import jax.extend

from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType

tree_flatten_with_path = jax.tree_util.tree_flatten_with_path
tree_unflatten = jax.tree_util.tree_unflatten


def like_arguments(
    jaxpr: Any,
    arguments: Any,
    inputs: Sequence[Any],
    results: Any,
    wanted: Sequence[OwnSharding | None],
) -> list[OwnSharding | None]:
    """Return `wanted`, with shardings of arguments for results that depend on no argument.

    Such a result gets the sharding of the argument that has its shape; of several, of that with the
    longest common end of the paths. It gets None if there is none, or if these are split differently. Its
    memory is the one in which the function makes it.

    Args:
        jaxpr: the function.
        arguments: the tree of its arguments, of the types `inputs`; other leaves of it lie nowhere.
        results: the tree of its results, whose shardings are `wanted`.
    """
    free = [not depends for depends in _depend(jaxpr, [True] * len(jaxpr.invars))]
    lies = list(wanted)
    ends: dict[Any, set[OwnSharding]] = defaultdict(set)
    if any(free):
        for path, type_ in tree_flatten_with_path(tree_unflatten(arguments, inputs))[0]:
            if isinstance(type_, ArrayType):
                for at in range(len(path) + 1):
                    ends[type_.aval.shape, path[at:]].add(type_.sharding)
    for path, index in tree_flatten_with_path(tree_unflatten(results, range(len(lies))))[0]:
        if free[index] and lies[index] is None:
            aval = jaxpr.outvars[index].aval
            keys = [(aval.shape, path[at:]) for at in range(len(path) + 1)]
            shardings = next((ends[key] for key in keys if key in ends), set())
            if len(shardings) == 1:
                lies[index] = next(iter(shardings)).in_space(aval.memory_space)
    return lies


def _depend(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Return for each result of a jaxpr whether it depends on one of the chosen inputs."""
    chosen = set(compress(jaxpr.invars, inputs))

    def depend(atoms: Sequence[Any]) -> list[bool]:
        return [not isinstance(a, jax.extend.core.Literal) and a in chosen for a in atoms]

    for equation in jaxpr.eqns:
        reads = depend(equation.invars)
        if any(reads):
            is_call = equation.primitive.name == "jit"
            inner = _depend(equation.params["jaxpr"].jaxpr, reads) if is_call else None
            chosen.update(compress(equation.outvars, inner or [True] * len(equation.outvars)))
    return depend(jaxpr.outvars)
