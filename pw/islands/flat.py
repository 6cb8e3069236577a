"""The function of a divided module, without calls and what only XLA reads; and walks over it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir

from pw.core.programs.stablehlo import CALLS
from pw.islands.errors import cannot

_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
_UNARY = {
    f"mhlo.{name}": f"chlo.{name}"
    for name in ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "sinh")
}
_OPTIONS = "mhlo.frontend_attributes"
_DROPPED = ("result_layout", "xla_shape", "mhlo.sharding", _OPTIONS)


def flatten(module: Any) -> Any:
    """Put the bodies of called functions in place of the calls; in place. Returns the operation of `main`."""
    functions = _functions(module)
    main = functions.pop("main")
    calls = [one for one in walk(main) if one.name in _CALLS]
    while calls:
        call = calls.pop()
        callee = functions[_callee(call)]
        body = entry(callee)
        values = dict(zip(body.arguments, call.operands, strict=True))
        before = ir.InsertionPoint(call)
        *steps, last = list(body.operations)
        for step in steps:
            copied = step.operation.clone(before)
            for one in (copied, *walk(copied)):
                replace_operands(one, values)
                if one.name in _CALLS:
                    calls.append(one)
            values.update(zip(step.operation.results, copied.results, strict=True))
        for old, new in zip(call.results, last.operation.operands, strict=True):
            old.replace_all_uses_with(values.get(new, new))
        call.erase()
    for function in functions.values():
        function.erase()
    for one in [one for one in walk(main) if one.name == "stablehlo.custom_call"]:
        if len(one.results) == 1 and isinstance(one.results[0].type, ir.TupleType):
            one = _without_tuple(one)
        _with_options(one)
    for one in [one for one in walk(main) if one.name == "stablehlo.tuple"]:
        one.erase()
    for one in list(walk(main)):
        if one.name == "mhlo.copy":
            one.results[0].replace_all_uses_with(one.operands[0])
            one.erase()
            continue
        if one.name == "mhlo.topk" or one.name in _UNARY:
            one = _as_exported(one)
        for name in _DROPPED:
            is_option = name == _OPTIONS and one.name == "stablehlo.custom_call"
            if name in one.attributes and not is_option:
                del one.attributes[name]
    return main


def _functions(module: Any) -> dict[str, Any]:
    """Return the functions of a module by their names."""
    return {
        ir.StringAttr(one.operation.attributes["sym_name"]).value: one.operation
        for one in module.body.operations
        if one.operation.name == "func.func"
    }


def _callee(call: Any) -> str:
    return str(ir.FlatSymbolRefAttr(call.attributes[_CALLS[call.name]]).value)


def _without_tuple(call: Any) -> Any:
    """Let a native call have several results in place of a tuple of them."""
    kinds = ir.TupleType(call.results[0].type)
    types = [kinds.get_type(at) for at in range(kinds.num_types)]
    attributes = {name: call.attributes[name] for name in call.attributes}
    new = ir.Operation.create(
        call.name,
        types,
        list(call.operands),
        attributes,
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    for use in list(call.results[0].uses):
        element = use.owner.operation
        at = ir.IntegerAttr(element.attributes["index"]).value
        element.results[0].replace_all_uses_with(new.results[at])
        element.erase()
    call.erase()
    return new


def _with_options(call: Any) -> None:
    """Name the options of a native call as JAX does."""
    options = call.attributes.get("backend_config", None)
    if isinstance(options, ir.DictAttr):
        del call.attributes["backend_config"]
        del call.attributes["api_version"]
        call.attributes["mhlo.backend_config"] = options


def _as_exported(one: Any) -> Any:
    """Put an operation that hosts know in the place of XLA's own."""
    name, attributes = _UNARY.get(one.name, "chlo.top_k"), {}
    if one.name == "mhlo.topk":
        if not ir.BoolAttr(one.attributes["largest"]).value:
            cannot("the smallest elements of a value (top_k) are not supported over islands", one)
        attributes["k"] = one.attributes["k"]
    types = [result.type for result in one.results]
    operation = ir.Operation.create(
        name, types, list(one.operands), attributes, loc=one.location, ip=ir.InsertionPoint(one)
    )
    for old, new in zip(one.results, operation.results, strict=True):
        old.replace_all_uses_with(new)
    one.erase()
    return operation


def walk(operation: Any) -> Iterator[Any]:
    """Yield all operations inside of `operation`, in order, outer ones first."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in list(block.operations):
                yield inner.operation
                yield from walk(inner.operation)


def walk_called(operation: Any, module: Any) -> Iterator[Any]:
    """Yield all operations inside of `operation`, and those of the functions that it calls, each once."""
    functions = _functions(module)
    pending = [operation]
    while pending:
        for one in walk(pending.pop()):
            yield one
            if one.name in _CALLS and (called := functions.pop(_callee(one), None)) is not None:
                pending.append(called)


def is_call(operation: Any) -> bool:
    """Whether an operation calls a function in its client's process."""
    if operation.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(operation.attributes["call_target_name"]).value in CALLS


def calls(operation: Any) -> bool:
    """Whether an operation, or one inside of it, calls a function in its client's process."""
    return is_call(operation) or any(map(is_call, walk(operation)))


def entry(operation: Any, region: int = 0) -> Any:
    """Return the only block of a region."""
    return operation.regions[region].blocks[0]


def maker(value: Any) -> Any:
    """Return the operation that makes a value; None for an argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def operations_of(block: Any) -> list[Any]:
    """Return the operations of a block but for the last, which returns."""
    return [one.operation for one in block.operations][:-1]


def returned(block: Any) -> list[Any]:
    """Return the values that a block returns."""
    return list(block.operations[len(block.operations) - 1].operation.operands)


def used_by(operation: Any) -> Iterator[Any]:
    """Yield the values from outside that an operation and its regions use."""
    inside: set[Any] = set()
    for one in (operation, *walk(operation)):
        for region in one.regions:
            for block in region.blocks:
                inside.update(block.arguments)
        for value in one.operands:
            if value not in inside:
                yield value
        if one is not operation:
            inside.update(one.results)


def replace_operands(operation: Any, values: dict[Any, Any]) -> None:
    """Let an operation use other values."""
    for at, operand in enumerate(operation.operands):
        if operand in values:
            operation.operands[at] = values[operand]


def is_token(value: Any) -> bool:
    """Whether a value only says what was before; between computations it is an array of no booleans."""
    return str(value.type) == "!stablehlo.token"


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a value on a device."""
    return (0,) if is_token(value) else tuple(ir.RankedTensorType(value.type).shape)


def element_of(value: Any) -> Any:
    """Return the type of a value's elements."""
    if is_token(value):
        return ir.IntegerType.get_signless(1)
    return ir.RankedTensorType(value.type).element_type


def elements_of(value: Any) -> int:
    """Return how many elements a value has on a device."""
    return math.prod(shape_of(value))


def bytes_of(value: Any) -> int:
    """Return the size of a value on a device."""
    kind = element_of(value)
    bits = kind.width if isinstance(kind, (ir.FloatType, ir.IntegerType)) else 128
    return elements_of(value) * max(8, int(bits)) // 8
