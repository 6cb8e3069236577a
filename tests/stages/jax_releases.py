"""What tests ask about the release of JAX that is installed."""

from __future__ import annotations

from pw.core.installed import version

JAX = tuple(int(number) for number in version("jax").split("."))
RESULTS_IN_HOST_MEMORY = JAX >= (0, 10, 2)
"""Whether JAX compiles functions for CPUs whose results are in a memory of hosts."""
NOT_LOWERED = {"int1", "uint1"}
"""Dtypes of pw that JAX has no type of MLIR for."""
if JAX < (0, 10, 2):
    NOT_LOWERED |= {"float6_e2m3fn", "float6_e3m2fn"}
PMAP_AXIS = "_internal_pmap_axis_name" if JAX >= (0, 10, 2) else "<axis 0x[0-9a-f]+>"
"""Pattern of the name that JAX gives to the axis of a `jax.pmap` without a name."""
