"""The platforms of devices, and how each differs from the others.

A platform is a `Platform`: those of this package are in `PLATFORMS`, and other packages add theirs as entry
points of the group `pw.platforms`, with the name that `pw-worker --platform` takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import NamedTuple

from pw.core.costs import ACCELERATOR, CPU, SIMULATED, Costs
from pw.core.errors import Error

GROUP = "pw.platforms"
"""Group of entry points of platforms."""


def _no_settings(devices: int) -> Mapping[str, object]:
    return {}


class Platform(NamedTuple):
    """A kind of devices."""

    costs: Costs = ACCELERATOR
    is_host: bool = False
    """True if the devices are threads of the host, and compute on its memory: arrays need no copy there,
    processes beside the host can compile for it, and an executable serves any of its devices."""
    memories: tuple[str, ...] = ("device", "pinned_host")
    """Memories of a device as JAX names them; the first is the default."""
    number: int = 0
    """Number that JAX's remote protocol has for the platform; 0 if none."""
    visible: str = ""
    """Environment variable that names the devices which a process may use; empty if there is none."""
    jax: str = ""
    """Platform of JAX (`jax_platforms`) that has the devices; empty if it has the same name."""
    interface: str = ""
    """Environment variable that names the network interface at which the platform's collectives listen and
    dial; empty if they do otherwise."""
    settings: Callable[[int], Mapping[str, object]] = _no_settings
    """Function that returns what a worker configures in JAX before it opens the devices, for a number of
    them."""


def _of_cpu(devices: int) -> Mapping[str, object]:
    return {
        "jax_num_cpu_devices": devices,
        "jax_cpu_collectives_implementation": "gloo",
        # The smallest bound on waiting for a host that died right after the roll-call.
        "jax_cpu_get_local_topology_timeout_minutes": 1,
        "jax_cpu_get_global_topology_timeout_minutes": 1,
    }


_MEMORIES = ("device", "pinned_host", "unpinned_host")

PLATFORMS = {
    "cpu": Platform(
        CPU, is_host=True, memories=_MEMORIES, number=0x8B5DFB7AB2A84F91, settings=_of_cpu
    ),
    "cuda": Platform(visible="CUDA_VISIBLE_DEVICES", interface="NCCL_SOCKET_IFNAME"),
    "tpu": Platform(memories=_MEMORIES),
}
"""Platforms of this package by their names; all clusters have them."""

_UNNAMED = {"": Platform(CPU), "sim": Platform(SIMULATED)}
"""Platforms where no JAX is, in simulations."""

_ACCELERATOR = Platform()


def installed_platform(name: str) -> Platform | None:
    """Return the platform of a name that this package or another one has; None if there is none.

    Raises:
        Error: the entry point cannot be loaded, or is no `Platform`.
    """
    return PLATFORMS.get(name) or _of_another_package(name)


@functools.cache
def _of_another_package(name: str) -> Platform | None:
    for entry in metadata.entry_points(group=GROUP, name=name):
        try:
            platform = entry.load()
        except Exception as error:
            raise Error(
                f"{_place(entry)} cannot be loaded: {error!r}; mend that package"
            ) from error
        if not isinstance(platform, Platform):
            raise Error(f"{_place(entry)} is no pw.core.platforms.Platform: {platform!r}")
        return platform
    return None


def _place(entry: metadata.EntryPoint) -> str:
    package = f" of the package {entry.dist.name}" if entry.dist is not None else ""
    return f"the platform {entry.name!r} ({entry.value}){package}"


def platform_names() -> tuple[str, ...]:
    """Return the names of all platforms, for people."""
    return (*PLATFORMS, *sorted(metadata.entry_points(group=GROUP).names - PLATFORMS.keys()))


def platform_of(name: str) -> Platform:
    """Return a platform by its name, or by the name of its devices; an unknown one is an accelerator."""
    return _UNNAMED.get(name) or installed_platform(name) or _ACCELERATOR


def jax_platform(name: str) -> str:
    """Return the name that JAX has for a platform."""
    return platform_of(name).jax or name
