"""Between clients, the controller and the schedulers: work that is suspended or moves, and goes on."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import ClientToController, ControllerToSession, Local
from pw.core.messages.bounds import Count, DeviceBytes, DeviceCount, Devices, Name, Topology
from pw.core.sharding import DeviceAddress


class SuspendClients(ClientToController, frozen=True, tag=244):
    """ClientSession to Controller: have these clients leave their devices until they are resumed.

    Answered when they have left. Without a client, tenant or island: the sender itself.
    """

    request: int
    client: Count = 0
    tenant: Name = ""
    """Name of a tenant, to mean all its clients."""
    island: Name = ""
    """Name of an island, to mean all clients with devices there."""
    to_files: bool = False
    """True if copies are to lie in files, where hosts have a folder for files."""


class ResumeClients(ClientToController, frozen=True, tag=245):
    """ClientSession to Controller: have suspended clients go on as soon as there are devices.

    Without a client, tenant or island: the sender itself.
    """

    request: int
    client: Count = 0
    tenant: Name = ""
    island: Name = ""
    """Name of an island, to mean all clients that had devices there."""


class MigrateClient(ClientToController, frozen=True, tag=257):
    """ClientSession to Controller: have a client go on, with all it has, on another island.

    Answered when it has left its devices, or with the reason why it stays.
    """

    request: int
    island: Name
    client: Count = 0
    """Number of the client; 0 for the sender."""
    slice: int = 0
    """Number of the only slice that moves; 0 for all that are on other islands."""
    devices: Devices = ()
    """Devices of the island that the slice is to have, in order, if they are free; empty for any."""


class PlanMoves(ClientToController, frozen=True, tag=258):
    """ClientSession to Controller: say which slices should move. Nothing moves.

    Without devices: so that slices share devices evenly. Else: so that there is room for a slice as
    `AllocateSlice` asks for it. Only slices of clients that the sender may move do. Answered with
    `MovesPlanned`, or with the reason why no moves make room.
    """

    request: int
    devices: DeviceCount = 0
    topology: Topology | None = None
    island: Name | None = None
    exclusive: bool = False
    memory_bytes: DeviceBytes = 0


class SliceMove(msgspec.Struct, frozen=True, array_like=True):
    """A slice that should move."""

    client: int
    name: str
    """Name of the client."""
    slice: int
    source: str
    """Name of the island where it is."""
    island: str
    """Name of the island to which it moves; it may be the same."""
    devices: tuple[DeviceAddress, ...]
    """The devices that it gets there, in order."""
    size_bytes: int
    """Bytes of the arrays that move along."""


class MovesPlanned(ControllerToSession, frozen=True, tag=259):
    """Controller to ClientSession: the slices that should move."""

    request: int
    moves: tuple[SliceMove, ...]


class PauseUploads(ControllerToSession, frozen=True, tag=249):
    """Controller to ClientSession: send no new values to hosts until this comes again with `is_over`.

    The controller asks for those that it wants. Answered with `UploadsPaused`.
    """

    is_over: bool = False
    suspended_by: str = ""
    """Who has suspended the client, in words, if it stays suspended also at a later controller (`Attach`)."""


class UploadsPaused(ClientToController, frozen=True, tag=250):
    """ClientSession to Controller: all values that were sent have been announced before this."""


class HoldLaunches(Local, frozen=True, tag=246):
    """Controller to IslandScheduler (local): launch no more runs of a client, but these."""

    client: int
    but: tuple[int, ...] = ()


class LaunchesHeld(Local, frozen=True, tag=247):
    """IslandScheduler to Controller (local): no host takes launches of the client any more.

    `queued` are its runs of which nothing was launched on this island.
    """

    island: str
    client: int
    queued: tuple[int, ...]


class LetLaunch(Local, frozen=True, tag=248):
    """Controller to IslandScheduler (local): the launches of a client are not held any more."""

    client: int
    gone: tuple[int, ...] = ()
    """Arrays that have left the devices; the controller has told the hosts."""
