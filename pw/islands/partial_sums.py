"""Finds where a function needs sums over islands.

XLA puts an all-reduce behind each operation that adds up over devices. The value before it is *partial*:
the sum of the values of all devices of a group is meant. A linear operation on partial values makes partial
values, so the sum can wait: behind a loop over layers that stacks gradients, or over micro-batches that
adds them. Outside of loops a sum waits only where that is free. Where another operation needs the value, it
is *reduced*.

A loop that needs a sum, or another collective between islands, in each iteration is *opened*: its body is
cut like a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.mlir import ir

from pw.islands.assignment import Assignment
from pw.islands.flat import element_of, elements_of, entry, returned, used_by
from pw.islands.groups import REDUCE, Aligned, Groups, aligned, groups_of, is_crossing
from pw.islands.labels import LabelsOf
from pw.islands.reductions import part_of_islands
from pw.islands.tables import Tables


@dataclass(frozen=True, eq=False)
class Sum:
    """A reduction of the values of a group's devices."""

    kind: str
    """The operation of StableHLO that combines two elements."""
    groups: Groups
    aligned: Aligned
    along: int | None = None
    """The dimension of which each island takes one part; None if each takes all."""


Flag = str | Sum
"""State of a value on each device: ZERO, COMPLETE, or the part of a sum."""
ZERO = "zeros: whole and partial at once"
COMPLETE = "complete"

