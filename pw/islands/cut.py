"""Cuts a function for several islands: the entrance of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.extend.mlir import ir

from pw.islands.assignment import Assignment
from pw.islands.division import Divided, divide
from pw.islands.errors import CannotCut, UncountedLoop, cannot
from pw.islands.flat import bytes_of, entry, is_call, is_token, returned, walk, walk_called
from pw.islands.loops import is_counted
from pw.islands.plan import Plan
from pw.islands.planning import plan
from pw.islands.writing import Sides


def cut(
    module: Any,
    assignment: Assignment,
    sides: Callable[[Divided], Sides],
    name: str,
    donated: Collection[int] = (),
    options: bytes = b"",
) -> Plan:
    """Divide a function over all devices, and cut it at the collectives that cross islands.

    A loop that needs other islands, and of which it is not known how often it runs, is not divided: each device
    runs all of it. A warning says so.

    Args:
        module: of MLIR, with shardings; it is changed.
        assignment: the island of each device.
        sides: how arguments and results lie on the islands.
        name: for the user.
        donated: positions of arguments whose buffers it may take.
        options: a serialized `xla.CompileOptionsProto`.

    Raises:
        CannotCut: with the reason.
    """
    results: tuple[str, ...] = ()

    def planned(*, afresh: bool = False) -> Plan:
        nonlocal results
        divided = divide(module, assignment.partitions, options, afresh=afresh)
        results = divided.results
        try:
            return plan(divided, assignment, sides(divided), name, donated)
        except CannotCut as error:
            if error.where and divided.is_of_other:
                return planned(afresh=True)  # which raises it again, with the script's own line
            raise

    text = module.operation.get_asm(binary=True)
    try:
        return planned()
    except UncountedLoop as error:
        module = ir.Module.parse(text, module.context)
        loops = _replicate_loops(module)
        if not loops:
            raise
        _keep_results(module, results)
        size_bytes = sum(bytes_of(value) for loop in loops for value in loop.operands)
        warnings.warn(
            f"a loop of {name!r}{error.where} is not divided over islands, but runs whole on each device: "
            "its iterations need other islands, and are too many, or not counted. "
            f"It carries {size_bytes} bytes",
            RuntimeWarning,
            stacklevel=2,
        )
        return planned()


def _keep_results(module: Any, results: Sequence[str]) -> None:
    """Let the results of a module be divided as these HLO shardings say, if it does not say how; in place."""
    main = ir.SymbolTable(module.operation)["main"]
    described = (
        list(ir.ArrayAttr(main.attributes["res_attrs"])) if "res_attrs" in main.attributes else []
    )
    described = described or [ir.DictAttr.get({}) for _ in results]
    attributes = []
    one: Any
    for one, sharding in zip(described, results, strict=True):
        by_name = {each.name: each.attr for each in one}
        if "sdy.sharding" not in by_name:
            by_name["mhlo.sharding"] = ir.StringAttr.get(sharding)
        attributes.append(ir.DictAttr.get(by_name))
    main.attributes["res_attrs"] = ir.ArrayAttr.get(attributes)


def _replicate_loops(module: Any) -> list[Any]:
    """Let each device run the whole of each loop that is not counted; in place. Returns the loops."""
    meshes = [one.operation for one in module.body.operations if one.operation.name == "sdy.mesh"]
    if not meshes:
        return []
    mesh = ir.StringAttr(meshes[0].attributes["sym_name"]).value
    loops = []
    for function in module.body.operations:
        for one in list(walk(function.operation)):
            if one.name == "stablehlo.while" and not is_counted(one):
                loops.append(one)
    for loop in loops:
        for one in filter(is_call, walk_called(loop, module)):
            _call_on_each(one, mesh)
        for at, value in enumerate(list(loop.operands)):
            loop.operands[at] = _replicate(value, mesh, ir.InsertionPoint(loop), loop)
        for result in loop.results:
            copy = _replicate(result, mesh, ir.InsertionPoint.after(loop), loop)
            result.replace_all_uses_except(copy, copy.owner.operation)
        body = entry(loop, 1)
        last = body.operations[len(body.operations) - 1].operation
        for at, value in enumerate(returned(body)):
            last.operands[at] = _replicate(value, mesh, ir.InsertionPoint(last), loop)
    return loops


def _call_on_each(call: Any, mesh: str) -> None:
    """Let each device call a function of the script for itself, if it makes values; in place.

    Raises:
        CannotCut: the function has effects, so it may be called only once.
    """
    if not [value for value in call.results if not is_token(value)]:
        return
    if (effect := call.attributes.get("has_side_effect")) and ir.BoolAttr(effect).value:
        cannot(
            "a loop that runs whole on each device, because its values decide how often it runs, calls a "
            "function with effects (io_callback) and uses what it returns. Use jax.pure_callback, or a loop "
            "with a known number of iterations",
            call,
        )
    each = ", ".join(f"<{_everywhere(value, mesh)}>" for value in call.results)
    call.attributes["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{each}]>")


def _everywhere(value: Any, mesh: str) -> str:
    """Return in words that each device has the whole of a value."""
    dimensions = ", ".join("{}" for _ in ir.RankedTensorType(value.type).shape)
    return f"@{mesh}, [{dimensions}]"


def _replicate(value: Any, mesh: str, point: Any, loop: Any) -> Any:
    """Return a value that each device has whole."""
    sharding = ir.Attribute.parse(f"#sdy.sharding<{_everywhere(value, mesh)}>")
    constraint = ir.Operation.create(
        "sdy.sharding_constraint",
        [value.type],
        [value],
        {"sharding": sharding},
        loc=loop.location,
        ip=point,
    )
    return constraint.results[0]
