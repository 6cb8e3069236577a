"""Programs of the gateway itself, which clients name in JSON instead of StableHLO (`PluginProgram`).

The JSON is an object with one key, the program's name. Pathways on Cloud has these, and its public
package `pathwaysutils` sends them:

| program | arguments | results |
|---|---|---|
| `persistenceWriteRequest`, `bulk_persistence_write_request` | arrays | none; the arrays are in files |
| `persistenceReadRequest`, `bulk_persistence_read_request` | none | arrays that were in files |
| `reshardRequest` | arrays | the same arrays, divided otherwise |
| `profileRequest` | none | an empty array if there are `xprofTraceOptions`; hosts write no trace |

Those of pw's own scripts are in `pw.gateway.arrays.exchange`.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from pw.core.errors import Error
from pw.gateway.arrays.arrays import ProxyArray, Stored
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.exchange import ArrayExchange
from pw.gateway.arrays.runs import Runs
from pw.gateway.plugins.persistence import Persistence
from pw.gateway.plugins.reshards import Reshards
from pw.gateway.protocol import protos, shardings, statuses

logger = logging.getLogger(__name__)

PLUGIN = "xla::ifrt::PluginProgram"
_PREFIX = b"__serialized_plugin_program "


class Outcome(NamedTuple):
    """The results of a program."""

    arrays: Sequence[ProxyArray] = ()
    ends: Sequence[Stored | Future[Any]] = ()
    """Arrays and futures that end with the execution; one that fails, fails it."""


_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, DecodeError)
"""Errors to which a JSON object of another form leads."""

_Run = Callable[[Any, Sequence[ProxyArray]], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Plugin:
    """A program of the gateway, with what the client asks of it."""

    name: str
    asked: Any
    devices: tuple[int, ...]
    """Devices of its arguments: JAX's client compares how many there are."""
    _run: _Run
    release: Callable[[], None] = lambda: None
    """Function to call when the client needs the program no more."""
    failed: Callable[[BaseException], None] = lambda error: None
    """Takes the error of an argument, without which the program cannot run."""

    async def run(self, args: Sequence[ProxyArray]) -> Outcome:
        """Do what is asked. Raises Status."""
        try:
            return await self._run(self.asked, args)
        except Error:
            raise
        except _UNREADABLE as error:
            raise _cannot_be_read(self.name, error) from error


