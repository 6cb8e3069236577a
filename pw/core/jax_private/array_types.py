"""Makes a handle a value that JAX knows, so that functions may close over it.

When a traced function meets a registered handle, the handle itself becomes a constant of the jaxpr,
and `pw.client.computations.export` turns it into an argument. Where JAX would compute on this machine
instead, it asks for a local copy, and the handle refuses. JAX does not say why it asks a handle, so
questions look at the frames of their callers. Public: none, for all functions here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from jax._src import core, dtypes
from jax._src.interpreters import pxla
from jax.interpreters import mlir


def register(kind: type, aval: Callable[[Any], Any], refuse: Callable[[Any], NoReturn]) -> None:
    """Teach JAX that `kind` is an array type.

    Args:
        kind: the class of the handles.
        aval: abstract value of a handle; may raise to forbid its use.
        refuse: raises, because JAX is about to compute with a handle on this machine.
    """

    def shard(handles: Any, shardings: Any, layouts: Any, semantics: Any) -> NoReturn:
        refuse(handles[0])

    def constant(val: Any, aval: Any) -> NoReturn:
        refuse(val)

    core.pytype_aval_mappings[kind] = aval
    dtypes.canonicalize_value_handlers[kind] = lambda handle: handle
    pxla.shard_arg_handlers[kind] = shard
    mlir.register_constant_handler(kind, constant)


def is_operand() -> bool:
    """Whether the caller's caller is an operator of jax.Array, which tries the reflected operator next."""
    return sys._getframe(2).f_code.co_name.startswith("_operator_")


def is_random_key() -> bool:
    """Whether the caller was called for a function of jax.random that looks at its key."""
    return sys._getframe(3).f_code.co_name == "_check_prng_key"


def is_computing() -> bool:
    """Whether the caller was called for a compiled function that is about to run on this machine.

    It looks at all of its arguments first; at those that it does not need, only then.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is not None and frame.f_code.co_name != "_pjit_call_impl_python":
            frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_pjit_call_impl_python"
