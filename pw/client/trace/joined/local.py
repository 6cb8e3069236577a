"""Rewrites a function for one island's part of every value; in place.

After Shardy has made collectives explicit, an operation on the parts of its operands makes the
parts of its results, so most operations only change their types. Those with sizes or positions in
them are changed here. A value that depends on which part it is (an iota, a constant, a slice of a
whole value) is computed from the number of the island, which is one more argument of the function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.mlir import ir

from pw.client.trace.joined.module import Flat, cannot, entry, split_dimensions, walk, zeros_of

_ELEMENTWISE = """
abs add and atan2 bitcast_convert broadcast_in_dim cbrt ceil cholesky clamp compare complex constant convert
convolution cosine count_leading_zeros divide dot_general dynamic_update_slice exponential
exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum multiply negate
not optimization_barrier or popcnt power real reduce reduce_precision remainder reshape
round_nearest_afz round_nearest_even rsqrt scatter select shift_left shift_right_arithmetic
shift_right_logical sign sine sqrt subtract tan tanh transpose triangular_solve xor while
case if return all_reduce
"""
_SAFE = {f"stablehlo.{name}" for name in _ELEMENTWISE.split()} | {
    "sdy.constant",
    "sdy.all_reduce",
    "sdy.return",
    "func.return",
}


class Localizer:
    """Gives every value of a function the shape that it has on one island.

    Attributes:
        island: the argument with the number of the island, int32.
    """

    def __init__(self, flat: Flat, masked: Sequence[tuple[Any, int]]) -> None:
        self._islands = flat.islands
        block = entry(flat.main)
        number = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        self.island = block.add_argument(number, flat.main.location)
        self._split: dict[Any, list[int]] = {}
        self._last: dict[Any, Any] = {}
        operations = list(walk(flat.main))
        carried = [one for one in operations if one.name == "stablehlo.while"]
        values = [*list(block.arguments)[:-1]]
        for one in operations:
            values.extend(one.results)
        for one in carried:
            for at in range(2):
                values.extend(entry(one, at).arguments)
        for value in values:
            if dimensions := split_dimensions(value):
                self._split[value] = dimensions
        for one in operations:
            if any(value in self._split for value in (*one.operands, *one.results)):
                self._check(one)
        whole = {value: ir.RankedTensorType(value.type) for value in self._split}
        for value, dimensions in self._split.items():
            value.set_type(self._part(value, whole[value], dimensions))
        for one in operations:
            for at, value in enumerate(one.results):
                if value in self._split:
                    self._rewrite(one, at, whole[value], self._split[value])
        for one, at in masked:
            self._mask(one, at)
        _describe(flat.main)

    def _part(self, value: Any, type_: Any, dimensions: Sequence[int]) -> Any:
        shape = list(type_.shape)
        for at in dimensions:
            if shape[at] % self._islands:
                owner = value.owner
                cannot(
                    f"a dimension of size {shape[at]} cannot be split over {self._islands} islands",
                    owner.owner.operation if isinstance(owner, ir.Block) else owner.operation,
                )
            shape[at] //= self._islands
        return ir.RankedTensorType.get(shape, type_.element_type)

    def _check(self, one: Any) -> None:
        if one.name in _SAFE or one.name in _REWRITTEN or one.name.startswith("chlo."):
            return
        if one.name.endswith("rng_bit_generator"):
            cannot(
                "its random numbers depend on the whole shape; use keys of jax.random.key, which divide "
                "(jax_threefry_partitionable)",
                one,
            )
        cannot(f"the operation {one.name.partition('.')[2]} is not known to divide", one)

    def _rewrite(self, one: Any, at: int, whole: Any, dimensions: Sequence[int]) -> None:
        change = _REWRITTEN.get(one.name)
        if change is not None:
            change(self, one, whole, dimensions)
        elif one.name in ("stablehlo.constant", "sdy.constant"):
            self._constant(one, whole, dimensions)

    # --- operations that know sizes -------------------------------------------------------------------

    def _constant(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        (result,) = one.results
        dense = ir.DenseElementsAttr(one.attributes["value"])
        part = result.type
        if dense.is_splat:
            one.attributes["value"] = ir.DenseElementsAttr.get_splat(part, dense.get_splat_value())
            return
        result.set_type(whole)
        self._replace(one, self._taken(one, result, part, dimensions))

    def _all_slice(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        (result,), (operand,) = one.results, one.operands
        mine = [at for at in dimensions if at not in self._split.get(operand, [])]
        result.replace_all_uses_with(self._taken(one, operand, result.type, mine))

    def _iota(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        along = ir.IntegerAttr(one.attributes["iota_dimension"]).value
        if along not in dimensions:
            return
        (result,) = one.results
        part = ir.RankedTensorType(result.type)
        scalar = ir.RankedTensorType.get([], part.element_type)
        size = self._number(one, part.shape[along])
        start = self._after(one, "stablehlo.multiply", self.island.type, [self.island, size])
        start = self._after(one, "stablehlo.convert", scalar, [start])
        dims = ir.DenseI64ArrayAttr.get([])
        wide = self._after(
            one, "stablehlo.broadcast_in_dim", part, [start], broadcast_dimensions=dims
        )
        self._replace(one, self._after(one, "stablehlo.add", part, [result, wide]))

    def _slice(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        starts, limits, strides = (
            list(ir.DenseI64ArrayAttr(one.attributes[name]))
            for name in ("start_indices", "limit_indices", "strides")
        )
        for at in dimensions:
            if starts[at] or limits[at] != whole.shape[at] or strides[at] != 1:
                cannot(f"it takes a part of dimension {at}, which is split over the axis", one)
            limits[at] = ir.RankedTensorType(one.results[0].type).shape[at]
        one.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits)

    def _sizes(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        """Of a dynamic slice."""
        sizes = list(ir.RankedTensorType(one.results[0].type).shape)
        operand = ir.RankedTensorType(one.operands[0].type).shape
        for at in dimensions:
            if sizes[at] != operand[at]:
                cannot(f"it takes a part of dimension {at}, which is split over the axis", one)
        one.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(sizes)

    def _gather(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        operand = one.operands[0]
        sizes = list(ir.DenseI64ArrayAttr(one.attributes["slice_sizes"]))
        part = ir.RankedTensorType(operand.type).shape
        for at in self._split.get(operand, []):
            if sizes[at] == part[at] * self._islands:
                sizes[at] = part[at]
            elif sizes[at] != 1 or at not in _batching(one):
                cannot(f"it looks up elements of dimension {at}, which is split over the axis", one)
        one.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(sizes)

    def _pad(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding"):
            amounts = list(ir.DenseI64ArrayAttr(one.attributes[name]))
            if any(amounts[at] for at in dimensions):
                cannot("it pads a dimension that is split over the axis", one)

    def _other(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        """An operation along one dimension, which is whole."""
        for name in ("dimension", "dimensions"):
            if name in one.attributes:
                said = one.attributes[name]
                along = (
                    [ir.IntegerAttr(said).value]
                    if name == "dimension"
                    else list(ir.DenseI64ArrayAttr(said))
                )
                if set(along) & set(dimensions):
                    cannot("it works along a dimension that is split over the axis", one)

    def _last_dimension(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        if len(whole.shape) - 1 in dimensions:
            cannot("it works along a dimension that is split over the axis", one)

    def _window(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        if any(
            ir.DenseI64ArrayAttr(one.attributes["window_dimensions"])[at] > 1 for at in dimensions
        ):
            cannot("it works along a dimension that is split over the axis", one)

    def _fft(self, one: Any, whole: Any, dimensions: Sequence[int]) -> None:
        lengths = len(ir.DenseI64ArrayAttr(one.attributes["fft_length"]))
        if any(at >= len(whole.shape) - lengths for at in dimensions):
            cannot("it works along a dimension that is split over the axis", one)

    # --- new operations ---------------------------------------------------------------------------

    def _mask(self, one: Any, at: int) -> None:
        """Let an operand count on the first island only."""
        value = one.operands[at]
        point = ir.InsertionPoint(one)
        type_ = ir.RankedTensorType(value.type)
        zero = _new("stablehlo.constant", type_, [], one, point, value=zeros_of(type_))
        none = self._number(one, 0, point)
        flag = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
        direction = ir.Attribute.parse("#stablehlo<comparison_direction EQ>")
        first = _new(
            "stablehlo.compare",
            flag,
            [self.island, none],
            one,
            point,
            comparison_direction=direction,
        )
        one.operands[at] = _new("stablehlo.select", type_, [first, value, zero], one, point)

    def _taken(self, one: Any, value: Any, part: Any, dimensions: Sequence[int]) -> Any:
        """Return this island's part of a whole value."""
        sizes = list(ir.RankedTensorType(part).shape)
        none = self._number(one, 0)
        starts = []
        for at, size in enumerate(sizes):
            if at in dimensions:
                length = self._number(one, size)
                starts.append(
                    self._after(one, "stablehlo.multiply", self.island.type, [self.island, length])
                )
            else:
                starts.append(none)
        return self._after(
            one,
            "stablehlo.dynamic_slice",
            part,
            [value, *starts],
            slice_sizes=ir.DenseI64ArrayAttr.get(sizes),
        )

    def _number(self, one: Any, value: int, point: Any = None) -> Any:
        dense = ir.DenseElementsAttr.get_splat(
            self.island.type, ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
        )
        if point is None:
            return self._after(one, "stablehlo.constant", self.island.type, [], value=dense)
        return _new("stablehlo.constant", self.island.type, [], one, point, value=dense)

    def _after(
        self, one: Any, name: str, type_: Any, operands: list[Any], **attributes: Any
    ) -> Any:
        """Insert an operation behind `one` and those inserted there before."""
        last = self._last.get(one, one)
        made = _create(name, type_, operands, one, ir.InsertionPoint(one), attributes)
        made.move_after(last)
        self._last[one] = made
        return made.results[0]

    def _replace(self, one: Any, value: Any) -> None:
        """Let all users of `one` use `value`, but the operations that made it of it."""
        (result,) = one.results
        result.replace_all_uses_except(value, value.owner.operation)


