"""What XLA's compilers take and return."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src import callback
from jaxlib import _jax, xla_client
from jaxlib.cpu import _lapack

CompileOptions = xla_client.CompileOptions
"""How XLA compiles a module. Public: `jax.extend.backend.get_compile_options`, JAX's own; none parses them."""
HloSharding = xla_client.HloSharding
"""How an array is divided, in XLA's words. Public: none."""
DeviceList = _jax.DeviceList
"""The devices of an executable. Public: none."""
aval_to_xla_shape = callback._aval_to_xla_shape
"""Return XLA's shapes of an argument of a callback. Public: none."""


def assignment_of(ids: Sequence[int], replicas: int, partitions: int) -> Any:
    """Return the option that names the devices by their ids. Public: `get_compile_options` has it, too."""
    return xla_client.DeviceAssignment.create(np.array(ids).reshape(replicas, partitions))


def program_shape(proto: bytes) -> Any:
    """Return the shapes of parameters and results in an `HloModuleProto`. Public: none."""
    return xla_client.XlaComputation(proto).program_shape()


def cpu_client(devices: int) -> Any:
    """Return a client of XLA with so many CPU devices, of which JAX does not know. Public: none."""
    return xla_client.make_cpu_client(asynchronous=False, num_devices=devices)


@functools.cache
def find_lapack() -> None:
    """Have the native functions of linear algebra find their library: JAX does so when it lowers them.

    Public: none.
    """
    _lapack.initialize()
