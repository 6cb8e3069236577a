"""Adds to JAX, in the script's process, what its client of a gateway lacks.

The devices of the client are on other machines, and a few places of JAX expect the memory of this one. There
the script's own CPU serves: host callbacks, and arrays that other libraries share by DLPack. Arrays move
between the two clients over this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src import array, callback, debugging, dlpack, pjit, xla_bridge
from jax._src.interpreters import pxla
from jaxlib import xla_client

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
    _move_between_clients()


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


def _client_of(sharding: Any) -> Any:
    return sharding._device_assignment[0].client


def _move_between_clients() -> None:
    """Let JAX move arguments between the devices of two clients, over this process."""
    kind: Any = array.ArrayImpl
    shard = pxla.shard_arg_handlers[kind]
    dispatch: Any = pjit
    fastpath = dispatch._get_fastpath_data

    def shard_or_move(
        xs: Sequence[Any],
        shardings: Sequence[Any],
        layouts: Sequence[Any],
        semantics: Sequence[Any],
    ) -> Sequence[Any]:
        foreign = [
            _client_of(x.sharding) is not _client_of(there)
            for x, there in zip(xs, shardings, strict=True)
        ]
        if not any(foreign):
            return shard(xs, shardings, layouts, semantics)
        here = [
            np.asarray(x) if is_foreign else x for x, is_foreign in zip(xs, foreign, strict=True)
        ]
        moved: Sequence[Any] = pxla.shard_args(shardings, layouts, semantics, here)
        for x, is_foreign, meant in zip(xs, foreign, semantics, strict=True):
            if is_foreign and meant == xla_client.ArrayCopySemantics.DONATE_INPUT:
                x.delete()
        return moved

    def fastpath_if_here(executable: Any, tree: Any, arguments: Sequence[Any], *others: Any) -> Any:
        """Return nothing if an argument has moved: calls without Python cannot move it."""
        data = fastpath(executable, tree, arguments, *others)
        if data is not None:
            there = executable.xla_executable.local_devices()[0].client
            for one in arguments:
                if isinstance(one, kind) and _client_of(one.sharding) is not there:
                    return None
        return data

    pxla.shard_arg_handlers[kind] = shard_or_move
    dispatch._get_fastpath_data = fastpath_if_here
