"""What users give for a slice, checked: a shape, a size of memory, names of hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

from pw.core.errors import ArgumentError
from pw.core.sizes import parse_size


def shape_of(topology: Any) -> tuple[int, ...]:
    """Return a shape that a user gives. Raises ValueError."""
    try:
        shape = tuple(map(index, topology))
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(
            f"topology= takes the number of devices along each axis, such as (2, 4); not {topology!r}"
        )
    return shape


def count_of(devices: Any) -> int:
    """Return a number of devices that a user gives. Raises ValueError."""
    try:
        count = 0 if isinstance(devices, bool) else index(devices)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"a slice has at least one device, and a whole number; not {devices!r}")
    return count


def check_count(count: int, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a shape has so many devices."""
    if math.prod(shape) != count:
        raise ValueError(
            f"topology={shape} has {math.prod(shape)} devices, and {count} are asked for; leave the number out"
        )


def size_of(memory: Any) -> int:
    """Return the bytes of a device that a user gives. Raises ArgumentError."""
    try:
        if isinstance(memory, bool):
            raise ValueError
        return parse_size(memory if isinstance(memory, str) else str(index(memory)))
    except (TypeError, ValueError):
        raise ArgumentError(
            f'memory= takes bytes of each device, as a number or as a text such as "24GiB"; not {memory!r}'
        ) from None


def host_names(hosts: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of hosts that a user gives. Raises ValueError."""
    named = (hosts,) if isinstance(hosts, str) else tuple(hosts)
    if not named or not all(isinstance(one, str) and one for one in named):
        raise ValueError(f"hosts= takes names of hosts, as pw status shows them; not {hosts!r}")
    if len(set(named)) < len(named):
        raise ValueError(f"hosts= names a host twice: {', '.join(named)}")
    return named
