"""Clients' Python functions on a host: off unless the host's owner allows them.

A function gets numpy arrays and gives numpy arrays. It runs on a thread of its own, so that neither the
loop nor the execute thread waits for it; values it will make are `building` until it has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import jax
import numpy as np

from pw.core.errors import CompileError, ComputationFailed
from pw.core.program import Computation
from pw.core.sharding import ArraySpec, DeviceAddress, dtype_of
from pw.devices.host.backend import Value
from pw.devices.jax.layouts import Layouts, host_shards, local_shards, put


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """An unpickled function and where its results go."""

    name: str
    flat: Callable[..., list[Any]]
    outputs: tuple[ArraySpec, ...]
    devices: tuple[DeviceAddress, ...]


def load(
    computation: Computation,
    artifact: bytes,
    devices: tuple[DeviceAddress, ...],
    allowed: bool,
) -> PythonFunction:
    """Unpickle a function. Raises CompileError if this host does not allow that, or it fails."""
    if not allowed:
        raise CompileError(
            f"{computation.name!r} is a Python function, and this host runs none from clients; its "
            "owner can start it with pw-worker --allow-python"
        )
    try:
        flat = cloudpickle.loads(artifact)
    except BaseException as error:  # whatever a client's code ends with, the host goes on
        raise CompileError(
            f"the Python function {computation.name!r} cannot be loaded here: "
            f"{type(error).__name__}: {error}. What it imports must be installed on the host"
        ) from error
    return PythonFunction(computation.name, flat, computation.outputs, devices)


def call(
    function: PythonFunction,
    arguments: list[jax.Array],
    results: tuple[Value, ...],
    layouts: Layouts,
) -> None:
    """Run the function and fill `results`. Raises whatever the function raises."""
    given = [np.asarray(next(iter(local_shards(array).values()))) for array in arguments]
    made = function.flat(*given)
    arrays = []
    for index, (result, spec) in enumerate(zip(made, function.outputs, strict=True)):
        host_array = np.asarray(result)
        if host_array.shape != spec.shape or host_array.dtype != dtype_of(spec.dtype):
            raise ComputationFailed(
                f"result {index} of the host function {function.name!r} is "
                f"{host_array.dtype}{list(host_array.shape)}, but result_shape_dtypes says "
                f"{spec.dtype}{list(spec.shape)}"
            )
        layout = layouts(spec.sharding, function.devices)
        positions = tuple(layout.local)
        box = tuple((0, size) for size in spec.shape)
        # A copy: the function may keep what it returned, and change it.
        shards = host_shards(spec, positions, [(positions, box, host_array.copy())])
        arrays.append(put(spec, layout, shards))
    for value, array in zip(results, arrays, strict=True):
        value.payload = array
