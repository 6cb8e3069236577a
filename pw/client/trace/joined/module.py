"""Prepares the module of an exported function: one flat function with explicit collectives.

Shardy first propagates shardings over the whole mesh, as it does for a mesh on one island. Then the
part of each sharding without the axis between islands is kept in the attribute `pw.inner`, and
Shardy sees only that axis: its passes insert the collectives over it. The inner shardings go back
into the pieces, where XLA inserts the collectives over the other axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from jax.extend.mlir import ir, passmanager

INNER = "pw.inner"
"""The attribute with the shardings of an operation's results over the axes inside an island."""

_PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
_COLLECTIVES = (
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true},"
    "sdy-reshard-to-collectives))"
)
_LIST = re.compile(r"\{([^{}]*)\}")
_ENTRY = re.compile(r'"([^"]*)"')
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
_SHARDING = "sdy.sharding"
_SHARDINGS = (_SHARDING, "in_shardings", "out_shardings", "sharding")


class CannotCut(Exception):
    """A function cannot be divided over islands: the reason, and the operation that stands for it."""

    def __init__(self, why: str, operation: Any) -> None:
        super().__init__(why)
        self.why = why
        self.where = where(operation)


class Flat(NamedTuple):
    """A function without calls, divided by the axis between islands."""

    main: Any
    """The operation `func.func`."""
    axis: str
    islands: int
    arguments: list[str]
    """The inner sharding of each argument, in MLIR's words; empty if it has none."""
    results: list[str]
    results_split: list[list[int]]
    """The dimensions of each result that the axis splits."""
    meshes: dict[str, str]
    """The meshes of the module without that axis, by name."""


def prepare(module: Any, axis: str, islands: int) -> Flat:
    """Flatten the function of `module`, and make its collectives over `axis` explicit; in place."""
    _flatten(module)
    passmanager.PassManager.parse(_PROPAGATE).run(module.operation)
    main = _main(module)
    arguments, _ = _divided(main, "arg_attrs", axis)
    results, results_split = _divided(main, "res_attrs", axis)
    meshes = {}
    for one in module.body.operations:
        if one.operation.name == "sdy.mesh":
            said = str(one.operation.attributes["mesh"])
            axes = re.findall(r'"[^"]*"=\d+', said)
            own = [entry for entry in axes if entry.startswith(f'"{axis}"=')]
            rest = ", ".join(entry for entry in axes if entry not in own)
            name = ir.StringAttr(one.operation.attributes["sym_name"]).value
            meshes[name] = f"<[{rest}]>"
            one.operation.attributes["mesh"] = ir.Attribute.parse(f"#sdy.mesh<[{', '.join(own)}]>")
    for operation in walk(main):
        for name in _SHARDINGS:
            if name in operation.attributes:
                said = str(operation.attributes[name])
                if not said.startswith("#sdy.sharding"):
                    continue
                if f'"{axis}":(' in said:
                    cannot(
                        f"an array is split over a part of the axis in {_named(operation)}",
                        operation,
                    )
                if name == _SHARDING:
                    operation.attributes[INNER] = ir.StringAttr.get(_kept(said, axis, False))
                operation.attributes[name] = ir.Attribute.parse(_kept(said, axis, True))
    passmanager.PassManager.parse(_COLLECTIVES).run(module.operation)
    main = _main(module)
    _open_manual(main, axis)
    return Flat(main, axis, islands, arguments, results, results_split, meshes)


def walk(operation: Any) -> Iterator[Any]:
    """Yield all operations inside of `operation`, in order, outer ones first."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in list(block.operations):
                yield inner.operation
                yield from walk(inner.operation)


def entry(operation: Any, region: int = 0) -> Any:
    """Return the only block of a region."""
    return operation.regions[region].blocks[0]


def split_dimensions(value: Any) -> list[int]:
    """Return the dimensions of a value that the axis between islands splits."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        around = owner.owner.operation
        if around.name != "func.func":
            is_carried = around.name == "stablehlo.while" and _SHARDING in around.attributes
            said = str(around.attributes[_SHARDING]) if is_carried else ""
            return _dimensions(said, value.arg_number)
        described = ir.DictAttr(ir.ArrayAttr(around.attributes["arg_attrs"])[value.arg_number])
        return _dimensions(str(described[_SHARDING]), 0) if _SHARDING in described else []
    attributes = owner.operation.attributes
    if _SHARDING in attributes:
        return _dimensions(str(attributes[_SHARDING]), value.result_number)
    if "out_sharding" in attributes:
        return _dimensions(str(attributes["out_sharding"]), 0)
    return []


def cannot(why: str, operation: Any) -> NoReturn:
    """Raise CannotCut."""
    raise CannotCut(why, operation)


