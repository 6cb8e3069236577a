"""What tests ask about the release of JAX that is installed."""

from __future__ import annotations

from pw.core.installed import version

JAX = tuple(int(number) for number in version("jax").split("."))
RESULTS_IN_HOST_MEMORY = JAX >= (0, 10, 2)
"""Whether JAX compiles functions for CPUs whose results are in a memory of hosts."""
PMAP_AXIS = "_internal_pmap_axis_name" if JAX >= (0, 10, 2) else "<axis 0x[0-9a-f]+>"
"""Pattern of the name that JAX gives to the axis of a `jax.pmap` without a name."""
