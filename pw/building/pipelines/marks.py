"""`stage_boundary`: the marks at which `pw.pipeline` cuts one function into stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pw.client.equations.graph import bodies

_thread = threading.local()


def stage_boundary(x: Any) -> Any:
    """Mark where `pw.pipeline` cuts a model: what is computed from the result belongs to the next stage.

    Args:
        x: a tree of arrays, which it returns. Elsewhere than in a pipeline it does nothing else.
    """
    leaves, tree = jax.tree.flatten(x)
    _thread.marks = getattr(_thread, "marks", 0) + bool(leaves)
    return jax.tree.unflatten(tree, mark.bind(*leaves)) if leaves else x


mark: Any = Primitive("pw_stage_boundary")
mark.multiple_results = True
mark.def_impl(lambda *values: list(values))
mark.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[mark] = lambda primals, tangents: (mark.bind(*primals), list(tangents))
batching.primitive_batchers[mark] = lambda values, dimensions: (mark.bind(*values), dimensions)
mlir.register_lowering(mark, lambda ctx, *values: list(values))


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many marks the function traced in the block has called so far."""
    before = getattr(_thread, "marks", 0)
    yield lambda: int(getattr(_thread, "marks", 0) - before)


def has_mark(eqn: Any) -> bool:
    """Whether an equation is a mark, or a jaxpr inside of it has one."""
    inside = (one for jaxpr in bodies(eqn) for one in jaxpr.eqns)
    return eqn.primitive is mark or any(map(has_mark, inside))