_ADD = "stablehlo.add"
_KINDS = {
    _ADD,
    "stablehlo.or",
    "stablehlo.and",
    "stablehlo.maximum",
    "stablehlo.minimum",
    "stablehlo.multiply",
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
_ADDS = {_ADD, "stablehlo.subtract", "stablehlo.concatenate"}
_LOOPS = {"stablehlo.while"}
_CHOICES = {"stablehlo.case", "stablehlo.if"}


class _MustOpen(Exception):
    """A loop, or a branch, needs other islands inside."""


class Sums:
    """The partial values of a block.

    Attributes:
        reduced: the values that are reduced, in program order, and how.
        exchanged: the other collectives between islands.
        opened: the loops and branches whose bodies need other islands.
        masked: (operation, operand) pairs; these operands count on one device of each group only.
    """

    def __init__(self, block: Any, assignment: Assignment, labels: LabelsOf) -> None:
        self.reduced: dict[Any, Sum] = {}
        self.exchanged: list[Any] = []
        self.opened: list[Any] = []
        self.masked: list[tuple[Any, int, Groups]] = []
        self._assignment = assignment
        self._labels = labels
        self._flags: dict[Any, Flag] = {}
        self._sums: dict[tuple[str, Groups], Sum | None] = {}
        self._parts: dict[tuple[Sum, int], Sum] = {}
        self._tables = Tables(assignment.partitions)
        self._flags.update(dict.fromkeys(block.arguments, COMPLETE))
        self._block(block, False)
        for value in returned(block):
            self._reduce(value, False)
        order = {value: at for at, one in enumerate(block.operations) for value in one.results}
        self.reduced = dict(sorted(self.reduced.items(), key=lambda item: order[item[0]]))

    # --- blocks -----------------------------------------------------------------------------------

    def _block(self, block: Any, is_inside: bool) -> None:
        """Find the flags of a block; `is_inside` says whether it is one of a loop or a branch."""
        for one in block.operations:
            operation = one.operation
            if operation.name.endswith(".return"):
                continue
            if is_crossing(operation, self._assignment):
                self._collective(operation, is_inside)
            elif operation.name in _LOOPS | _CHOICES:
                self._region(operation, is_inside)
            else:
                self._simple(operation, is_inside)

    def _simple(self, operation: Any, is_inside: bool) -> None:
        flag = self._flag_of(operation, is_inside) or self._part_of(operation, is_inside)
        if flag is None:
            for operand in operation.operands:
                self._reduce(operand, is_inside)
            flag = ZERO if self._is_zero(operation) else COMPLETE
        self._flags.update(dict.fromkeys(operation.results, flag))

    def _reduce(self, value: Any, is_inside: bool) -> None:
        """Have a value reduced, because it is needed."""
        flag = self._flags.get(value)
        if not isinstance(flag, Sum):
            return
        if value in self.reduced:
            return
        if is_inside:
            raise _MustOpen
        self.reduced[value] = flag

    def _collective(self, operation: Any, is_inside: bool) -> None:
        total = self._sum_of(operation)
        if total is None:
            for operand in operation.operands:
                self._reduce(operand, is_inside)
            if is_inside:
                raise _MustOpen
            self.exchanged.append(operation)
            self._flags.update(dict.fromkeys(operation.results, COMPLETE))
            return
        operand, result = operation.operands[0], operation.results[0]
        self._reduce(operand, is_inside)
        if total.kind == _ADD:
            self._flags[result] = total
            if not is_inside and not self._can_wait(result):
                self.reduced[result] = total
        elif is_inside:
            raise _MustOpen
        else:
            self._flags[result] = COMPLETE
            self.reduced[result] = total

    def _sum_of(self, operation: Any) -> Sum | None:
        """Return what a collective adds up; None if it is no simple reduction."""
        if operation.name != REDUCE or len(operation.operands) != 1:
            return None
        kind, groups = reducer(operation), groups_of(operation)
        if kind is None:
            return None
        if (kind, groups) not in self._sums:
            lies = aligned(groups, self._assignment)
            self._sums[kind, groups] = None if lies is None else Sum(kind, groups, lies)
        return self._sums[kind, groups]

    # --- loops and branches -----------------------------------------------------------------------

    def _region(self, operation: Any, is_inside: bool) -> None:
        saved = dict(self.reduced), list(self.masked), dict(self._flags)
        try:
            if operation.name in _LOOPS:
                self._loop(operation, is_inside)
            else:
                self._choice(operation, is_inside)
        except _MustOpen:
            self.reduced, self.masked, self._flags = saved
            if is_inside:
                raise
            for value in operation.operands:
                self._reduce(value, False)
            self.opened.append(operation)
            self._flags.update(dict.fromkeys(operation.results, COMPLETE))

    def _loop(self, operation: Any, is_inside: bool) -> None:
        starts = [self._flags.get(value, COMPLETE) for value in operation.operands]
        flags: list[Flag] = [ZERO if flag == ZERO else COMPLETE for flag in starts]
        masked = list(self.masked)
        condition, body = entry(operation, 0), entry(operation, 1)
        while True:
            self.masked = list(masked)
            for block in (condition, body):
                self._flags.update(zip(block.arguments, flags, strict=True))
                self._block(block, True)
            ends = [self._flags.get(value, COMPLETE) for value in returned(body)]
            after = [_join(*pair) for pair in zip(flags, ends, strict=True)]
            if after == flags:
                break
            flags = after
        for value in returned(condition):
            self._reduce(value, True)
        carried = zip(operation.operands, flags, ends, strict=True)
        for at, (value, flag, end) in enumerate(carried):
            if isinstance(flag, Sum):
                if end == COMPLETE:
                    raise _MustOpen  # a sum in some iterations only
                if starts[at] == COMPLETE:
                    self.masked.append((operation, at, flag.groups))
                elif isinstance(starts[at], Sum) and starts[at] != flag:
                    raise _MustOpen
            else:
                self._reduce(value, is_inside)
            self._flags[operation.results[at]] = flag

    def _choice(self, operation: Any, is_inside: bool) -> None:
        for value in used_by(operation):  # branches have no sums inside
            self._reduce(value, is_inside)
        ends: list[list[Flag]] = []
        for at in range(len(operation.regions)):
            block = entry(operation, at)
            self._block(block, True)
            ends.append([self._flags.get(value, COMPLETE) for value in returned(block)])
        for at, result in enumerate(operation.results):
            kinds = {branch[at] for branch in ends} - {ZERO}
            if len(kinds) > 1:
                raise _MustOpen  # a branch makes a sum, and another one does not
            self._flags[result] = kinds.pop() if kinds else ZERO

    # --- operations -------------------------------------------------------------------------------

    def _flag_of(self, operation: Any, is_inside: bool) -> Flag | None:
        """Return the flag of a linear operation on partial values; None if it is not one."""
        operands = list(operation.operands)
        flags = [self._flags.get(value, COMPLETE) for value in operands]
        sums = {flag for flag in flags if isinstance(flag, Sum)}
        if len(sums) != 1 or not self._is_linear(operation, flags):
            return None
        (total,) = sums
        for value, flag in zip(operands, flags, strict=True):
            if flag == COMPLETE and not self._is_equal(value, total.groups):
                return None  # each device of a group would weigh its part otherwise
            is_early = value in self.reduced or not self._can_wait(value)
            if flag is total and not is_inside and is_early:
                return None
        return total

    def _part_of(self, operation: Any, is_inside: bool) -> Flag | None:
        """Note the slice of a sum of which each island takes one part."""
        if operation.name != "stablehlo.dynamic_slice":
            return None
        value = operation.operands[0]
        total = self._flags.get(value)
        if not isinstance(total, Sum) or len(list(value.uses)) != 1:
            return None
        along = part_of_islands(operation, total.aligned, self._assignment, self._tables)
        if along is None:
            return None
        if is_inside:
            raise _MustOpen
        self.reduced.pop(value, None)
        if (total, along) not in self._parts:
            self._parts[total, along] = replace(total, along=along)
        self.reduced[operation.results[0]] = self._parts[total, along]
        return COMPLETE

    def _is_equal(self, value: Any, groups: Groups) -> bool:
        labels = self._labels[value]
        return all(len({labels[one] for one in group}) == 1 for group in groups)

    def _can_wait(self, value: Any) -> bool:
        """Whether a value outside of loops has one use, which makes no more elements of it."""
        uses = list(value.uses)
        if len(uses) != 1 or uses[0].owner.operation.name.endswith(".return"):
            return False
        user = uses[0].owner.operation
        owner = value.owner
        if user.parent != (owner.owner if isinstance(owner, ir.Block) else owner.parent):
            return False  # a branch uses it, which has no sums inside
        return user.name in _MOVES | _ADDS | {"stablehlo.convert"} and all(
            elements_of(result) <= sum(elements_of(one) for one in user.operands)
            for result in user.results
        )

    def _is_linear(self, operation: Any, flags: Sequence[Flag]) -> bool:
        name = operation.name
        is_sum = [isinstance(flag, Sum) for flag in flags]
        is_partial = [flag != COMPLETE for flag in flags]
        if name in _MOVES:
            return True
        if name in _ADDS or name == "stablehlo.optimization_barrier":
            return all(is_partial)
        if name == "stablehlo.convert":
            return _is_widening(operation)
        if name == "stablehlo.multiply":
            return sum(is_sum) == 1
        if name in ("stablehlo.divide", "stablehlo.dynamic_slice"):
            return is_sum[0] and not any(is_sum[1:])
        if name == "stablehlo.select":
            return flags[0] == COMPLETE and all(is_partial[1:])
        if name == "stablehlo.dynamic_update_slice":
            return all(is_partial[:2]) and not any(is_sum[2:])
        if name == "stablehlo.pad":
            return all(is_partial)
        if name in ("stablehlo.reduce", REDUCE):
            return all(is_partial) and reducer(operation) == _ADD
        return False

    def _is_zero(self, operation: Any) -> bool:
        name = operation.name
        if name == "stablehlo.constant":
            if isinstance(element_of(operation.results[0]), ir.ComplexType):
                # Python has no attributes of complex numbers.
                return _COMPLEX_ZEROS in str(operation)
            dense = ir.DenseElementsAttr(operation.attributes["value"])
            return dense.is_splat and str(dense.get_splat_value()).split(" :")[0] in _ZEROS
        if name in _MOVES or name in ("stablehlo.convert", "stablehlo.optimization_barrier"):
            return all(self._flags.get(value) == ZERO for value in operation.operands)
        return False


_ZEROS = {"0", "false", "0.000000e+00"}
_COMPLEX_ZEROS = "dense<(0.000000e+00,0.000000e+00)>"


def _join(start: Flag, end: Flag) -> Flag:
    if isinstance(start, Sum) and isinstance(end, Sum) and start != end:
        raise _MustOpen
    for flag in (start, end):
        if isinstance(flag, Sum):
            return flag
    return COMPLETE if COMPLETE in (start, end) else ZERO


def reducer(operation: Any) -> str | None:
    """Return the operation by which a reduction combines two elements; None if it is a longer one."""
    if len(operation.regions) != 1 or not operation.regions[0].blocks:
        return None
    steps = [one.operation for one in entry(operation).operations]
    if len(steps) != 2 or steps[0].name not in _KINDS:
        return None
    return str(steps[0].name)


def _is_widening(operation: Any) -> bool:
    """Whether a conversion keeps each value as it is, so that the sum may come after it."""
    kinds = [element_of(one) for one in (operation.operands[0], operation.results[0])]
    if not all(isinstance(kind, ir.FloatType) for kind in kinds):
        return False
    return bool(kinds[0].width <= kinds[1].width)
