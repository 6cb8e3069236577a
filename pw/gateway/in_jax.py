"""Adds to JAX, in the script's process, what its client of a gateway lacks.

The devices of the client are on other machines, and a few places of JAX expect the memory of this one. There
the script's own CPU serves: host callbacks, arrays that other libraries share by DLPack, and XLA's estimate of
what a function costs. Arrays move between the two clients over this process. And numpy arrays are copied, as
JAX's client reads them when it sends them, which is later than scripts expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.backend
import numpy as np

from pw.client.arrays.jax_arrays import run_plugin
from pw.core.jax_private import arrays, hooks, runtime
from pw.gateway.arrays.exchange import MEMORY

SCRIPT_CPU = "script_cpu"
"""The platform of the script's own CPU, whether or not `cpu` is the cluster's."""
COPIED_BYTES = 1 << 20
"""Numpy arrays up to this size are copied before JAX's client reads them."""
_DLPACK_CPU = 1
"""The number that DLPack has for the memory of this process."""


def script_cpu() -> Any:
    """Return JAX's client of the script's own CPU."""
    backends = jax.extend.backend.backends()
    return backends.get(SCRIPT_CPU) or backends["cpu"]


def make_script_cpu() -> Any:
    """Make JAX's client of the script's own CPU; it is `cpu`, too, unless the cluster is."""
    client = runtime.make_cpu_client()
    runtime.add_client("cpu", client)
    return client


def install(client: Any) -> None:
    """Complete JAX for its client of a gateway.

    Called while JAX chooses its devices. `jax.devices(jax.default_backend())` are those of the client then.
    """
    # JAX calls CUDA and ROCm devices `gpu`, and finds them by the name of their platform.
    platform = getattr(client, "_raw_platform", client.platform)
    runtime.add_client(platform, client)
    for hook in hooks.CLIENTS:
        hook.replace(_WithScriptCpu(hook.value))
    _tell_memory(client)
    _share_by_dlpack(client)
    _estimate_costs(client)
    _move_between_clients()
    _copy_in_array()
    _copy_small(client)


class _WithScriptCpu:
    """JAX's clients for modules that want this process's memory when they ask for `cpu`."""

    def __init__(self, clients: Any) -> None:
        self._clients = clients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def get_backend(self, platform: Any = None) -> Any:
        return script_cpu() if platform == "cpu" else self._clients.get_backend(platform)

    def local_devices(self, process_index: int | None = None, backend: Any = None) -> Any:
        if backend == "cpu":
            return script_cpu().local_devices()
        return self._clients.local_devices(process_index, backend)


def _client_of(sharding: Any) -> Any:
    return arrays.devices_of(sharding)[0].client


def _tell_memory(client: Any) -> None:
    """Let devices of the cluster answer `memory_stats`: the gateway asks their hosts."""
    kind: Any = jax.Device
    of_here = kind.memory_stats

    def memory_stats(self: Any) -> dict[str, int] | None:
        """Return `bytes_in_use`, and `peak_bytes_in_use` and `bytes_limit` where they are known.

        None, as for CPUs in plain JAX, if nothing bounds or counts the device's memory.
        """
        if self.client is not client:
            stats: dict[str, int] | None = of_here(self)
            return stats
        sizes = _numbers_of_plugin(client, "pw_memory", len(MEMORY), device=self.id)
        by_name = {name: size for name, size in zip(MEMORY, sizes, strict=True) if size >= 0}
        return by_name if len(by_name) > 1 else None

    kind.memory_stats = memory_stats


def _numbers_of_plugin(client: Any, name: str, count: int, **asked: Any) -> list[int]:
    """Return so many numbers from a program of the gateway."""
    home = jax.sharding.SingleDeviceSharding(client.devices()[0])
    aval = jax.core.ShapedArray((count,), np.dtype(np.int64))
    handlers = arrays.result_handlers([aval], [home])
    (numbers,) = run_plugin(client, name, **asked).consume_with_handlers(handlers)
    return [int(number) for number in np.asarray(numbers)]


