"""Meshes over new slices of the current cluster, arrays on them, and programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pw


def new_mesh(devices: int = 1, island: str | None = None, axis: str = "data") -> pw.Mesh:
    """A mesh with one axis over the devices of a new slice."""
    slice = pw.make_virtual_device_set().add_slice(devices=devices, island=island)
    return pw.Mesh(slice.devices, (axis,))


def put(value: Any, mesh: pw.Mesh) -> Any:
    """`value` on every device of the mesh."""
    return pw.put(np.asarray(value), sharding=pw.NamedSharding(mesh, pw.PartitionSpec()))


def chain(functions: Sequence[Callable[[Any], Any]]) -> Any:
    """A program that calls the functions, each with the result of the one before."""

    @pw.program
    def chained(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return chained