class Plugins:
    """The programs for one client."""

    def __init__(self, devices: Devices, runs: Runs, reshards: Reshards) -> None:
        self._devices = devices
        self._reshards = reshards
        self._exchange = ArrayExchange(devices, runs)
        self._files = Persistence(devices, runs, reshards)
        self._programs: dict[str, tuple[str | None, _Run]] = {
            "persistenceWriteRequest": (None, self._write),
            "bulk_persistence_write_request": ("write_requests", self._write),
            "persistenceReadRequest": (None, self._read),
            "bulk_persistence_read_request": ("read_requests", self._read),
            "reshardRequest": ("inSharding", self._reshard),
            "profileRequest": (None, self._profile),
            "pw_offer": (None, self._offer),
            "pw_take": (None, self._take),
            "pw_checkpoint": (None, self._checkpoint),
            "pw_memory": (None, self._memory),
        }

    def find(self, text: bytes) -> Plugin:
        """Return a program. Raises Status if there is none, or the text cannot be read."""
        try:
            ((name, asked),) = json.loads(text.removeprefix(_PREFIX)).items()
        except (ValueError, AttributeError) as error:
            raise statuses.StatusError(
                "INVALID_ARGUMENT", f"a plugin program is a JSON object with one key: {error}"
            ) from error
        program = self._programs.get(name)
        if program is None:
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"the gateway has no plugin program {name!r}; it has {', '.join(self._programs)}",
            )
        arrays, run = program
        try:
            each = [asked] if arrays is None else asked[arrays]
            first = each[0].get("devices") if each else None
            plugin = Plugin(name, asked, (0,) if first is None else _numbers(first), run)
            if name == "pw_offer":
                failed = partial(self._exchange.refuse, asked)
                return replace(plugin, failed=failed)
            return plugin
        except _UNREADABLE as error:
            raise _cannot_be_read(name, error) from error

    # --- arrays between sessions ----------------------------------------------------------------------

    async def _offer(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        await self._exchange.offer(asked, args)
        return Outcome()

    async def _take(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        return Outcome(await self._exchange.take(asked))

    async def _checkpoint(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        return Outcome((), [await self._exchange.checkpoint(args)])

    async def _memory(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        return Outcome([await self._exchange.memory(asked)])

    # --- files ----------------------------------------------------------------------------------------

    async def _write(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        asked = asked.get("write_requests", [asked])
        if len(asked) != len(args):
            raise ValueError(f"it describes {len(asked)} arrays, and was given {len(args)}")
        ends = []
        for one, array in zip(asked, args, strict=True):
            layout = self._layout(
                one["devices"], one["b64_hlo_sharding_string"], "", tuple(map(int, one["shape"]))
            )
            if (array.shape, array.devices) != (tuple(one["shape"]), layout.devices):
                raise ValueError(
                    f"it describes an array of shape {one['shape']} on the devices {list(layout.devices)}, "
                    f"and was given one of shape {list(array.shape)} on {list(array.devices)}"
                )
            _say_tiles(array, layout)
            ends.append(
                await self._files.write(_text(one["b64_location"]), _text(one["b64_name"]), array)
            )
        return Outcome((), ends)

    async def _read(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        arrays = []
        for one in asked.get("read_requests", [asked]):
            shape = tuple(map(int, one["shape"]["dimensions"]))
            dtype = one["shape"]["xla_primitive_type_str"]
            layout = self._layout(one["devices"], one["b64_hlo_sharding_string"], "", shape)
            where = _text(one["b64_location"]), _text(one["b64_name"])
            arrays.append(await self._files.read(*where, dtype, shape, layout))
        return Outcome(arrays, await self._files.arrived(arrays))

    # --- dividing arrays otherwise --------------------------------------------------------------------

    async def _reshard(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        layouts = []
        for array, here, there in zip(args, asked["inSharding"], asked["outSharding"], strict=True):
            _say_tiles(array, self._described(here, array.shape))
            layouts.append(self._described(there, array.shape))
        arrays = await self._reshards.reshard(args, layouts)
        if asked.get("donateInput"):
            for array in args:
                array.delete()
        return Outcome(arrays)

    def _described(self, one: Any, shape: tuple[int, ...]) -> shardings.ShardLayout:
        memory = one.get("memory_kind", "")
        return self._layout(one["devices"], one["xla_hlo_sharding"], memory, shape)

    def _layout(
        self, devices: Any, sharding: str, memory: str, shape: tuple[int, ...]
    ) -> shardings.ShardLayout:
        proto = protos.message("xla.OpSharding").FromString(base64.b64decode(sharding))
        numbers = _numbers(devices)
        memory = memory or self._devices.memories[0]
        return shardings.of_op_sharding(proto, numbers, memory, shape)

    # --- profiles -------------------------------------------------------------------------------------

    async def _profile(self, asked: Any, args: Sequence[ProxyArray]) -> Outcome:
        logger.warning(
            "a client asks for a profile in %s: hosts write none, and jax.profiler traces the "
            "process of the script only",
            asked["traceLocation"],
        )
        if "xprofTraceOptions" not in asked:
            return Outcome()
        empty = ProxyArray("uint8", (1,), (1,), (0,), self._devices.memories[0], True)
        empty.value = np.zeros(1, np.uint8)
        return Outcome([empty])


def _say_tiles(array: ProxyArray, layout: shardings.ShardLayout) -> None:
    """Let an array know which part of it each shard is, if only the JSON says so."""
    if array.sharding is None and array.devices == layout.devices:
        array.sharding = layout.sharding


def _cannot_be_read(name: str, error: Exception) -> statuses.StatusError:
    return statuses.StatusError(
        "INVALID_ARGUMENT", f"the plugin program {name} cannot be read: {error!r}"
    )


def _numbers(devices: Any) -> tuple[int, ...]:
    return tuple(map(int, devices["device_ids"]))


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()