def _share_by_dlpack(client: Any) -> None:
    """Let libraries that ask an array of the cluster for its memory have that of a copy."""
    kind: Any = arrays.ArrayImpl
    share, device = kind.__dlpack__, kind.__dlpack_device__

    def copy_here(remote: Any) -> Any:
        return jax.device_put(remote, script_cpu().local_devices()[0])

    def share_copy(self: Any, *, copy: bool | None = None, **options: Any) -> Any:
        if _client_of(self.sharding) is not client:
            return share(self, copy=copy, **options)
        if copy is False:
            raise BufferError(
                f"the array {self.aval.str_short()} lies on another machine, and cannot be shared without a "
                "copy; leave out copy=False"
            )
        return share(copy_here(self), **options)

    def device_of_copy(self: Any) -> Any:
        return device(self) if _client_of(self.sharding) is not client else (_DLPACK_CPU, 0)

    kind.__dlpack__, kind.__dlpack_device__ = share_copy, device_of_copy


def _estimate_costs(client: Any) -> None:
    """Let XLA estimate what a function costs before it is compiled: that needs any client of this process."""
    analyse = hooks.COST_ANALYSIS.value

    def analyse_here(backend: Any, module: Any) -> Any:
        return analyse(script_cpu() if backend is client else backend, module)

    hooks.COST_ANALYSIS.replace(analyse_here)


def _move_between_clients() -> None:
    """Let JAX move arguments between the devices of two clients, over this process."""
    kind: Any = arrays.ArrayImpl
    shard = arrays.shard_arg_handlers[kind]
    fastpath = hooks.FASTPATH.value

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
        moved: Sequence[Any] = arrays.shard_args(shardings, layouts, semantics, here)
        for x, is_foreign, meant in zip(xs, foreign, semantics, strict=True):
            if is_foreign and meant == arrays.ArrayCopySemantics.DONATE_INPUT:
                x.delete()
        return moved

    def fastpath_if_here(executable: Any, tree: Any, arguments: Sequence[Any], *rest: Any) -> Any:
        """Return nothing if an argument has moved: calls without Python cannot move it."""
        data = fastpath(executable, tree, arguments, *rest)
        if data is not None:
            there = executable.xla_executable.local_devices()[0].client
            for one in arguments:
                if isinstance(one, kind) and _client_of(one.sharding) is not there:
                    return None
        return data

    arrays.shard_arg_handlers[kind] = shard_or_move
    hooks.FASTPATH.replace(fastpath_if_here)


def _copy_in_array() -> None:
    """Let `jnp.array` copy a numpy array at once, as it promises: JAX's client reads the memory later."""

    def wrapped(convert: Callable[..., Any]) -> Callable[..., Any]:
        def convert_copy(value: Any, *how: Any, **options: Any) -> Any:
            copy = value.copy("K") if isinstance(value, np.ndarray) else value
            return convert(copy, *how, **options)

        return convert_copy

    hooks.wrap_array_conversions(wrapped)


def _copy_small(client: Any) -> None:
    """Let small numpy arrays be copied at once when they are put on devices, not when they are sent."""
    put = hooks.BATCHED_DEVICE_PUT.value

    def put_copies(
        aval: Any,
        sharding: Any,
        xs: Sequence[Any],
        devices: Sequence[Any],
        *how: Any,
        **options: Any,
    ) -> Any:
        if devices and devices[0].client is client:
            copies = {
                id(x): x.copy("K")
                for x in xs
                if isinstance(x, np.ndarray) and x.nbytes <= COPIED_BYTES
            }
            xs = [copies.get(id(x), x) for x in xs]
        return put(aval, sharding, xs, devices, *how, **options)

    hooks.BATCHED_DEVICE_PUT.replace(put_copies)
