"""What JAX asks of virtual devices: the memories beside them, and what it does where a user names them.

`jax.device_put` moves values to virtual devices as `pw.put` does. Anything else in JAX that would put values on
them computes in this process, and raises.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jax

from pw.client.arrays.operators import Operators
from pw.core.errors import ArgumentError
from pw.core.jax_private import hooks
from pw.core.platforms import platform_of


class VirtualMemory(str):
    """One memory of a virtual device, as JAX asks a device for it; jaxlib compares it with names."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """JAX's name of the memory, such as "pinned_host"."""
        return str(self)


@lru_cache
def memories_of(platform: str) -> tuple[VirtualMemory, ...]:
    """Return the memories beside each device of a platform; its own is the first."""
    return tuple(map(VirtualMemory, platform_of(platform).memories))


class NoClient:
    """Takes the place of JAX's client of a virtual device.

    JAX asks it for its process when it looks for the memories of a device. It asks for anything else when it is
    about to compute in this process: that raises ArgumentError.
    """

    __slots__ = ("_device",)

    def __init__(self, device: Any) -> None:
        self._device = device

    def process_index(self) -> int:
        """Return the process that programs the device."""
        return int(self._device.process_index)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self._device)


def _refuse(device: Any) -> NoReturn:
    """Raise because JAX is about to use a device in this process."""
    raise ArgumentError(
        f"{device!r} is in the cluster, and jax computes in this process: pw.put(x, sharding=sharding) puts "
        "values there, pw.jit(f, mesh=mesh) computes there, and functions of jax that name it, with "
        "transformations of them such as jax.grad, are called in a @pw.program. With JAX_PLATFORMS=pw, "
        "jax.devices() are devices of the cluster on which jax computes"
    )


def register(kind: type) -> None:
    """Teach JAX that devices of a class are virtual."""
    device_put, put_shards = hooks.DEVICE_PUT.value, hooks.BATCHED_DEVICE_PUT.value

    def is_there(value: Any, target: Any) -> bool:
        """Whether `jax.device_put` moves a value to virtual devices, or to another memory of its own ones."""
        if isinstance(target, jax.memory.Space):
            return isinstance(value, Operators)
        if not isinstance(target, jax.sharding.Sharding) or not target._is_concrete:
            return False
        return isinstance(next(iter(target.device_set)), kind)

    def put(*values: Any, devices: Sequence[Any], copy_semantics: Any, **more: Any) -> Any:
        if not any(map(is_there, values, devices)):
            return device_put(*values, devices=devices, copy_semantics=copy_semantics, **more)
        transfer = importlib.import_module("pw.client.functions.transfer")
        return transfer.device_put(values, devices, copy_semantics)

    def put_all(
        aval: Any, sharding: Any, shards: Any, devices: Sequence[Any], *how: Any, **more: Any
    ) -> Any:
        if devices and isinstance(devices[0], kind):
            _refuse(devices[0])
        return put_shards(aval, sharding, shards, devices, *how, **more)

    hooks.DEVICE_PUT.replace(put)
    hooks.BATCHED_DEVICE_PUT.replace(put_all)
