"""Sums over islands: what goes into a bucket, how its parts are added, and what comes out.

A bucket is reduced by a reduce-scatter and an all-gather over the devices of the islands (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, give the bound of 2 (N -
1) / N times the size): the devices of an island add up their values first, each for its own part of the
bucket. Of that part each island adds one piece, in the order of the islands, and sends the sum to the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir

from pw.islands.emit import Emit
from pw.islands.flat import bytes_of, element_of, elements_of, shape_of
from pw.islands.partial_sums import Sum

SMALL_BYTES = 64 << 10
"""Most bytes of a bucket that is added on every island: one transfer takes less time than two."""


@dataclass(eq=False)
class Bucket:
    """Values of one dtype that are reduced together."""

    index: int
    sum: Sum
    values: list[Any]
    """Values of the bucket; each is flattened, one after the other."""

    @property
    def elements(self) -> int:
        """Return the number of elements on a device."""
        return sum(elements_of(value) for value in self.values)

    @property
    def is_apart(self) -> bool:
        """Whether each island takes one part of each value: `values` are these parts."""
        return self.sum.along is not None

    @property
    def is_small(self) -> bool:
        """Whether every island adds all of it."""
        return not self.is_apart and sum(bytes_of(value) for value in self.values) <= SMALL_BYTES

    @property
    def parts(self) -> int:
        """Return the number of parts of the bucket, each of which one island adds."""
        return 1 if self.is_small else self.sum.aligned.spread

    @property
    def divided(self) -> int:
        """Among how many devices of an island a part is divided."""
        return 1 if self.is_small else self.sum.aligned.width

    @property
    def each(self) -> int:
        """Return the number of elements of a part on a device."""
        parts = 1 if self.is_apart else self.parts
        return -(-self.elements // (parts * self.divided))

    def is_equal_on(self, devices: int) -> bool:
        """Whether all devices of an island hold equal parts."""
        return self.is_small and self.sum.aligned.width == devices

    @property
    def element(self) -> Any:
        """The type of its elements."""
        return element_of(self.values[0])

    def pack(self, emit: Emit, values: Sequence[Any]) -> list[Any]:
        """Return the parts of a bucket with these values."""
        inner = self.sum.aligned.inner[emit.island]
        if self.sum.along is not None:
            chunks = [emit.parts(value, self.sum.along, self.parts) for value in values]
            lines = [emit.line(own, self.each * self.divided) for own in zip(*chunks, strict=True)]
            return [emit.reduce_scatter(line, inner, self.sum.kind) for line in lines]
        content = emit.line(values, self.each * self.parts * self.divided)
        if self.is_small:
            return [emit.all_reduce(content, inner, self.sum.kind)]
        return emit.parts(emit.reduce_scatter(content, inner, self.sum.kind), 0, self.parts)

    def sums(self, island: int) -> list[int]:
        """Return the islands whose sums an island takes."""
        own = self.sum.aligned.islands[island]
        return [island] if self.parts == 1 or self.is_apart else list(own)

    def add(self, emit: Emit, parts: Sequence[Any]) -> Any:
        """Return the sum of the islands' parts, in their order."""
        wide = self.element
        is_small = isinstance(wide, ir.FloatType) and wide.width < 32
        if is_small and self.sum.kind == "stablehlo.add":
            wide = ir.F32Type.get()
        total, *rest = [emit.convert(part, wide) for part in parts]
        for part in rest:
            total = emit.combine(self.sum.kind, total, part)
        return emit.convert(total, self.element)

    def unpack(self, emit: Emit, parts: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the values of a bucket and their sums."""
        line = emit.concat(parts, 0)
        if self.divided > 1:
            line = emit.all_gather(line, self.sum.aligned.inner[emit.island])
        start = 0
        for value in self.values:
            stop = start + elements_of(value)
            yield value, emit.reshape(emit.slice(line, 0, start, stop), shape_of(value))
            start = stop
