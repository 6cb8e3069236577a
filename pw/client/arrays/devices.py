"""Slices of virtual devices; the resource manager binds them to physical devices, and may rebind them."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from operator import index
from typing import Any, overload

import numpy as np

from pw.client.arrays import device_in_jax
from pw.client.arrays.device_in_jax import NoClient, VirtualMemory, memories_of
from pw.client.arrays.operator_cache import Recent
from pw.client.arrays.slice_arguments import check_count, count_of, host_names, shape_of, size_of
from pw.client.connection import current
from pw.client.display.tables import Table, facts, html
from pw.client.keywords import checks_keywords
from pw.core.coordinates import times
from pw.core.errors import ArgumentError, InsufficientDevices
from pw.core.ids import serial_of
from pw.core.jax_private.tables import forget_devices
from pw.core.messages import SliceBound
from pw.core.sizes import size_in_words


class _DeviceGroup:
    """Virtual devices in an order, and tables of what this process has made for them."""

    size: int
    """Number of devices."""
    topology: tuple[int, ...] | None = None
    """Number of devices along each axis of their block on the interconnect; None if no shape was asked for. The
    devices are in the order of the block, the last axis first, and a mesh of the group has these axes."""

    def __init__(self) -> None:
        self.compiled = Recent()
        """Compiled operators and moves for these devices."""
        self.constants: dict[Any, Any] = {}
        """Values that functions closed over and that lie here (see `pw.client.computations.export`)."""
        self.types: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        """The interned types of arrays here (see `pw.client.arrays.signature`)."""

    @property
    @abstractmethod
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The devices, in order."""

    @property
    def tpus(self) -> tuple[VirtualDevice, ...]:
        """The devices, under the paper's name."""
        return self.devices

    def __len__(self) -> int:
        return self.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        devices = self.devices
        grid = np.empty(len(devices), dtype=object)  # so that `Mesh` takes a slice
        grid[:] = devices
        return grid if self.topology is None else grid.reshape(self.topology)


class Slice(_DeviceGroup):
    """Virtual devices of one island, owned by this client until nothing refers to them."""

    memory: int | None = None
    """Bytes that arrays and runs of the slice may have on each of its devices; None for no bound. Errors and
    `pw.memory()` call the slice by the `slice_index` of its devices."""

    def __init__(self, session: Any, bound: SliceBound, memory: int | None = None) -> None:
        super().__init__()
        self.memory = memory
        self.runtime = session
        self.id = bound.slice
        self._island = bound.island
        self.platform = bound.platform
        self.kind = bound.kind
        self.size = len(bound.devices)
        self.topology = bound.topology or None
        self._coords = bound.coords

    @property
    def coords(self) -> tuple[tuple[int, ...], ...]:
        """Coordinates of the devices in the grid of the island, in order: after a loss or a drain they may be
        others. An empty tuple for a device that has none.
        """
        self._coords = self.runtime.coords(self.id) or self._coords
        return self._coords

    @property
    def island(self) -> str:
        """The island that the devices are on now: after a loss or a drain it may be another one."""
        self._island = self.runtime.island(self.id) or self._island
        return self._island

    @property
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The slice's devices, in order."""
        return tuple(VirtualDevice(self, index) for index in range(self.size))

    def __repr__(self) -> str:
        shape = "" if self.topology is None else f", topology={self.topology}"
        memory = "" if self.memory is None else f", memory={size_in_words(self.memory)!r}"
        return f"Slice(island={self.island!r}, devices={self.size}, platform={self.platform!r}{shape}{memory})"

    def _repr_html_(self) -> str:
        rows = [("island", self.island), ("devices", self.size), ("platform", self.platform)]
        if self.topology is not None:
            rows.append(("topology", times(self.topology)))
        if self.memory is not None:
            rows.append(("memory", size_in_words(self.memory)))
        return facts("Slice", [*rows, *([("kind", self.kind)] if self.kind else [])])

    def __del__(self) -> None:
        session = getattr(self, "runtime", None)
        if session is not None and session.alive:
            session.release_slice(self.id)


