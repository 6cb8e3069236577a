"""Coordinates of a host's devices on the interconnect of its island: their text form, and what they must obey.

An operator writes the coordinates of the devices as blocks, `START:SHAPE`, in the order of the devices:
`0,2:2x2` is a block of 2 x 2 devices from (0, 2) on, the last axis first; `0,0;0,1;1,1;1,0` names each device.
Where an axis is a ring, `--wrap` says after how many devices it begins again: `4,0` for the first of two axes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from pw.core.errors import ArgumentError

Coordinate = tuple[int, ...]
"""Place of a device: a number for each axis."""

AXES = 4
"""Number of axes of an interconnect, at most."""
LONGEST = 1 << 20
"""Number of devices along an axis, at most."""

_TIMES = re.compile(r"[1-9]\d*(x[1-9]\d*)*")
_BLOCK = re.compile(r"(\d+(?:,\d+)*)(?::(\d+(?:x\d+)*))?")


def parse_coordinates(text: str, devices: int) -> tuple[Coordinate, ...]:
    """Return the coordinates of a host's devices; none for an empty text.

    Args:
        text: blocks such as `0,2:2x2`, with a `;` between two of them.
        devices: number of devices of the host.

    Raises:
        ArgumentError: these are no coordinates, or those of another number of devices.
    """
    if not text.strip():
        return ()
    cells: list[Coordinate] = []
    for part in text.replace(" ", "").split(";"):
        match = _BLOCK.fullmatch(part)
        if match is None:
            raise ArgumentError(
                f"{part!r} is no block of devices; it looks like 0,2:2x2, a start and a shape, or like 0,2, "
                "one device"
            )
        start = tuple(map(int, match[1].split(",")))
        shape = tuple(map(int, match[2].split("x"))) if match[2] else (1,) * len(start)
        if len(shape) != len(start):
            raise ArgumentError(
                f"{part!r} has a start of {len(start)} axes and a shape of {len(shape)}; it needs as many"
            )
        if len(cells) + math.prod(shape) > devices:
            raise ArgumentError(
                f"{text!r} are coordinates of more devices than the host's {devices}"
            )
        offsets = itertools.product(*map(range, shape))
        cells += [tuple(map(sum, zip(start, offset, strict=True))) for offset in offsets]
    if len(cells) != devices:
        raise ArgumentError(
            f"{text!r} are coordinates of {len(cells)} devices, and the host has {devices}"
        )
    return tuple(cells)


def parse_wraps(text: str) -> Coordinate:
    """Return after how many devices each axis wraps around, 0 where it does not. Raises ArgumentError."""
    if not text.strip():
        return ()
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() for part in parts):
        raise ArgumentError(
            f"{text!r} does not say where axes wrap around; 4,0 does: the first one after 4 devices, the "
            "second one nowhere"
        )
    return tuple(map(int, parts))


def check_coordinates(cells: Sequence[Coordinate], wraps: Coordinate, devices: int) -> None:
    """Raise ArgumentError unless a host's devices can have these coordinates.

    Args:
        cells: coordinates of each of its devices, in order; none if it has no coordinates.
        wraps: for each axis the number of devices after which it wraps around, 0 where it does not; empty if
            none does.
        devices: number of its devices.
    """
    if not cells:
        if wraps:
            raise ArgumentError(
                "axes wrap around (--wrap), and the devices have no coordinates (--coords)"
            )
        return
    if len(cells) != devices:
        raise ArgumentError(f"coordinates of {len(cells)} devices, and the host has {devices}")
    axes = {len(cell) for cell in cells}
    if len(axes) > 1 or not 1 <= min(axes) <= AXES:
        counts = " and ".join(map(str, sorted(axes)))
        raise ArgumentError(
            f"coordinates of {counts} axes; all devices have the same number, {AXES} at most"
        )
    if len(set(cells)) < len(cells):
        twice = next(cell for at, cell in enumerate(cells) if cell in cells[:at])
        raise ArgumentError(f"two devices of the host have the coordinates {written(twice)}")
    if not all(0 <= at < LONGEST for cell in cells for at in cell):
        raise ArgumentError(f"coordinates are numbers from 0 to {LONGEST - 1}")
    if wraps and len(wraps) != min(axes):
        raise ArgumentError(
            f"--wrap is for {len(wraps)} axes, and the coordinates have {min(axes)}; it has 0 for an axis that "
            "does not wrap around"
        )
    if not all(0 <= wrap <= LONGEST for wrap in wraps):
        raise ArgumentError(f"an axis wraps around after {LONGEST} devices at most")
    for cell in cells:
        for axis, wrap in enumerate(wraps):
            if wrap and cell[axis] >= wrap:
                raise ArgumentError(
                    f"the coordinates {written(cell)} are beyond axis {axis}, which wraps around after {wrap} "
                    "devices"
                )


def written(cell: Sequence[int]) -> str:
    """Return coordinates as people write them."""
    return f"({', '.join(map(str, cell))})"


def parse_times(text: str) -> tuple[int, ...]:
    """Return the sizes of a block that is written as 2x4; none for an empty text. Raises ValueError."""
    if text and not _TIMES.fullmatch(text):
        raise ValueError(f"a number of devices along each axis looks like 2x4, not like {text!r}")
    return tuple(map(int, text.split("x"))) if text else ()


def times(sizes: Sequence[int]) -> str:
    """Return the form of a block as people write it: 2x4."""
    return "x".join(map(str, sizes))
