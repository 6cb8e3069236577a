"""The platforms of devices, and how each differs from the others: a new one is an entry of `PLATFORMS`.

What a worker configures in JAX before it opens its devices is in `pw.devices.jax.group`.
"""

from __future__ import annotations

from typing import NamedTuple

from pw.core.costs import ACCELERATOR, CPU, SIMULATED, Costs


class Platform(NamedTuple):
    """A kind of devices."""

    costs: Costs = ACCELERATOR
    is_host: bool = False
    """Its devices are threads of the host, and compute on its memory: arrays need no copy there, processes
    beside the host can compile for it, and an executable serves any of its devices."""
    memories: tuple[str, ...] = ("device", "pinned_host")
    """The memories of a device as JAX names them; the first is the default."""
    number: int = 0
    """The number that JAX's remote protocol has for it; 0 if none."""
    visible: str = ""
    """The environment variable that names the devices which a process may use; empty if there is none."""


_MEMORIES = ("device", "pinned_host", "unpinned_host")

PLATFORMS = {
    "cpu": Platform(CPU, is_host=True, memories=_MEMORIES, number=0x8B5DFB7AB2A84F91),
    "cuda": Platform(visible="CUDA_VISIBLE_DEVICES"),
    "tpu": Platform(memories=_MEMORIES),
}
"""The platforms by their names for `pw-worker --platform` and `jax.export`."""

_OTHERS = {"": Platform(CPU), "sim": Platform(SIMULATED)}
"""Where no JAX is, in simulations."""

_ACCELERATOR = Platform()


def platform_of(name: str) -> Platform:
    """Return a platform by its name, or by that of its devices; one that is not known is an accelerator."""
    return PLATFORMS.get(name) or _OTHERS.get(name, _ACCELERATOR)