class Slices(_DeviceGroup):
    """Slices of several islands, whose devices a mesh joins; equal ones are one object."""

    def __init__(self, parts: tuple[Slice, ...]) -> None:
        super().__init__()
        self.parts = parts
        self.size = sum(part.size for part in parts)
        _joined[tuple(map(id, parts))] = self

    @classmethod
    def of(cls, parts: tuple[Slice, ...]) -> Slices:
        """Return the object that stands for these slices."""
        return _joined.get(tuple(map(id, parts))) or cls(parts)

    @property
    def id(self) -> int:
        """No slice of the cluster: an array over several islands has a part in each."""
        return -1

    @property
    def runtime(self) -> Any:
        """The session that the slices belong to."""
        return self.parts[0].runtime

    @property
    def memory(self) -> int | None:
        """Bytes that arrays and runs may have on each of the devices; None for no bound."""
        return self.parts[0].memory

    @property
    def island(self) -> str:
        """The names of the islands."""
        return ", ".join(part.island for part in self.parts)

    @property
    def platform(self) -> str:
        """Kind of backend, the same on all islands."""
        return self.parts[0].platform

    @property
    def kind(self) -> str:
        """Kind of device of the first island."""
        return self.parts[0].kind

    @property
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The devices of all slices, island after island."""
        return tuple(device for part in self.parts for device in part.devices)

    def __repr__(self) -> str:
        return f"Slices(islands={self.island!r}, devices={self.size}, platform={self.platform!r})"

    def _repr_html_(self) -> str:
        rows = [("islands", self.island), ("devices", self.size), ("platform", self.platform)]
        return facts("Slices", rows)


_joined: weakref.WeakValueDictionary[tuple[int, ...], Slices] = weakref.WeakValueDictionary()


class VirtualDevice:
    """One device of a slice; the cluster chooses the physical device behind it.

    JAX's meshes take it, because it has what JAX asks of a device while it traces.
    """

    __slots__ = ("index", "slice")
    process_index = 0
    """The process that programs the device: this one, as in JAX's single-controller mode."""

    def __init__(self, slice: Slice, index: int) -> None:
        self.slice = slice
        self.index = index

    @property
    def platform(self) -> str:
        """Kind of backend: "cpu", "cuda" or "tpu"."""
        return self.slice.platform

    @property
    def device_kind(self) -> str:
        """Kind of device, such as "NVIDIA H100"."""
        return self.slice.kind

    @property
    def slice_index(self) -> int:
        """Number of the slice in this session."""
        return serial_of(self.slice.id)

    @property
    def id(self) -> int:
        """Number of the device in this session."""
        return (serial_of(self.slice.id) << 16) + self.index  # JAX wants 64 bits

    @property
    def client(self) -> NoClient:
        """JAX's client of the device, which there is none of."""
        return NoClient(self)

    def default_memory(self) -> VirtualMemory:
        """Return the device's own memory."""
        return self.addressable_memories()[0]

    def addressable_memories(self) -> tuple[VirtualMemory, ...]:
        """Return the memories beside the device in which arrays can lie; its own is the first."""
        return memories_of(self.platform)

    @property
    def coords(self) -> tuple[int, ...]:
        """Coordinates of the device in the grid of its island; empty if it has none."""
        coords = self.slice.coords
        return coords[self.index] if self.index < len(coords) else ()

    @property
    def island(self) -> str:
        """The island that the device is on."""
        return self.slice.island

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VirtualDevice):
            return NotImplemented
        return self.slice is other.slice and self.index == other.index

    def __hash__(self) -> int:
        return hash((id(self.slice), self.index))

    def __repr__(self) -> str:
        return (
            f"VirtualDevice({self.index} of {self.slice.size}, island={self.island!r}, "
            f"platform={self.platform!r})"
        )

    def _repr_html_(self) -> str:
        which = f"{self.index} of {self.slice.size}"
        rows = [("device", which), ("island", self.island), ("platform", self.platform)]
        return facts("VirtualDevice", rows)


