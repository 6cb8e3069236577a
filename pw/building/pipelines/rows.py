"""`Rows`: a part of a parameter, of which each stage uses other rows.

The weights of layers are often one array with a row for each layer. If several stages use rows of such a
parameter, and no two stages the same ones, each has only its own: with its gradients, and its part of the
optimizer's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pw.client.arrays.mesh import OwnMesh
from pw.client.equations.graph import Graph, Literal, Var
from pw.client.functions.jit import jit
from pw.client.functions.transfer import put
from pw.client.programs.placing.shardings import sharding_of

Range = tuple[int, int]
"""The first row, and the end."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of a parameter that one stage has."""

    value: Any
    start: int = field(metadata={"static": True})
    """The first of them."""
    all_rows: int = field(metadata={"static": True})
    """Number of rows that the parameter has in all stages together."""

    @property
    def range(self) -> Range:
        """The first row, and the end."""
        return self.start, self.start + self.value.shape[0]


def rows_of(parameter: Any, rows: Range, mesh: OwnMesh) -> Rows:
    """Return rows of a parameter, of which a stage runs on `mesh`."""
    start, stop = rows
    shape, dtype = parameter.shape, parameter.dtype
    if isinstance(parameter, jax.ShapeDtypeStruct):
        value: Any = jax.ShapeDtypeStruct((stop - start, *shape[1:]), dtype)
    elif isinstance(parameter, jax.core.Tracer) and sharding_of(parameter) is None:

        def rows_of_parameter(array: Any) -> Any:
            return array[start:stop]

        value = jit(rows_of_parameter, mesh=mesh)(parameter)
    else:
        value = parameter[start:stop]
    return Rows(value, start, shape[0])


def shape_of(leaf: Any) -> Any:
    """Return the shape and dtype of a parameter of which this is the value, or rows."""
    if not isinstance(leaf, Rows):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct((leaf.all_rows, *leaf.value.shape[1:]), leaf.value.dtype)


def joined(parts: Sequence[Rows]) -> Any:
    """Return the parameter that consists of these rows, on the devices of the first stage that has some."""
    values = [part.value for part in sorted(parts, key=lambda part: part.start)]
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    sharding = sharding_of(parts[0].value)
    if sharding is None:  # a host value in a program
        return jnp.concatenate(values)

    def join_rows(parts: Sequence[Any]) -> Any:
        return jnp.concatenate(parts)

    return jit(join_rows, mesh=sharding.mesh, out_shardings=sharding)(
        put(values, sharding=sharding)
    )


def divided(graph: Graph, stages: Sequence[Iterable[int]]) -> list[dict[Any, Range]]:
    """Return for each stage the rows of each parameter of which it needs some only.

    Args:
        graph: the whole function.
        stages: the equations of each stage.
    """
    used: defaultdict[Any, dict[int, Range]] = defaultdict(dict)
    for number, equations in enumerate(stages):
        for at in equations:
            eqn = graph.equations[at]
            for variable in eqn.invars:
                if (
                    not isinstance(variable, Literal)
                    and graph.arguments.get(variable, ("",))[0] == "param"
                ):
                    low, high = _rows(eqn, variable)
                    first, end = used[variable].get(number, (low, high))
                    used[variable][number] = min(low, first), max(high, end)
    result: list[dict[Any, Range]] = [{} for _ in stages]
    for variable, ranges in used.items():
        order = sorted(ranges, key=ranges.__getitem__)
        if len(order) > 1 and all(ranges[a][1] <= ranges[b][0] for a, b in pairwise(order)):
            # Rows that no stage uses belong to the stage that has those before them.
            starts = [0, *(ranges[number][0] for number in order[1:]), variable.aval.shape[0]]
            for number, rows in zip(order, pairwise(starts), strict=True):
                result[number][variable] = rows
    return result


def of_rows(
    graph: Graph, equations: Iterable[int], rows: Mapping[Any, Range]
) -> tuple[dict[Any, Any], dict[int, Any]]:
    """Return a variable for the rows of each parameter, and the equations that take them instead of it."""
    parts = {
        variable: Var(variable.aval.update(shape=(stop - start, *variable.aval.shape[1:])))
        for variable, (start, stop) in rows.items()
    }
    changed = {}
    for at in equations:
        eqn = graph.equations[at]
        variable = eqn.invars[0] if eqn.primitive.name == "slice" else None
        if variable in parts:
            first = rows[variable][0]
            ends = {
                name: (eqn.params[name][0] - first, *eqn.params[name][1:])
                for name in ("start_indices", "limit_indices")
            }
            changed[at] = eqn.replace(invars=[parts[variable]], params={**eqn.params, **ends})
    return parts, changed


def _rows(eqn: Any, variable: Any) -> Range:
    """Return which rows of a variable an equation uses."""
    if eqn.primitive.name == "slice":
        return eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
    return 0, max([1, *variable.aval.shape[:1]])
