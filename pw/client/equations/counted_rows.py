"""`with_counts`: says in a program that JAX traces that values are the rows of a `pw.Ragged`.

It is an equation of its own, so that JAX's transformations keep it: tangents and cotangents of rows have
the same counts. Where such rows move to other devices, only those that count do.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pw.client.arrays.ragged import pairs_of


def with_counts(leaves: Any, tree: Any) -> list[Any]:
    """Return the leaves of a tree, in which the rows of each `pw.Ragged` have their counts."""
    values = list(leaves)
    for rows, counts in pairs_of(tree):
        values[rows] = _rows.bind(values[rows], values[counts])
    return values


def has_counts(equation: Any) -> bool:
    """Whether an equation gives rows their counts."""
    return equation.primitive is _rows


def _differentiate(primals: Any, tangents: Any) -> tuple[Any, Any]:
    rows, counts = primals
    tangent, _ = tangents
    if type(tangent) is not ad.Zero:
        tangent = _rows.bind(tangent, counts)
    return _rows.bind(rows, counts), tangent


def _transpose(cotangent: Any, _: Any, counts: Any) -> Any:
    return [cotangent if type(cotangent) is ad.Zero else _rows.bind(cotangent, counts), None]


def _batch(values: Any, dimensions: Any) -> Any:
    size = next(
        value.shape[at] for value, at in zip(values, dimensions, strict=True) if at is not None
    )
    rows, counts = (
        batching.bdim_at_front(value, at, size)
        for value, at in zip(values, dimensions, strict=True)
    )
    return _rows.bind(rows, counts), 0


_rows: Any = Primitive("rows_that_count")
_rows.def_impl(lambda rows, counts: rows)
_rows.def_abstract_eval(lambda rows, counts: rows)
mlir.register_lowering(_rows, lambda _, rows, counts: [rows])
ad.primitive_jvps[_rows] = _differentiate
ad.primitive_transposes[_rows] = _transpose
batching.primitive_batchers[_rows] = _batch
