"""Adds to JAX, in the script's process, what its client of a gateway lacks.

The devices of the client are on other machines, and a few places of JAX expect the memory of this one. There
the script's own CPU serves: host callbacks, and arrays that other libraries share by DLPack.
"""

from __future__ import annotations

from typing import Any

from jax._src import callback, debugging, dlpack, xla_bridge

SCRIPT_CPU = "script_cpu"
"""The platform of the script's own CPU, whether or not `cpu` is the cluster's."""


def script_cpu() -> Any:
    """Return JAX's client of the script's own CPU."""
    backends = xla_bridge.backends()
    return backends.get(SCRIPT_CPU) or backends["cpu"]


def make_script_cpu() -> Any:
    """Make JAX's client of the script's own CPU; it is `cpu`, too, unless the cluster is."""
    made = xla_bridge.make_cpu_client()
    xla_bridge._backends.setdefault("cpu", made)
    return made


def install(client: Any) -> None:
    """Complete JAX for its client of a gateway.

    Called while JAX chooses its devices. `jax.devices(jax.default_backend())` are those of the client then.
    """
    # JAX calls CUDA and ROCm devices `gpu`, and finds them by the name of their platform.
    platform = getattr(client, "_raw_platform", client.platform)
    xla_bridge._backends.setdefault(platform, client)
    own = _WithScriptCpu()
    for module, name in ((callback, "xb"), (debugging, "xla_bridge"), (dlpack, "xla_bridge")):
        setattr(module, name, own)


class _WithScriptCpu:
    """`xla_bridge` for modules that want this process's memory when they ask for `cpu`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(xla_bridge, name)

    def get_backend(self, platform: Any = None) -> Any:
        return script_cpu() if platform == "cpu" else xla_bridge.get_backend(platform)

    def local_devices(self, process_index: int | None = None, backend: Any = None) -> Any:
        if backend == "cpu":
            return script_cpu().local_devices()
        return xla_bridge.local_devices(process_index, backend)
