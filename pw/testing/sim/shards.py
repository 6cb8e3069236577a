"""Where the shards of simulated computations lie, and their buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pw.core.program import Computation
from pw.core.sharding import ArraySpec, DeviceAddress, box_slices


class Shards(dict[int, np.ndarray[Any, Any]]):
    """The buffers of one value on one host, by the ordinal of the device."""

    __slots__ = ("__weakref__",)


_Index = tuple[slice, ...]


@dataclass(slots=True)
class _Place:
    """Where the shards of one argument or result lie."""

    spec: ArraySpec
    by_host: dict[str, list[tuple[int, _Index]]]
    """Ordinals and boxes on each host."""
    whole: tuple[str, int] | None
    """A device that has all of it."""
    replicated: bool


class Layout:
    """Where a computation's shards lie, worked out once for all hosts."""

    def __init__(self, computation: Computation, devices: tuple[DeviceAddress, ...]) -> None:
        virtual = dict(zip(computation.placement.devices, devices, strict=True))
        self.hosts = tuple(dict.fromkeys(device.host for device in devices))
        self.inputs = [_place(spec, virtual) for spec in computation.inputs]
        self.outputs = [_place(spec, virtual) for spec in computation.outputs]


def _place(spec: ArraySpec, virtual: dict[int, DeviceAddress]) -> _Place:
    by_host: dict[str, list[tuple[int, _Index]]] = {}
    whole = None
    boxes = set()
    for position, index in enumerate(spec.placement.devices):
        device, box = virtual[index], spec.box(position)
        boxes.add(box)
        by_host.setdefault(device.host, []).append((device.ordinal, box_slices(box)))
        if all(stop - start == size for (start, stop), size in zip(box, spec.shape, strict=True)):
            whole = whole or (device.host, device.ordinal)
    return _Place(spec, by_host, whole, len(boxes) < len(spec.placement.devices))


@dataclass(slots=True)
class Installed:
    """A computation as this host runs it."""

    name: str
    artifact: bytes
    computation: Computation
    layout: Layout
    lasts_s: float | None
    """How long it takes, if that is always the same."""


def cut(whole: np.ndarray[Any, Any], place: _Place, host: str) -> Shards:
    """Return the shards that one host has of a whole array."""
    shards = Shards()
    for ordinal, box in place.by_host[host]:
        shards[ordinal] = whole[box]
    return shards
