"""The memory of devices: what hosts have there, and what schedulers have reserved."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import (
    ClientToController,
    ControllerToSession,
    ControllerToStore,
    HostToController,
    Local,
)
from pw.core.messages.owners import ClientNumber
from pw.core.sharding import DeviceAddress


class GetMemory(ClientToController, frozen=True, tag=180):
    """ClientSession to Controller: report the memory of all devices."""

    request: int


class MeasureIsland(Local, frozen=True, tag=181):
    """Controller to IslandScheduler (local): report the bytes that are reserved on each device."""

    request: int


class CountedMemory(msgspec.Struct, frozen=True, array_like=True):
    """One device as its scheduler counts it."""

    device: DeviceAddress
    arrays_bytes: int
    reserved: tuple[tuple[int, int], ...]
    """Bytes that the admitted runs of each client have reserved."""
    temporary_bytes: int
    slices: tuple[tuple[int, int], ...] = ()
    """Number of each slice with a bound of memory, and its bytes here, those of runs in flight included."""


class IslandMeasured(Local, frozen=True, tag=182):
    """IslandScheduler to Controller (local): the bytes that are reserved on each device of the island."""

    request: int
    island: str
    limit_bytes: int | None
    """Bytes of each device; None where nothing limits it, and nothing is counted."""
    devices: tuple[CountedMemory, ...]


class MeasureHost(ControllerToStore, frozen=True, tag=183):
    """Controller to ObjectStore: report the arrays on each of the first `devices` devices."""

    request: int
    devices: int
    largest: int
    """Number of arrays of each device to name."""


class ArrayMemory(msgspec.Struct, frozen=True, array_like=True):
    """One of the largest arrays on a device."""

    client: ClientNumber
    array: int
    """Number of the array among those of the client."""
    type: str
    program: str
    """Name of the program that made the array; empty if it was uploaded, or that is not known (here)."""
    size_bytes: int
    """Bytes of the shard on the device."""


class HeldMemory(msgspec.Struct, frozen=True, array_like=True):
    """One device as its host counts it. A shard that several arrays name counts once."""

    clients: tuple[tuple[int, int, int], ...]
    """Number of each client, of its arrays here, and of their bytes."""
    largest: tuple[ArrayMemory, ...]
    in_use_bytes: int | None
    """Bytes in use as the device's allocator counts; None if it does not."""
    peak_bytes: int | None
    """Bytes that were in use, at most; None if the allocator does not count them."""
    host_bytes: int = 0
    """Bytes of shards of this device that lie in host memory."""
    file_bytes: int = 0
    """Bytes of shards of this device that lie in files of the host."""


class HostMeasured(HostToController, frozen=True, tag=184):
    """ObjectStore to Controller: the arrays on each device of this host."""

    request: int
    devices: tuple[HeldMemory, ...]


class OwnerMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one client on a device."""

    client: int
    """Number of the client; 0 for all clients together that the asker may not see."""
    name: str
    arrays: int
    arrays_bytes: int
    reserved_bytes: int


class SliceMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory on a device of one slice that has a bound (`add_slice(memory=)`)."""

    client: ClientNumber
    """Number of the client that has the slice."""
    slice: int
    """Number of the slice among those of the client: the `slice_index` of its devices."""
    used_bytes: int
    """Bytes of arrays there, and of what runs in flight have reserved."""
    bound_bytes: int


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """The memory of one device."""

    island: str
    host: str
    device: int
    limit_bytes: int | None
    """Bytes of the device; None where nothing limits it; then nothing is reserved either."""
    free_bytes: int | None
    """Bytes that the scheduler can still give to runs; None without a limit."""
    arrays_bytes: int | None
    """Bytes of all arrays there, also those that runs in flight are to make; None if the host did not
    answer."""
    reserved_bytes: int
    """Bytes that are reserved for runs in flight, their results included."""
    temporary_bytes: int
    """Bytes that are reserved for the temporaries of all computations."""
    in_use_bytes: int | None
    """Bytes in use as the device's allocator counts; None if it does not."""
    peak_bytes: int | None
    """Bytes that were in use, at most; None if the allocator does not count them."""
    owners: tuple[OwnerMemory, ...]
    largest: tuple[ArrayMemory, ...]
    host_bytes: int | None = None
    """Bytes of the device's shards that lie in host memory: arrays that a script has put there, and those that
    have left the device; None if the host did not answer."""
    slices: tuple[SliceMemory, ...] = ()
    """Slices with a bound of memory that the asker may see."""
    file_bytes: int | None = None
    """Bytes of the device's shards that lie in files of its host; None if the host did not answer."""


class Memory(ControllerToSession, frozen=True, tag=185):
    """Controller to ClientSession: the memory of all devices of islands that are ready."""

    request: int
    devices: tuple[DeviceUse, ...]
    silent: tuple[str, ...]
    """Names of hosts that have not answered in time."""