def _describe(main: Any) -> None:
    """Let the function's signature be what its body is, so that it can be verified."""
    block = entry(main)
    types = [value.type for value in block.arguments]
    last = block.operations[len(block.operations) - 1].operation
    kinds = [value.type for value in last.operands]
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, kinds))
    described = (
        list(ir.ArrayAttr(main.attributes["arg_attrs"])) if "arg_attrs" in main.attributes else []
    )
    described += [ir.DictAttr.get({})] * (len(types) - len(described))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(described)


def _new(
    name: str, type_: Any, operands: list[Any], like: Any, point: Any, **attributes: Any
) -> Any:
    return _create(name, type_, operands, like, point, attributes).results[0]


def _create(
    name: str, type_: Any, operands: list[Any], like: Any, point: Any, attributes: dict[str, Any]
) -> Any:
    return ir.Operation.create(
        name,
        [type_],
        operands,
        attributes,
        loc=like.location,
        ip=point if point is not None else False,
    )


def _batching(gather: Any) -> list[int]:
    """Return the dimensions of a gather's operand in which each index has its own part."""
    found = re.search(
        r"operand_batching_dims = \[([\d, ]*)\]", str(gather.attributes["dimension_numbers"])
    )
    return [int(at) for at in found[1].split(",")] if found else []


_REWRITTEN: dict[str, Callable[..., None]] = {
    "sdy.all_slice": Localizer._all_slice,
    "stablehlo.iota": Localizer._iota,
    "stablehlo.slice": Localizer._slice,
    "stablehlo.dynamic_slice": Localizer._sizes,
    "stablehlo.gather": Localizer._gather,
    "stablehlo.pad": Localizer._pad,
    "stablehlo.concatenate": Localizer._other,
    "stablehlo.reverse": Localizer._other,
    "stablehlo.sort": Localizer._other,
    "stablehlo.reduce_window": Localizer._window,
    "stablehlo.fft": Localizer._fft,
    "chlo.top_k": Localizer._last_dimension,
}
