"""Loops that each island may end by its own part: those that `jax.vmap` makes of `while_loop`s.

Such a loop goes on while any element does, and selects for elements that have ended what they were. So an
island whose elements have all ended would only repeat them until the last one of the others has ended: it
may leave at once, with the same bits, and the islands need not ask each other in each iteration.
"""

from __future__ import annotations

from typing import Any

from pw.islands.assignment import Assignment
from pw.islands.flat import calls, entry, maker, returned, walk
from pw.islands.groups import REDUCE, dense, groups_of, is_crossing
from pw.islands.partial_sums import reducer

_OR = "stablehlo.or"
_MOVES = {
    "stablehlo.reshape",
    "stablehlo.broadcast_in_dim",
    "stablehlo.transpose",
    "stablehlo.slice",
}
"""Operations that make only false of booleans that are all false."""


def end_by_island(main: Any, assignment: Assignment) -> None:
    """Let each island end its part of a loop where no value depends on when the others end; in place."""
    loops = [one for one in walk(main) if one.name == "stablehlo.while"]
    for loop in reversed(loops):  # inner ones first: an outer one may be free of collectives then
        if (ending := _ending(loop, assignment)) is not None:
            groups = [
                [one for one in group if assignment.islands[one] == island]
                for group in groups_of(ending)
                for island in range(assignment.count)
            ]
            ending.attributes["replica_groups"] = dense([group for group in groups if group])


def _ending(loop: Any, assignment: Assignment) -> Any:
    """Return the collective that tells islands whether any element goes on; None if they need more."""
    condition, body = entry(loop, 0), entry(loop, 1)
    crossing = [one for one in walk(loop) if is_crossing(one, assignment)]
    asked = _moved(returned(condition)[0])
    if len(crossing) != 1 or asked != crossing[0].results[0] or calls(loop):
        return None
    if crossing[0].name != REDUCE or reducer(crossing[0]) != _OR:
        return None
    goes_on = _elements(crossing[0].operands[0])
    same = _Same(dict(zip(condition.arguments, body.arguments, strict=True)))
    ends = zip(returned(body), body.arguments, strict=True)
    is_kept = all(value == was or _keeps(value, was, goes_on, same) for value, was in ends)
    return crossing[0] if is_kept else None


def _keeps(value: Any, was: Any, goes_on: Any, same: _Same) -> bool:
    """Whether a value is what it was wherever no element goes on."""
    one = maker(value)
    if one is None or one.name != "stablehlo.select" or one.operands[2] != was:
        return False
    return _is_false(one.operands[0], goes_on, same)


def _is_false(value: Any, goes_on: Any, same: _Same) -> bool:
    """Whether booleans are false where no element goes on."""
    if same(goes_on, value):
        return True
    one = maker(value)
    if one is None:
        return False
    if one.name == "stablehlo.and":
        return any(_is_false(operand, goes_on, same) for operand in one.operands)
    return one.name in _MOVES and _is_false(one.operands[0], goes_on, same)


def _elements(value: Any) -> Any:
    """Return the booleans of which a value says whether any is true."""
    while (one := maker(value := _moved(value))) is not None:
        if one.name != "stablehlo.reduce" or reducer(one) != _OR or len(one.operands) != 2:
            break
        value = one.operands[0]
    return value


def _moved(value: Any) -> Any:
    """Return the value of which a value is a reshape."""
    while (one := maker(value)) is not None and one.name == "stablehlo.reshape":
        value = one.operands[0]
    return value


class _Same:
    """Whether a value of a loop's condition is computed as one of its body.

    Args:
        arguments: by argument of the condition the body's.
    """

    def __init__(self, arguments: dict[Any, Any]) -> None:
        self._arguments = arguments
        self._results: dict[tuple[Any, Any], bool] = {}

    def __call__(self, left: Any, right: Any) -> bool:
        """Whether both are one value, if both blocks have the same arguments."""
        if left == right or left in self._arguments:
            return bool(left == right or self._arguments[left] == right)
        if (left, right) not in self._results:
            self._results[left, right] = self._is_equal(left, right)
        return self._results[left, right]

    def _is_equal(self, left: Any, right: Any) -> bool:
        one, other = maker(left), maker(right)
        if one is None or other is None or one.name != other.name:
            return False
        if left.result_number != right.result_number or len(one.operands) != len(other.operands):
            return False
        if len(one.regions) != 0 and (reducer(one) is None or reducer(one) != reducer(other)):
            return False
        if _described(one) != _described(other):
            return False
        return all(map(self, one.operands, other.operands))


def _described(one: Any) -> dict[str, Any]:
    attributes = {name: one.attributes[name] for name in one.attributes if name != "channel_handle"}
    return attributes | {"types": [result.type for result in one.results]}
