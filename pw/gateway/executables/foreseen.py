"""What a compiler will say of a small module, read from the module: the script need not wait for it.

An eager operation of JAX is a module of a few operations that compiles for tens of milliseconds. The gateway
describes it at once, so the script goes on while hosts compile it for its first run. This holds for modules
on one device whose arguments and results lie as StableHLO says, and that compilers do not refuse.
All other modules are compiled first.

Hosts get such a module without the lines of the script, so they compile it once for all scripts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.extend.mlir import ir, passmanager
from jax.interpreters import mlir

from pw.core.dtypes import BY_MLIR, PACKED
from pw.core.jax_private.compiling import CompileOptions
from pw.core.jax_private.stablehlo import parsed, portable
from pw.core.programs.stablehlo import Facts, ShardFacts, Stablehlo
from pw.core.sharding import dtype_of
from pw.gateway.arrays.arrays import DEFAULT_MEMORY

MODULE_BYTES = 1 << 14
"""Most bytes of a module that is foreseen: the script may ask how much memory the code of larger ones takes."""
MODULES = 64
"""Modules that are read in one context: to make it takes longer than to read a module."""
VALUE_BYTES = 1 << 30
"""Most bytes of a value: XLA refuses, or crashes on, values that no device has memory for."""
_DIALECTS = frozenset(("builtin", "func", "stablehlo", "chlo"))
_MARKS = ("sdy.mesh", "sdy.sharding_constraint")
"""Operations that divide nothing on one device; arrays of random keys have them."""
_NATIVE = frozenset(
    f"stablehlo.{name}" for name in ("custom_call", "send", "recv", "infeed", "outfeed")
)
_POINTER_BYTES = 8
_WITHOUT_LINES = "builtin.module(strip-debuginfo)"
_HARMLESS = frozenset(("jax.result_info", "jax.arg_info"))
"""Attributes of arguments and results that say nothing to a compiler."""


class Foreseen(NamedTuple):
    """A module without the lines of the script, and what a compiler will say of it."""

    code: Stablehlo
    facts: Facts
    """Without the sizes of its code and its temporary values."""


class SmallModules:
    """Reads the modules of one client.

    Args:
        modules: how many one context reads; it keeps all names and shapes that it has seen.
    """

    def __init__(self, modules: int = MODULES) -> None:
        self._modules = modules
        self._context: Any = None
        self._left = 0
        """Modules until there is a new context."""

    def foreseen(self, code: Stablehlo) -> Foreseen | None:
        """Return what is known of a module on one device; None if only the compiler knows it."""
        if len(code.module) > MODULE_BYTES or code.callbacks:
            return None
        options = CompileOptions.ParseFromString(code.options)
        if options.env_option_overrides or options.num_replicas * options.num_partitions != 1:
            return None
        if not self._left:
            self._context, self._left = mlir.make_ir_context(), self._modules
        self._left -= 1
        with self._context:
            module = parsed(code.module)
            facts = _facts(module)
            if facts is None:
                return None
            passmanager.PassManager.parse(_WITHOUT_LINES).run(module.operation)
            return Foreseen(Stablehlo(portable(module), code.options), facts)


def _facts(module: Any) -> Facts | None:
    main: Any = ir.SymbolTable(module.operation)["main"]
    if not (_is_plain(module) and _is_unmarked(main, "arg_attrs", "res_attrs")):
        return None
    inputs, outputs = (
        tuple(one for kind in side if (one := _shard(kind)) is not None)
        for side in (main.type.inputs, main.type.results)
    )
    if not outputs or len(inputs + outputs) < len(main.type.inputs + main.type.results):
        return None
    input_bytes, output_bytes = (sum(map(_bytes, side)) for side in (inputs, outputs))
    if len(outputs) > 1:
        output_bytes += _POINTER_BYTES * len(outputs)  # XLA counts the tuple
    name = ir.StringAttr(module.operation.attributes["sym_name"]).value
    return Facts(name, inputs, outputs, (), 0, input_bytes, output_bytes, 0, 0)


def _is_plain(module: Any) -> bool:
    """Whether all operations are StableHLO's own, and their results fit into memory."""
    cache: dict[Any, bool] = {}

    def fits(kind: Any) -> bool:
        if kind not in cache:
            one = _shard(kind)
            cache[kind] = one is not None and _bytes(one) <= VALUE_BYTES
        return cache[kind]

    is_plain = True

    def look(operation: Any) -> Any:
        nonlocal is_plain
        name = operation.name
        if (
            name in _NATIVE
            or (name.partition(".")[0] not in _DIALECTS and name not in _MARKS)
            or not all(fits(value.type) for value in operation.results)
        ):
            is_plain = False
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return is_plain


def _is_unmarked(main: Any, *sides: str) -> bool:
    """Whether no argument or result is donated, divided, or laid out in a way of its own."""
    listed: list[Any] = [main.attributes[side] for side in sides if side in main.attributes]
    marks: Iterable[Any] = itertools.chain.from_iterable(itertools.chain.from_iterable(listed))
    return all(mark.name in _HARMLESS for mark in marks)


def _shard(kind: Any) -> ShardFacts | None:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        return None
    dtype = BY_MLIR.get(str(kind.element_type))
    if dtype is None or dtype in PACKED:
        return None
    shape = tuple(kind.shape)
    order = tuple(reversed(range(len(shape))))
    return ShardFacts(dtype, shape, b"", order, 0, DEFAULT_MEMORY)


def _bytes(one: ShardFacts) -> int:
    return math.prod(one.shape) * dtype_of(one.dtype).itemsize