_SOURCE = re.compile(r'"([^"]+\.py)":(\d+)')
_OURS = re.compile(r"/(?:jax|jaxlib|pw/client)/")


def where(operation: Any) -> str:
    """Return the user's line of an operation, if it has one: ` (train.py:12)`."""
    for file, line in _SOURCE.findall(str(operation.location)):
        if not _OURS.search(file):
            return f" ({file.rsplit('/', 1)[-1]}:{line})"
    return ""


def _named(operation: Any) -> str:
    return str(operation.name).partition(".")[2]


def _main(module: Any) -> Any:
    return ir.SymbolTable(module.operation)["main"].operation


def _flatten(module: Any) -> None:
    """Put the bodies of called functions in place of the calls."""
    functions = {
        ir.StringAttr(one.operation.attributes["sym_name"]).value: one.operation
        for one in module.body.operations
        if one.operation.name == "func.func"
    }
    main = functions.pop("main")
    calls = [one for one in walk(main) if one.name in _CALLS]
    while calls:
        call = calls.pop()
        callee = functions[ir.FlatSymbolRefAttr(call.attributes[_CALLS[call.name]]).value]
        body = entry(callee)
        given = dict(zip(body.arguments, call.operands, strict=True))
        before = ir.InsertionPoint(call)
        *steps, last = list(body.operations)
        for step in steps:
            copied = step.operation.clone(before)
            for one in (copied, *walk(copied)):
                replace_operands(one, given)
                if one.name in _CALLS:
                    calls.append(one)
            given.update(zip(step.operation.results, copied.results, strict=True))
        for old, new in zip(call.results, last.operation.operands, strict=True):
            old.replace_all_uses_with(given[new])
        call.erase()
    for function in functions.values():
        function.erase()


def replace_operands(operation: Any, given: dict[Any, Any]) -> None:
    """Let an operation use other values."""
    for at, operand in enumerate(operation.operands):
        if operand in given:
            operation.operands[at] = given[operand]


def _divided(main: Any, name: str, axis: str) -> tuple[list[str], list[list[int]]]:
    """Leave only `axis` in the shardings of arguments or results.

    Returns the rest of each, and the dimensions that `axis` splits.
    """
    if name not in main.attributes:
        return [], []
    inner, split, outer = [], [], []
    described: Any
    for described in ir.ArrayAttr(main.attributes[name]):
        attributes = {one.name: one.attr for one in described}
        said = str(attributes.get(_SHARDING, ""))
        mine = _kept(said, axis, True)
        inner.append(_kept(said, axis, False))
        split.append(_dimensions(mine, 0))
        if said:
            attributes[_SHARDING] = ir.Attribute.parse(mine)
        outer.append(ir.DictAttr.get(attributes))
    main.attributes[name] = ir.ArrayAttr.get(outer)
    return inner, split


def _kept(said: str, axis: str, only: bool) -> str:
    """Return a sharding with `axis` only, or without it."""

    def kept(match: re.Match[str]) -> str:
        entries = [one.strip() for one in match[1].split(",")]
        chosen = [
            one
            for one in entries
            if not one.startswith('"') or (_ENTRY.match(one)[1] == axis) == only  # type: ignore[index]
        ]
        return "{" + ", ".join(one for one in chosen if one) + "}"

    return _LIST.sub(kept, said)


def _open_manual(main: Any, axis: str) -> None:
    """Put the body of each shard_map over `axis` alone in its place: it has one island's shapes already."""
    for one in list(walk(main)):
        if one.name != "sdy.manual_computation":
            continue
        if _ENTRY.findall(str(one.attributes["manual_axes"])) != [axis]:
            continue
        body = entry(one)
        for argument, operand in zip(list(body.arguments), one.operands, strict=True):
            argument.replace_all_uses_with(operand)
        *steps, last = list(body.operations)
        for step in steps:
            step.operation.move_before(one)
        for result, value in zip(one.results, last.operation.operands, strict=True):
            result.replace_all_uses_with(value)
        one.erase()


def _dimensions(said: str, index: int) -> list[int]:
    shardings = re.findall(r"<@[^,<>]*, \[((?:\{[^{}]*\}(?:p\d+)?(?:, )?)*)\]", said)
    if index >= len(shardings):
        return []
    lists = _LIST.findall(shardings[index])
    return [at for at, axes in enumerate(lists) if '"' in axes]


def zeros_of(type_: Any) -> Any:
    """Return a constant of zeros of a tensor type."""
    kind = type_.element_type
    if isinstance(kind, ir.IntegerType):
        zero = "false" if kind.width == 1 else "0"
    else:
        zero = "0.0" if isinstance(kind, ir.FloatType) else "(0.0, 0.0)"
    return ir.Attribute.parse(f"dense<{zero}> : {type_}")
