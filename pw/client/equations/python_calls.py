"""Calls of functions that JAX cannot trace, as equations: host functions run Python, which has no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from pw.client.arrays.mesh import OwnMesh
from pw.core.errors import TracingError


def call_python(
    function: Any, key: Any, leaves: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """Add a call to a program that JAX traces; returns its results.

    Args:
        function: the host function.
        key: the kind of the call.
        leaves: the arguments.
        results: the abstract values of the results.
    """
    values: list[Any] = _python.bind(*leaves, function=function, key=key, results=tuple(results))
    return values


def mesh_of_python_call(equation: Any) -> OwnMesh | None:
    """Return where a host function runs; None if an equation is no call of one."""
    return equation.params["key"][3] if equation.primitive is _python else None


def _differentiate(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    results = _python.bind(*primals, **params)
    moving = [one for one in tangents if type(one) is not ad.Zero]
    tangents = []
    for aval in map(jax.typeof, results):
        if moving and jax.numpy.issubdtype(aval.dtype, np.inexact):
            tangents.append(_tangent.bind(*moving, function=params["function"], result=aval))
        else:
            tangents.append(ad.Zero(aval.to_tangent_aval()))
    return results, tangents


def refuse_gradient(*values: Any, function: Any, **params: Any) -> NoReturn:
    """Raise TracingError for a gradient that flows through a host function."""
    raise TracingError(f"a gradient flows through {function!r}, which {function.why_no_gradient}")


def _refuse_transpose(cotangents: Any, *values: Any, **params: Any) -> NoReturn:
    refuse_gradient(**params)


def _batch(values: Any, dimensions: Any, *, function: Any, **params: Any) -> NoReturn:
    raise TracingError(
        f"jax.vmap over {function!r} is not possible: Python is not vectorised. Call it once for each value"
    )


_python: Any = Primitive("host_function")
_python.multiple_results = True
_python.def_abstract_eval(lambda *avals, function, key, results: list(results))
_tangent: Any = Primitive("tangent_of_host_function")
_tangent.def_abstract_eval(lambda *avals, function, result: result)
_tangent.def_impl(refuse_gradient)
ad.primitive_jvps[_python] = _differentiate
ad.primitive_jvps[_tangent] = refuse_gradient
ad.primitive_transposes[_tangent] = _refuse_transpose
batching.primitive_batchers[_python] = _batch
