"""Puts arrays of no booleans in the place of the tokens that a computation takes and returns.

JAX orders calls of the script by tokens from one computation to the next. jaxlib's compiler crashes when it
serializes an executable over several devices that has such arguments. A computation's results are there when
it has ended, so an array says as much as a token.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

from pw.core.jax_private.stablehlo import parsed

_TOKEN = "!stablehlo.token"


def has_tokens(module: bytes) -> bool:
    """Whether a portable artifact of JAX takes or returns tokens."""
    return b"jax.token" in module


def without_tokens(module: bytes) -> bytes:
    """Return a portable artifact that takes and returns arrays of no booleans in the place of tokens."""
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        copy = ir.Module.parse(parsed(module, context).operation.get_asm())
        main: Any = ir.SymbolTable(copy.operation)["main"]
        block = main.body.blocks[0]
        last = block.operations[len(block.operations) - 1].operation
        none = ir.RankedTensorType.get([0], ir.IntegerType.get_signless(1))
        token = ir.Type.parse(_TOKEN)
        first = ir.InsertionPoint.at_block_begin(block)
        for argument in block.arguments:
            if argument.type == token:
                new = ir.Operation.create("stablehlo.create_token", [token], [], ip=first)
                argument.replace_all_uses_with(new.results[0])
                argument.set_type(none)
        empty = ir.Attribute.parse(f"dense<> : {none}")
        returned = []
        before = ir.InsertionPoint(last)
        for value in last.operands:
            if value.type == token:
                array = ir.Operation.create(
                    "stablehlo.constant", [none], [], {"value": empty}, ip=before
                ).results[0]
                # Else what makes the token would not be used.
                both = [array, value]
                kinds = [one.type for one in both]
                kept = ir.Operation.create("stablehlo.optimization_barrier", kinds, both, ip=before)
                value = kept.results[0]
            returned.append(value)
        ir.Operation.create("func.return", [], returned, ip=before)
        last.erase()
        main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(
                [one.type for one in block.arguments], [one.type for one in returned]
            )
        )
        for side in ("arg_attrs", "res_attrs"):
            if side in main.attributes:
                main.attributes[side] = ir.ArrayAttr.get(
                    [_without_mark(ir.DictAttr(one)) for one in ir.ArrayAttr(main.attributes[side])]
                )
        return bytes(mlir.module_to_bytecode(copy))


def _without_mark(attributes: Any) -> Any:
    return ir.DictAttr.get(
        {one.name: one.attr for one in attributes if one.name not in ("jax.token",)}
    )
