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
    """Controller to IslandScheduler (local): report what is reserved on each device."""

    request: int


class CountedMemory(msgspec.Struct, frozen=True, array_like=True):
    """One device as its scheduler counts it."""

    device: DeviceAddress
    arrays_bytes: int
    reserved: tuple[tuple[int, int], ...]
    """Clients, and the bytes that their admitted runs have reserved."""
    temporary_bytes: int


class IslandMeasured(Local, frozen=True, tag=182):
    """IslandScheduler to Controller (local): what is reserved on each device of the island."""

    request: int
    island: str
    limit_bytes: int | None
    """Of each device; None where nothing limits it, and nothing is counted."""
    devices: tuple[CountedMemory, ...]


class MeasureHost(ControllerToStore, frozen=True, tag=183):
    """Controller to ObjectStore: report the arrays on each of the first `devices` devices."""

    request: int
    devices: int
    largest: int
    """How many arrays of each device to name."""


class ArrayMemory(msgspec.Struct, frozen=True, array_like=True):
    """One of the largest arrays on a device."""

    client: ClientNumber
    array: int
    """Its number among those of the client."""
    type: str
    program: str
    """The program that made it; empty if it was uploaded, or that is not known (here)."""
    size_bytes: int
    """Of the shard on the device."""


class HeldMemory(msgspec.Struct, frozen=True, array_like=True):
    """One device as its host counts it. A shard that several arrays name counts once."""

    clients: tuple[tuple[int, int, int], ...]
    """Clients, their arrays here, and the bytes of these."""
    largest: tuple[ArrayMemory, ...]
    in_use_bytes: int | None
    """As the device's allocator counts; None if it does not."""
    peak_bytes: int | None
    """The most that was in use; None if the allocator does not count it."""


class HostMeasured(HostToController, frozen=True, tag=184):
    """ObjectStore to Controller: the arrays on each device of this host."""

    request: int
    devices: tuple[HeldMemory, ...]


class OwnerMemory(msgspec.Struct, frozen=True, array_like=True):
    """What one client has on a device."""

    client: int
    """Its number; 0 for all clients together that the asker may not see."""
    name: str
    arrays: int
    arrays_bytes: int
    reserved_bytes: int


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """The memory of one device."""

    island: str
    host: str
    device: int
    limit_bytes: int | None
    """None where nothing limits it; then nothing is reserved either."""
    free_bytes: int | None
    """What the scheduler can still give to runs; None without a limit."""
    arrays_bytes: int | None
    """Of all arrays there, also those that runs in flight are to make; None if the host did not answer."""
    reserved_bytes: int
    """For runs in flight, their results included."""
    temporary_bytes: int
    """Reserved for the temporaries of all computations."""
    in_use_bytes: int | None
    """As the device's allocator counts; None if it does not."""
    peak_bytes: int | None
    """The most that was in use; None if the allocator does not count it."""
    owners: tuple[OwnerMemory, ...]
    largest: tuple[ArrayMemory, ...]


class Memory(ControllerToSession, frozen=True, tag=185):
    """Controller to ClientSession: the memory of all devices of islands that are ready."""

    request: int
    devices: tuple[DeviceUse, ...]
    silent: tuple[str, ...]
    """Hosts that have not answered in time."""