class VirtualDeviceSet:
    """The slices that a script has allocated, in the paper's words."""

    def __init__(self, session: Any) -> None:
        self._runtime = session
        self._slices: list[Slice] = []

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices added so far."""
        return tuple(self._slices)

    @overload
    def add_slice(
        self,
        devices: int | None = None,
        kind: str | None = None,
        island: str | None = None,
        topology: Sequence[int] | None = None,
        *,
        tpu_devices: int | None = None,
        islands: None = None,
        hosts: str | Sequence[str] | None = None,
        exclusive: bool = False,
        memory: int | str | None = None,
    ) -> Slice: ...

    @overload
    def add_slice(
        self,
        devices: int | None = None,
        kind: str | None = None,
        *,
        islands: int | Sequence[str],
        tpu_devices: int | None = None,
        exclusive: bool = False,
        memory: int | str | None = None,
    ) -> Slices: ...

    @checks_keywords
    def add_slice(
        self,
        devices: int | None = None,
        kind: str | None = None,
        island: str | None = None,
        topology: Sequence[int] | None = None,
        *,
        tpu_devices: int | None = None,
        islands: int | Sequence[str] | None = None,
        hosts: str | Sequence[str] | None = None,
        exclusive: bool = False,
        memory: int | str | None = None,
    ) -> Slice | Slices:
        """Allocate virtual devices for computations; returns when they are bound.

        Devices that have computed the least in the last minute are chosen first, and of equal ones those that
        the fewest slices have.

        Args:
            devices: how many; those of `topology` if None.
            kind: device kind they must have, such as "cpu" or "NVIDIA H100"; any if None.
            island: name of the island they must be on; any if None.
            topology: number of devices along each axis of a block of neighbours on the interconnect, such as
                `(2, 4)`; any devices if None. The devices come in the order of the block, the last axis first,
                so that axes of a mesh of this shape lie along its links: `pw.Mesh(slice, ("x", "y"))`.
                The block may lie turned, and around the end of an axis that wraps around. It keeps its shape
                when the slice moves. `pw status` shows the grid of each island, and its free blocks.
            tpu_devices: the paper's name for `devices`.
            islands: spread the devices evenly over so many different islands, or over the islands with
                these names. A mesh of them may have one axis that crosses islands: the first dimension of
                `np.array(slices.devices).reshape(islands, ...)`. `island` and `topology` do not go with it.
            hosts: names of hosts of one island, as `pw status` shows them, or one name. Each has as many of
                the devices, in this order. If one is lost, the slice waits for it and moves to no other
                host. `islands` and `topology` do not go with it.
            exclusive: share the devices with no other slice of any client, for as long as this one lives.
                Otherwise slices share devices in time.
            memory: bytes that arrays on the slice may have on each device, with the results and temporaries of
                runs there: a number, or a text such as "24GiB"; None for no bound. On each device, such slices
                have no more together than the device has. A run or an upload without room waits until arrays of
                the slice are deleted, or leave for host memory.

        Raises:
            InsufficientDevices: no island can satisfy the request, or has a host of that name. The error says
                which blocks are free, how much memory of devices is left, and what stands in the way.
            ArgumentError: `kind` or `island` is no name, `memory` no size, or there is no such argument.
            ValueError: the devices do not divide over the islands or hosts, or are more or fewer than those of
                `topology`.
        """
        shape = None if topology is None else shape_of(topology)
        if (devices is not None and tpu_devices is not None) or (devices, tpu_devices, shape) == (
            None,
        ) * 3:
            raise TypeError(
                "add_slice takes one number of devices, add_slice(devices=4), or a shape, "
                "add_slice(topology=(2, 4))"
            )
        asked: Any = tpu_devices if devices is None else devices
        if asked is None and shape is not None:
            asked = math.prod(shape)
        count = count_of(asked)
        for what, value in (("kind", kind), ("island", island)):
            if not isinstance(value, str | None):
                raise ArgumentError(
                    f"add_slice takes {what}= as a name, as pw status shows it; not {value!r}"
                )
        size_bytes = None if memory is None else size_of(memory)
        how: Any = {"exclusive": exclusive, "memory": size_bytes}
        if shape is not None:
            check_count(count, shape)
        if hosts is not None:
            if islands is not None or shape is not None:
                raise TypeError("add_slice takes hosts= without islands= and topology=")
            named = host_names(hosts)
            if count % len(named):
                raise ValueError(
                    f"{count} devices do not divide over {len(named)} hosts; each has as many as the others"
                )
            return self._add(count, kind, island, hosts=named, **how)
        if islands is None:
            return self._add(count, kind, island, shape, **how)
        if island is not None or shape is not None:
            raise TypeError("add_slice takes islands= without island= and topology=")
        names: list[str | None] = (
            list(islands) if isinstance(islands, Sequence) else [None] * index(islands)
        )
        if not names or count % len(names):
            raise ValueError(
                f"{count} devices do not divide over {len(names)} islands; each has as many as the others"
            )
        if isinstance(islands, str) or len({*names} - {None}) < len(names) - names.count(None):
            raise ValueError(
                f"islands= takes a number, or different names of islands; not {islands!r}"
            )
        parts: list[Slice] = []
        for name in names:
            apart = tuple(one.id for one in parts)
            try:
                part = self._add(count // len(names), kind, name, apart=apart, **how)
                parts.append(part)
            except InsufficientDevices as error:
                del self._slices[len(self._slices) - len(parts) :]
                raise InsufficientDevices(
                    f"{count} devices do not fit on {len(names)} different islands: {error}"
                ) from None
        return parts[0] if len(parts) == 1 else Slices.of(tuple(parts))

    def _add(
        self,
        count: int,
        kind: str | None,
        island: str | None,
        topology: tuple[int, ...] | None = None,
        *,
        memory: int | None,
        **how: Any,
    ) -> Slice:
        forget_devices(VirtualDevice)  # a slice that only JAX remembers is given back
        if memory is not None:
            how["memory_bytes"] = memory
        bound = self._runtime.allocate_slice(count, kind, island, topology, **how)
        added = Slice(self._runtime, bound, memory)
        self._slices.append(added)
        return added

    def __repr__(self) -> str:
        return f"VirtualDeviceSet({self._slices!r})"

    def _repr_html_(self) -> str:
        rows = tuple((s.island, s.size, s.platform, s.kind or "") for s in self._slices)
        return html("", [Table("Slices", ("island", "devices", "platform", "kind"), rows)])


def slice_for_python(hosts: int | str | Sequence[str]) -> Slice:
    """Allocate a device on each of these hosts, or of so many hosts of one island that run Python functions.

    Raises:
        InsufficientDevices: there are no such hosts.
        PythonRefused: a host runs no Python functions of clients.
        ValueError: `hosts` is neither a number nor names.
    """
    runtime = current.runtime()
    if not isinstance(hosts, int):
        names = host_names(hosts)
        return Slice(runtime, runtime.allocate_slice(len(names), hosts=names, python=True))
    if isinstance(hosts, bool) or hosts < 1:
        raise ValueError(f"hosts= takes names, or how many hosts, at least 1; not {hosts!r}")
    return Slice(runtime, runtime.allocate_slice(hosts, host_count=hosts, python=True))


def make_virtual_device_set() -> VirtualDeviceSet:
    """Return an empty set of slices; connects to a cluster if this process is not connected."""
    return VirtualDeviceSet(current.runtime())


device_in_jax.register(VirtualDevice)
