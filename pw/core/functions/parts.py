"""Which part of the results of a Python function a host makes.

A host makes the smallest box that contains the shards on its devices. Hosts with the same boxes make
the same part, and must make the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pw.core.errors import ResultMismatch
from pw.core.sharding import ArraySpec, Box, DeviceAddress, box_shape, box_slices, dtype_of


@dataclass(frozen=True, slots=True)
class ResultPart:
    """The part of its results that a function with the parameter `part` has to make.

    Args:
        index: the number of the part, from 0.
        count: how many different parts there are.
        slices: for each result, in the tree of the results, its index in the whole array.
    """

    index: int
    count: int
    slices: Any


class HostPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of the results of a function that one host makes; all fields but the first three by result."""

    name: str
    index: int
    count: int
    boxes: tuple[Box, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def slices(self) -> list[tuple[slice, ...]]:
        """The index of the part in each whole result."""
        return [box_slices(box) for box in self.boxes]

    def cut(self, results: Sequence[Any], *, is_part: bool) -> list[np.ndarray[Any, Any]]:
        """Return the part of these results; `is_part` if they are the part already.

        Raises:
            ResultMismatch: a result has another shape or dtype than declared, or one is missing.
        """
        if len(results) != len(self.boxes):
            raise ResultMismatch(
                f"{self.name!r} returned {len(results)} results, and {len(self.boxes)} are declared"
            )
        arrays = []
        for index, (result, box, shape, dtype) in enumerate(
            zip(results, self.boxes, self.shapes, self.dtypes, strict=True)
        ):
            array = np.asarray(result)
            expected = box_shape(box) if is_part else shape
            if array.shape != expected or array.dtype != dtype_of(dtype):
                part = f", of which part {self.index} of {self.count} is {_short(dtype, expected)}"
                raise ResultMismatch(
                    f"result {index} of {self.name!r} is {_short(array.dtype, array.shape)}, but it is "
                    f"declared as {_short(dtype, shape)}{'' if expected == shape else part}"
                )
            arrays.append(array if is_part else array[box_slices(box)])
        return arrays


def share_of(
    name: str,
    outputs: Sequence[ArraySpec],
    devices: Sequence[DeviceAddress],
    host: str,
    counted: int | None = None,
) -> HostPart:
    """Return what `host` makes of results with the devices at the positions of their mesh.

    Only the first `counted` results tell the parts of two hosts apart; None for all.
    """
    positions: dict[str, list[int]] = {}
    for position, device in enumerate(devices):
        positions.setdefault(device.host, []).append(position)
    regions = {
        at: tuple(_region(spec, held) for spec in outputs[:counted])
        for at, held in positions.items()
    }
    parts = sorted(set(regions.values()))
    return HostPart(
        name,
        parts.index(regions[host]),
        len(parts),
        tuple(_region(spec, positions[host]) for spec in outputs),
        tuple(spec.shape for spec in outputs),
        tuple(spec.dtype for spec in outputs),
    )


def whole_share(name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> HostPart:
    """Return the share of a process that makes whole results."""
    boxes = tuple(tuple((0, size) for size in shape) for shape in shapes)
    return HostPart(name, 0, 1, boxes, tuple(shapes), tuple(dtypes))


def _short(dtype: object, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _region(spec: ArraySpec, positions: Sequence[int]) -> Box:
    """The smallest box that contains the boxes at these positions."""
    boxes = [spec.box(position) for position in positions]
    return tuple(
        (min(start for start, _ in sides), max(stop for _, stop in sides))
        for sides in zip(*boxes, strict=True)
    )
