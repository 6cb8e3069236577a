"""Lets JAX transform a pw function outside of pw for its shapes only.

`jax.eval_shape(f, x)` of a pw function computes nothing, so it works. `jax.grad`, `jax.vmap`,
`jax.jit` and the loops of `jax.lax` would compute in this process instead of on virtual devices. So
the arguments of such a call pass through a primitive that JAX can trace, differentiate and batch;
it raises when JAX computes or compiles it. When pw traces a function for the hosts, the arguments
do not pass through it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pw.core.errors import TracingError

_thread = threading.local()


@contextlib.contextmanager
def for_hosts(mesh: Any) -> Iterator[None]:
    """In the block, this thread traces for the hosts of `mesh`."""
    before = traces_for_hosts()
    _thread.mesh = mesh
    try:
        yield
    finally:
        _thread.mesh = before


def traces_for_hosts() -> Any:
    """Return the `pw.Mesh` for which this thread traces; None if it does not trace for hosts."""
    return getattr(_thread, "mesh", None)


def only_shapes(leaves: Sequence[Any], message: str) -> list[Any]:
    """Return the leaves without elements: JAX sees shapes and dtypes, and reading elements raises `message`."""
    kept = list(leaves)
    at = [index for index, leaf in enumerate(kept) if _is_value(leaf)]
    if not at:
        raise TracingError(message)
    for index, value in zip(
        at, _here.bind(*[kept[index] for index in at], message=message), strict=True
    ):
        kept[index] = value
    return kept


def _is_value(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _refuse(*values: Any, message: str) -> NoReturn:
    raise TracingError(message)


def _differentiate(primals: Any, tangents: Any, *, message: str) -> tuple[Any, Any]:
    return _here.bind(*primals, message=message), list(tangents)


def _batch(values: Any, dimensions: Any, *, message: str) -> tuple[Any, Any]:
    return _here.bind(*values, message=message), dimensions


_here: Any = Primitive("pw_function")
_here.multiple_results = True
_here.def_impl(_refuse)
_here.def_abstract_eval(lambda *avals, message: list(avals))
ad.primitive_jvps[_here] = _differentiate
batching.primitive_batchers[_here] = _batch
mlir.register_lowering(_here, lambda ctx, *values, message: _refuse(message=message))
