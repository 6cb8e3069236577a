"""Makes a handle a value that JAX knows, so that functions may close over it.

When a traced function meets a registered handle, the handle itself becomes a constant of the jaxpr,
and `pw.client.trace.export` turns it into an argument. Where JAX would compute on this machine
instead, it asks for a local copy, and this module refuses. JAX has no public way to register an
array type; everything private about it is here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from jax._src import core, dtypes
from jax._src.interpreters import mlir, pxla

from pw.core.errors import ArgumentError

outside_traces: Callable[[], bool] = core.trace_state_clean
"""Whether no JAX transformation is under way in this thread."""


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


def not_here(what: str) -> ArgumentError:
    """Return the error of JAX computing with `what` on this machine."""
    return ArgumentError(
        f"{what} lies on virtual devices, and a function of jax was called with it outside of pw.jit, "
        "which would compute in this process. Wrap the function in pw.jit, or take the value with "
        "np.asarray(x) or pw.get(x)"
    )


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
