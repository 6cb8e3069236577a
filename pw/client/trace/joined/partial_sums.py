"""Finds where the function needs sums over islands.

Shardy puts a reduction behind each operation that adds up over the axis between islands. Here the
value before the reduction is *partial*: the sum of all islands' values is meant. A linear operation
on partial values makes partial values, so the sum can wait: behind a loop over layers that stacks
gradients, or over micro-batches that adds them. Outside of loops a sum waits only where that is
free. Where another operation needs the value, it is *reduced*: one transfer between islands.

A reduction inside of a loop that cannot move behind it would need the other islands in each
iteration, so it raises.
"""

from __future__ import annotations

import math
import re
from enum import IntEnum
from typing import Any

from jax.extend.mlir import ir

from pw.client.trace.joined.module import CannotCut, Flat, cannot, entry, split_dimensions, where

__all__ = ["CannotCut", "Sums"]


class Flag(IntEnum):
    """What a value is on each island."""

    ZERO = 0
    """Zeros: whole and partial at once."""
    WHOLE = 1
    PARTIAL = 2


_ZEROS = re.compile(r" dense<(?:0|false|0\.0+e\+00|\(0\.0+e\+00,0\.0+e\+00\))> :")
_KINDS = {
    "stablehlo.add": "add",
    "stablehlo.or": "max",
    "stablehlo.and": "min",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
}
_MOVES = {
    "stablehlo.transpose",
    "stablehlo.reshape",
    "stablehlo.broadcast_in_dim",
    "stablehlo.slice",
    "stablehlo.reverse",
    "stablehlo.negate",
    "stablehlo.real",
    "stablehlo.imag",
}
_ADDS = {"stablehlo.add", "stablehlo.subtract", "stablehlo.concatenate"}
_LOOPS = {"stablehlo.while"}
_CHOICES = {"stablehlo.case", "stablehlo.if"}
_REDUCES = {"sdy.all_reduce", "stablehlo.all_reduce"}
_ELSEWHERE = {
    "sdy.all_gather": "an all-gather",
    "sdy.all_to_all": "an all-to-all",
    "sdy.collective_permute": "a permutation",
    "sdy.reduce_scatter": "a reduce-scatter",
    "sdy.reshard": "a re-sharding",
    "sdy.manual_computation": "a shard_map over several mesh axes",
    "stablehlo.all_gather": "an all-gather",
    "stablehlo.all_to_all": "an all-to-all",
    "stablehlo.collective_permute": "a permutation",
    "stablehlo.collective_broadcast": "a broadcast",
    "stablehlo.reduce_scatter": "a reduce-scatter",
    "stablehlo.partition_id": "an axis_index",
    "stablehlo.replica_id": "an axis_index",
}


