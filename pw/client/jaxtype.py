"""Makes a handle a value that JAX knows, so that functions may close over it.

When a traced function meets a registered handle, the handle itself becomes a constant of the jaxpr, to
be turned into an argument (`pw.client.export`). Where JAX computes on this machine instead, it asks for
a local copy. JAX offers no public way to register an array type; everything private about it is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import core, dtypes
from jax._src.interpreters import mlir, pxla


def register(kind: type, aval: Callable[[Any], Any], local: Callable[[Any], Any]) -> None:
    """Teach JAX that `kind` is an array type.

    Args:
        kind: the class of the handles.
        aval: abstract value of a handle; may raise to forbid its use.
        local: the handle's value as a jax.Array on this machine.
    """

    def shard(handles: Any, shardings: Any, layouts: Any, semantics: Any) -> Any:
        return pxla.shard_args(shardings, layouts, semantics, [local(x) for x in handles])

    def constant(val: Any, aval: Any) -> Any:
        value = local(val)
        handler: Any = mlir.get_constant_handler(type(value))
        return handler(value, aval)

    core.pytype_aval_mappings[kind] = aval
    dtypes.canonicalize_value_handlers[kind] = lambda handle: handle
    pxla.shard_arg_handlers[kind] = shard
    mlir.register_constant_handler(kind, constant)
