"""Loops and branches that need other islands: how often a loop runs, and branches as choices."""

from __future__ import annotations

import functools
from typing import Any

from jax.extend.mlir import ir

from pw.core.dtypes import BY_MLIR
from pw.core.sharding import dtype_of
from pw.islands.errors import UncountedLoop, cannot
from pw.islands.flat import (
    calls,
    element_of,
    entry,
    is_call,
    is_token,
    maker,
    operations_of,
    replace_operands,
    returned,
    walk,
)
from pw.islands.plan import Counter

ITERATIONS = 4096
"""Most iterations of an opened loop: each is a computation of its own."""

_LESS = {"LT": 0, "LE": 1}


def iterations(loop: Any) -> tuple[int, Counter]:
    """Return how often a loop runs, and what counts that. Raises CannotCut if it is not known."""
    result = _counted(loop)
    if result is None:
        raise UncountedLoop(
            "a loop needs values of other islands in each iteration, and its values decide how often it "
            "runs. Use jax.lax.scan or fori_loop with a known number of iterations, or call a function for "
            "each iteration",
            loop,
        )
    count, counter = result
    if count > ITERATIONS:
        raise UncountedLoop(
            f"a loop needs values of other islands in each of {count} iterations, and at most {ITERATIONS} "
            "can be run one by one",
            loop,
        )
    return count, counter


def is_counted(loop: Any) -> bool:
    """Whether it is known how often a loop runs, and that is not too often to run it one by one."""
    result = _counted(loop)
    return result is not None and result[0] <= ITERATIONS


def _counted(loop: Any) -> tuple[int, Counter] | None:
    (going,) = returned(entry(loop, 0))
    compare = maker(going)
    if compare is None or compare.name != "stablehlo.compare":
        return None
    direction = str(compare.attributes["comparison_direction"])
    more = next((add for name, add in _LESS.items() if f" {name}" in direction), None)
    counter, limit = compare.operands[0], _number(compare.operands[1])
    if more is None or limit is None or not isinstance(counter.owner, ir.Block):
        return None
    at = counter.arg_number
    start = _number(loop.operands[at])
    step = maker(returned(entry(loop, 1))[at])
    if start is None or step is None or step.name != "stablehlo.add":
        return None
    own = entry(loop, 1).arguments[at]
    sides = list(step.operands)
    if own not in sides:
        return None
    by = _number(sides[1 - sides.index(own)])
    if not by or by < 0:
        return None
    kind = dtype_of(BY_MLIR[str(element_of(own))]).type
    return max(0, -(-(limit + more - start) // by)), Counter(at, kind(start), by)


def _number(value: Any) -> int | None:
    """Return the value of an integer constant, also through conversions and reshapes; None for others."""
    one = maker(value)
    while one is not None and one.name in ("stablehlo.convert", "stablehlo.reshape"):
        one = maker(one.operands[0])
    if one is None or one.name != "stablehlo.constant":
        return None
    dense = ir.DenseElementsAttr(one.attributes["value"])
    if not dense.is_splat or not isinstance(
        ir.RankedTensorType(dense.type).element_type, ir.IntegerType
    ):
        return None
    return int(str(dense.get_splat_value()).split(" :")[0])


def choose(branches: Any) -> None:
    """Put all branches of a choice in its place, and choose among their results; in place.

    Raises:
        CannotCut: a branch calls a function of the client, other than where XLA does it on one device.
    """
    point = ir.InsertionPoint(branches)
    results: list[list[Any]] = []
    for at in range(len(branches.regions)):
        block = entry(branches, at)
        values: dict[Any, Any] = {}
        for one in operations_of(block):
            copied = one.clone(point)
            for inner in (copied, *walk(copied)):
                replace_operands(inner, values)
            if calls(copied):
                _only_in(copied, branches, at, point)
            values.update(zip(one.results, copied.results, strict=True))
        results.append([values.get(value, value) for value in returned(block)])
    (chosen,) = branches.operands
    for place, result in enumerate(branches.results):
        if is_token(result):
            tokens = [own[place] for own in results]
            choice = ir.Operation.create(
                "stablehlo.after_all", [result.type], tokens, loc=branches.location, ip=point
            ).results[0]
            result.replace_all_uses_with(choice)
            continue
        choice = results[-1][place]
        for at in reversed(range(len(results) - 1)):
            flag = chosen if branches.name == "stablehlo.if" else _is(chosen, at, branches, point)
            choice = ir.Operation.create(
                "stablehlo.select",
                [result.type],
                [flag, results[at][place], choice],
                loc=branches.location,
                ip=point,
            ).results[0]
        result.replace_all_uses_with(choice)
    branches.erase()


def _only_in(one: Any, branches: Any, at: int, point: Any) -> None:
    """Let a call of a branch happen only if the branch is taken."""
    if one.name != "stablehlo.if":
        cannot(
            "a function of the script (as of jax.debug.print or io_callback) is called in a loop, or on each "
            "device, inside of a branch (as of jax.lax.cond) that needs values of other islands. Call it "
            "outside of the branch",
            next(filter(is_call, (one, *walk(one)))),
        )
    (chosen,) = branches.operands
    before = ir.InsertionPoint(one)

    def new(name: str, *operands: Any) -> Any:
        kinds = [operands[0].type]
        operation = ir.Operation.create(name, kinds, list(operands), loc=one.location, ip=before)
        return operation.results[0]

    if branches.name == "stablehlo.if":
        flag = chosen if at == 0 else new("stablehlo.not", chosen)
    elif at < len(branches.regions) - 1:
        flag = _is(chosen, at, branches, before)
    else:
        earlier = [_is(chosen, other, branches, before) for other in range(at)]
        flag = new(
            "stablehlo.not", functools.reduce(lambda a, b: new("stablehlo.or", a, b), earlier)
        )
    one.operands[0] = new("stablehlo.and", one.operands[0], flag)


def _is(chosen: Any, at: int, branches: Any, point: Any) -> Any:
    """Return whether an index is `at`."""
    attribute = ir.DenseElementsAttr.get_splat(
        chosen.type, ir.IntegerAttr.get(ir.RankedTensorType(chosen.type).element_type, at)
    )
    number = ir.Operation.create(
        "stablehlo.constant",
        [chosen.type],
        [],
        {"value": attribute},
        loc=branches.location,
        ip=point,
    )
    flag = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
    direction = ir.Attribute.parse("#stablehlo<comparison_direction EQ>")
    return ir.Operation.create(
        "stablehlo.compare",
        [flag],
        [chosen, number.results[0]],
        {"comparison_direction": direction},
        loc=branches.location,
        ip=point,
    ).results[0]