class Sums:
    """The partial values of a function.

    Attributes:
        reduced: the values that are reduced, in program order, each with "add", "max" or "min".
        masked: (operation, operand) pairs; these operands count on the first island only, because
            their operation adds up over islands.
    """

    def __init__(self, flat: Flat) -> None:
        self.reduced: dict[Any, str] = {}
        self.masked: list[tuple[Any, int]] = []
        self._flags: dict[Any, Flag] = {}
        block = entry(flat.main)
        for argument in block.arguments:
            self._flags[argument] = Flag.WHOLE
        self._block(block, None)
        for value in block.operations[len(block.operations) - 1].operation.operands:
            self._whole(value, None, None)
        made = {value: at for at, one in enumerate(block.operations) for value in one.results}
        self.reduced = dict(sorted(self.reduced.items(), key=lambda item: made[item[0]]))

    # --- blocks -----------------------------------------------------------------------------------

    def _block(self, block: Any, loop: Any) -> None:
        """Find the flags of a block; `loop` is the loop or choice around it."""
        for one in block.operations:
            operation = one.operation
            if operation.name.endswith(".return"):
                continue
            if operation.name in _REDUCES:
                self._reduction(operation, loop)
            elif operation.name in _LOOPS:
                self._loop(operation, loop)
            elif operation.name in _CHOICES:
                self._choice(operation, loop)
            else:
                if operation.name in _ELSEWHERE:
                    cannot(
                        f"{_ELSEWHERE[operation.name]} of {_short(operation)} would go between islands",
                        operation,
                    )
                flag = self._flag_of(operation, loop is not None)
                if flag is None:
                    for operand in operation.operands:
                        self._whole(operand, operation, loop)
                    flag = Flag.ZERO if self._is_zero(operation) else Flag.WHOLE
                for result in operation.results:
                    self._flags[result] = flag

    def _whole(self, value: Any, user: Any, loop: Any) -> None:
        """`user` needs the reduced value."""
        if self._flags.get(value) is not Flag.PARTIAL:
            return
        if loop is not None:
            cannot(
                f"a sum over islands is needed inside of a loop or a branch, by {_name(user)}; a "
                "function is cut at sums outside of loops, and at those that a loop only stacks or adds up",
                user,
            )
        self.reduced.setdefault(value, "add")

    def _reduction(self, operation: Any, loop: Any) -> None:
        result = operation.results[0]
        kind, producer = _kind(operation)
        if kind == "add":
            if producer is not None:
                self._check_start(producer, loop)
            self._flags[result] = Flag.PARTIAL
            if loop is None and not self._can_wait(result):
                self.reduced[result] = "add"
        elif loop is not None:
            cannot(f"a {kind} over islands is needed inside of a loop or a branch", operation)
        else:
            self._flags[result] = Flag.WHOLE
            self.reduced[result] = kind

    def _check_start(self, producer: Any, loop: Any) -> None:
        """What a sum starts from counts once, not once for each island."""
        if producer.name == "stablehlo.scatter":
            starts = range((len(producer.operands) - 1) // 2)
        elif producer.name == "stablehlo.reduce":
            starts = range(len(producer.operands) // 2, len(producer.operands))
        else:
            return
        for at in starts:
            value = producer.operands[at]
            if self._flags.get(value) is not Flag.ZERO:
                if self._flags.get(value) is Flag.PARTIAL:
                    self._whole(value, producer, loop)
                self.masked.append((producer, at))

    # --- loops and branches -----------------------------------------------------------------------

    def _loop(self, operation: Any, loop: Any) -> None:
        starts = [self._flags.get(value, Flag.WHOLE) for value in operation.operands]
        flags = [Flag.ZERO if flag is Flag.ZERO else Flag.WHOLE for flag in starts]
        saved, masked = dict(self.reduced), list(self.masked)
        condition, body = entry(operation, 0), entry(operation, 1)
        while True:
            self.reduced, self.masked = dict(saved), list(masked)
            for block in (condition, body):
                self._flags.update(zip(block.arguments, flags, strict=True))
                self._block(block, operation)
            ends = [self._flags.get(value, Flag.WHOLE) for value in _returned(body)]
            after = [_join(*pair) for pair in zip(flags, ends, strict=True)]
            if after == flags:
                break
            flags = after
        for value in _returned(condition):
            self._whole(value, operation, operation)
        for at, (value, flag, end) in enumerate(zip(operation.operands, flags, ends, strict=True)):
            if flag is Flag.PARTIAL:
                if end is Flag.WHOLE:
                    cannot(
                        "a loop carries a value that is a sum over islands in some iterations only",
                        operation,
                    )
                if starts[at] is Flag.WHOLE:
                    self.masked.append((operation, at))
            else:
                self._whole(value, operation, loop)
            self._flags[operation.results[at]] = flag

    def _choice(self, operation: Any, loop: Any) -> None:
        for value in operation.operands:
            self._whole(value, operation, loop)
        ends: list[list[Flag]] = []
        for at in range(len(operation.regions)):
            self._block(entry(operation, at), operation)
            ends.append([self._flags.get(v, Flag.WHOLE) for v in _returned(entry(operation, at))])
        for at, result in enumerate(operation.results):
            found = {branch[at] for branch in ends}
            if found == {Flag.WHOLE, Flag.PARTIAL} or found == set(Flag):
                cannot("a branch makes a sum over islands and another branch does not", operation)
            self._flags[result] = max(found)

    # --- operations -------------------------------------------------------------------------------

    def _flag_of(self, operation: Any, is_inside: bool) -> Flag | None:
        """Return the flag of a linear operation on partial values; None if it is not one."""
        operands = list(operation.operands)
        flags = [self._flags.get(value, Flag.WHOLE) for value in operands]
        if Flag.PARTIAL not in flags:
            return None
        if not self._is_linear(operation, flags):
            return None
        if any(split_dimensions(result) for result in operation.results):
            return None
        if not is_inside:
            for value, flag in zip(operands, flags, strict=True):
                if flag is Flag.PARTIAL and (value in self.reduced or not self._can_wait(value)):
                    return None
        return Flag.PARTIAL

    def _can_wait(self, value: Any) -> bool:
        """Whether a value outside of loops has one use, which makes no more elements of it."""
        uses = list(value.uses)
        if len(uses) != 1 or uses[0].owner.operation.name.endswith(".return"):
            return False
        user = uses[0].owner.operation
        return user.name in _MOVES | _ADDS | {"stablehlo.convert"} and all(
            _elements(result) <= sum(_elements(one) for one in user.operands)
            for result in user.results
        )

    def _is_linear(self, operation: Any, flags: list[Flag]) -> bool:
        name = operation.name
        partial_or_zero = [flag is not Flag.WHOLE for flag in flags]
        if name in _MOVES:
            return True
        if name in _ADDS or name == "stablehlo.optimization_barrier":
            return all(partial_or_zero)
        if name == "stablehlo.convert":
            return _is_widening(operation)
        if name == "stablehlo.multiply":
            return flags.count(Flag.PARTIAL) == 1
        if name in ("stablehlo.divide", "stablehlo.dynamic_slice"):
            return flags[0] is Flag.PARTIAL and Flag.PARTIAL not in flags[1:]
        if name == "stablehlo.select":
            return flags[0] is Flag.WHOLE and all(partial_or_zero[1:])
        if name == "stablehlo.dynamic_update_slice":
            return all(partial_or_zero[:2]) and Flag.PARTIAL not in flags[2:]
        if name == "stablehlo.pad":
            return all(partial_or_zero)
        if name == "stablehlo.reduce":
            return all(partial_or_zero) and _reducer(operation) == "add"
        return False

    def _is_zero(self, operation: Any) -> bool:
        name = operation.name
        if name in ("stablehlo.constant", "sdy.constant"):
            return _ZEROS.search(str(operation)) is not None
        if name in _MOVES or name in ("stablehlo.convert", "stablehlo.optimization_barrier"):
            return all(self._flags.get(value) is Flag.ZERO for value in operation.operands)
        return False


def _join(start: Flag, end: Flag) -> Flag:
    if Flag.PARTIAL in (start, end):
        return Flag.PARTIAL
    return max(start, end)


def _returned(block: Any) -> list[Any]:
    return list(block.operations[len(block.operations) - 1].operation.operands)


def _kind(operation: Any) -> tuple[str, Any]:
    """Return how a reduction combines values, and the operation that it completes, if Shardy put it there."""
    if operation.name == "stablehlo.all_reduce":
        kind = _reducer(operation)
        if kind is None:
            cannot("it reduces between islands with a function of its own", operation)
        return kind, None
    producer = operation.operands[0].owner
    producer = None if isinstance(producer, ir.Block) else producer.operation
    if producer is not None and producer.name in ("stablehlo.dot_general", "stablehlo.convolution"):
        return "add", producer
    kind = None if producer is None else _reducer(producer)
    if kind is None:
        cannot(
            f"a reduction of {_short(operation)} that is no sum, max or min would go between islands",
            operation,
        )
    return kind, producer


def _reducer(operation: Any) -> str | None:
    """Return how an operation with a body combines two elements; None if it does something else."""
    if len(operation.regions) != 1 or not operation.regions[0].blocks:
        return None
    steps = [one.operation for one in entry(operation).operations]
    if len(steps) != 2:
        return None
    is_bits = steps[0].name in ("stablehlo.or", "stablehlo.and")
    return None if is_bits and _width(steps[0]) != 1 else _KINDS.get(steps[0].name)


def _width(operation: Any) -> int:
    return int(ir.IntegerType(ir.RankedTensorType(operation.results[0].type).element_type).width)


def _is_widening(operation: Any) -> bool:
    """Whether a conversion keeps each value as it is, so that the sum may come after it."""
    kinds: list[Any] = [
        ir.RankedTensorType(one.type).element_type
        for one in (operation.operands[0], operation.results[0])
    ]
    if not all(isinstance(kind, ir.FloatType) for kind in kinds):
        return False
    return bool(kinds[0].width <= kinds[1].width)


def _elements(value: Any) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


def _name(operation: Any) -> str:
    return (
        "the result"
        if operation is None
        else f"{operation.name.partition('.')[2]}{where(operation)}"
    )


def _short(operation: Any) -> str:
    type_ = ir.RankedTensorType(operation.operands[0].type) if len(operation.operands) else None
    return (
        "a value" if type_ is None else f"{type_.element_type}[{','.join(map(str, type_.shape))}]"
    )
