"""Binds slices to devices: which island has room, which positions a slice gets, and when it moves.

A slice goes to the island where its devices are the least busy; of equal ones, to the one whose devices it
would share the least. Or it has the devices of another slice that it is to be like. A slice that names hosts
has devices of those only. A slice of an earlier controller waits first for the island that it was on, where it
has its former devices if they are free, then for any that has room (`pw.sched.cluster.slice_states`). While the
cluster starts, a slice that no island fits waits for those that are still to come. `pw.sched.cluster.fitting`
knows the devices that a slice may have.

Slices of a client that goes on after a suspension are bound *together*: two such clients with several exclusive
slices, each with some of them, would wait for each other. A client that is alone takes what there is.

An exclusive slice shares its devices with no other slice, but for those that are to be like it. Slices with a
bound of memory may have no more together, on each device, than it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, Address, client_of
from pw.core.messages import AllocateSlice, ReleaseSlice, SliceBound, SliceRefused
from pw.core.sharding import DeviceAddress
from pw.core.waits import CLUSTER_START_S, MOVE_S
from pw.sched.cluster.fitting import STEP_S, choose, fits, has_block, has_memory, is_free, suits
from pw.sched.cluster.grid import Position
from pw.sched.cluster.inventory import SETTLING_S, Host, Inventory, Island
from pw.sched.cluster.refusals import refusal
from pw.sched.cluster.slice_states import BoundSlice, SliceEvent, SliceState

RESUME_S = 30.0
"""Seconds for which slices of an earlier controller wait after that for any island that has room."""


@dataclass(frozen=True, slots=True)
class WaitedEnough:
    """Timer: a parked slice has waited for its former island, or for any."""

    slice: int
    is_over: bool
    """True to refuse the slice if no island has room."""


@dataclass(frozen=True, slots=True)
class _PlaceTogether:
    """The slices of this turn have been asked for: place those that are bound together."""

    slice: int


class Room(NamedTuple):
    """Devices that a slice may have."""

    island: Island
    positions: tuple[Position, ...]


Busy = Callable[[str], Mapping[DeviceAddress, float]]
"""Function that returns the device time of the last minute of each device of an island that has some, in
seconds."""


@dataclass(eq=False, repr=False)
class SliceTable(Part):
    """Slices of the cluster."""

    env: Env
    inventory: Inventory
    move_s: float = MOVE_S
    """Seconds for which slices wait for their island before they move to another one."""
    busy: Busy = lambda island: {}
    _slices: dict[int, BoundSlice] = field(default_factory=dict, init=False)
    """Slices by number: parked ones in the order in which they were parked, bound ones in the order of
    binding."""
    _are_parked: bool = field(default=False, init=False)
    """True if slices may be parked."""

    @handles(AllocateSlice)
    def _allocate(self, sender: Address, request: AllocateSlice) -> None:
        if request.resumed:
            self.inventory.settling_until_s = self.env.now_s() + SETTLING_S
            self.env.call_later(self.move_s, WaitedEnough(request.slice, False))
            self.env.call_later(self.move_s + RESUME_S, WaitedEnough(request.slice, True))
        client = client_of(request.slice)
        if not request.like and any(
            one.request.together and client_of(one.request.slice) == client for one in self.parked
        ):
            request = msgspec.structs.replace(request, together=True)  # behind those
        piece = BoundSlice(request, island=request.formerly)
        if request.together:
            self._slices[request.slice] = piece
            self._park(piece)
            self.env.send(self.env.address, _PlaceTogether(request.slice))
        else:
            self._place(piece)
        if request.waits and request.formerly:
            self.env.call_later(self.move_s, WaitedEnough(request.slice, False))
        if not (request.resumed or request.waits) and piece.state is SliceState.PARKED:
            waits_s = CLUSTER_START_S if self.inventory.awaited_islands else self.move_s
            self.env.call_later(waits_s, WaitedEnough(request.slice, True))

    @handles(_PlaceTogether)
    def _place_together(self, sender: Address, note: _PlaceTogether) -> None:
        piece = self._slices.get(note.slice)
        if piece is not None and piece.state is SliceState.PARKED:
            self._place(piece)

    @handles(ReleaseSlice)
    def _release(self, sender: Address, message: ReleaseSlice) -> None:
        piece = self._slices.pop(message.slice, None)
        if piece is not None:
            if piece.state is SliceState.BOUND:
                self.vacate(piece)
            piece.happened(SliceEvent.RELEASE)
            for one in self._slices.values():
                if one.request.like == message.slice and (
                    one.state is SliceState.BOUND or one.request.waits
                ):
                    one.request = msgspec.structs.replace(one.request, like=0)
            self.retry_parked()

    @handles(WaitedEnough)
    def _waited_enough(self, sender: Address, timer: WaitedEnough) -> None:
        """The slice's former island does not come back, or no island has had room for it."""
        piece = self._slices.get(timer.slice)
        if piece is None or piece.state is not SliceState.PARKED:
            return
        piece.request = msgspec.structs.replace(piece.request, formerly="", like=0)
        waits = piece.request.waits or self._waits_for_hosts(piece)
        may_end = timer.is_over and not waits
        if may_end and self.room(piece.request) is None:
            self._refuse(piece)
        else:
            self._place(piece)

    @property
    def parked(self) -> list[BoundSlice]:
        """The slices that wait for an island, in the order in which they were parked."""
        return [one for one in self._slices.values() if one.state is SliceState.PARKED]

    def counts(self) -> Counter[str]:
        """Return how many slices each island has."""
        return Counter(one.island for one in self._slices.values() if one.state is SliceState.BOUND)

    # --- changes of islands -----------------------------------------------------------------------

    def bind_again(self, island: Island) -> None:
        """An island has another epoch: bind its slices again, to their positions if they still suit."""
        pieces = self.on(island)
        stay: set[int] = set()
        island.vacate_all()
        for piece in pieces:
            request = piece.request
            model = self._model_of(request)
            model_stays = (
                model is None or model.request.slice in stay or model.island != island.name
            )
            has_room = all(has_memory(island, request, at) for at in piece.positions)
            if model_stays and has_room and self.may_stay(piece, island):
                island.occupy(piece.positions, request)
                stay.add(request.slice)
        for piece in pieces:
            if piece.request.slice in stay:
                self._tell_bound(piece, SliceEvent.REBIND, island, piece.positions)
            else:
                self._place_again(piece, island)

    def may_stay(self, piece: BoundSlice, island: Island) -> bool:
        """Whether the positions of a slice still suit it."""
        model = self._model_of(piece.request)
        if model is not None and model.island == island.name:
            is_there = piece.positions == model.positions[: len(piece.positions)]
            return is_there and self.may_stay(model, island)
        return fits(island, piece.request) and suits(island, piece.request, piece.positions)

    def _place_again(self, piece: BoundSlice, island: Island) -> None:
        """Bind a slice whose positions do not suit it any more."""
        piece.positions = ()
        room = self.room_on(island, piece)
        if room is not None:
            self._bind(piece, SliceEvent.REBIND, room)
        elif set(piece.request.hosts) - set(island.ranks):
            self._park(piece)
        elif (room := self.room(piece.request)) is not None:
            self._bind(piece, SliceEvent.MOVE, room)
        elif any(fits(one, piece.request) for one in self.inventory.islands.values()):
            piece.request = msgspec.structs.replace(piece.request, resumed=True)
            self._park(piece)
            waits_s = self.move_s + RESUME_S
            self.env.call_later(waits_s, WaitedEnough(piece.request.slice, True))
        else:  # the island came back smaller, or as another platform
            self._refuse(piece)

    def retry_parked(self) -> None:
        """An island is ready, or devices are free: place the slices that wait."""
        if self._are_parked:
            for piece in self.parked:
                if piece.state is SliceState.PARKED:
                    # It is bound already if it is like another one.
                    self._place(piece)
            self._are_parked = bool(self.parked)

    def move(self, island: Island) -> None:
        """An island does not come back: move its slices to islands that have room."""
        for piece in self.on(island):
            room = self.room(piece.request)
            if room is not None and not (piece.request.like and room.island is island):
                self.vacate(piece)
                piece.positions = ()
                self._bind(piece, SliceEvent.MOVE, room)

    def stuck_on(self, island: Island) -> int:
        """Return how many slices of an island no other island has room for."""
        return self._stuck([one for one in self.on(island) if not one.request.like], island)

    def displaced_by(self, spare: Host, node: str, island: Island) -> int:
        """Return how many slices with a shape have no room if a spare takes the place of a host.

        Their block may have a hole then, because the spare is at another place. Without coordinates of
        operators none has: JAX tells where a spare is only when it has joined, as a rule where its rank was.
        """
        if not any(island.coords_of(host.registration) for host in island.hosts.values()):
            return 0
        after = [spare if host.node == node else host for host in island.ranked()]
        grid = island.grid_of(after)
        failed = [at for at in island.failed_positions() if island.ranks[at[0]] != node]
        displaced = [
            one
            for one in self.on(island)
            if one.request.topology is not None
            and not one.request.like
            and not grid.is_block(one.request.topology, one.positions)
            and not has_block(grid, island, one.request, failed)
        ]
        return self._stuck(displaced, island)

    def _stuck(self, pieces: list[BoundSlice], island: Island) -> int:
        """Return how many of these slices have no room on other islands, if they are placed in turn."""
        return self._rooms(pieces, lambda piece: self.room(piece.request, island)).count(None)

    @staticmethod
    def _rooms(
        pieces: list[BoundSlice], find: Callable[[BoundSlice], Room | None]
    ) -> list[Room | None]:
        """Return the room of each of these slices, as if they were placed in turn; `find` looks for one."""
        rooms: list[Room | None] = []
        for piece in pieces:
            rooms.append(room := find(piece))
            if room is not None:
                room.island.occupy(room.positions, piece.request)
        for piece, room in zip(pieces, rooms, strict=True):
            if room is not None:
                room.island.vacate(room.positions, piece.request)
        return rooms

    def naming(self, node: str) -> int:
        """Return how many slices name a host."""
        return sum(node in one.request.hosts for one in self._slices.values())

    @property
    def bound(self) -> list[BoundSlice]:
        """The slices that are bound, in the order of binding."""
        return [one for one in self._slices.values() if one.state is SliceState.BOUND]

    def on(self, island: Island) -> list[BoundSlice]:
        """Return the slices that are bound to an island."""
        return [one for one in self.bound if one.island == island.name]

    # --- placing ----------------------------------------------------------------------------------

    def _place(self, piece: BoundSlice) -> None:
        """Bind, park or refuse a slice; bind one that waits for others together with them."""
        if not piece.request.together:
            self._place_alone(piece)
            return
        client = client_of(piece.request.slice)
        group = [
            one
            for one in self.parked
            if one.request.together and client_of(one.request.slice) == client
        ]
        # The others are new, have the same devices, or wait for an island.
        first = [
            one
            for one in group
            if one.request.waits and not one.request.like and self._may_have_room(one.request)
        ]
        rooms = self._rooms(first, self._former_room)
        is_alone = all(client_of(number) == client for number in self._slices)
        if None in rooms and not is_alone and None in self._rooms(first, self._room_for):
            return
        for one, room in zip(first, rooms, strict=True):
            if None in rooms or room is None:
                self._place_alone(one)
            else:
                self._bind_parked(one, room)
        for one in group:
            if one.state is SliceState.PARKED and one not in first:
                self._place_alone(one)

    def _may_have_room(self, request: AllocateSlice) -> bool:
        """Whether only other slices keep a slice from having devices now."""
        return any(
            island.state == "ready"
            and request.formerly in ("", island.name)
            and fits(island, request)
            for island in self.inventory.islands.values()
        )

    def _former_room(self, piece: BoundSlice) -> Room | None:
        """Return the devices that a slice had last, if they are free."""
        request, former = piece.request, piece.request.former_devices
        island = self.inventory.island_of(former[0].host) if former else None
        if island is None or island.state != "ready" or request.formerly not in ("", island.name):
            return None
        ranks = {node: rank for rank, node in enumerate(island.ranks)}
        there = tuple((ranks.get(device.host, -1), device.ordinal) for device in former)
        if (
            fits(island, request)
            and len(there) == request.devices == len(set(there))
            and suits(island, request, there)
            and all(is_free(island, request, position) for position in there)
        ):
            return Room(island, there)
        return None

    def _room_for(self, piece: BoundSlice) -> Room | None:
        """Return where a slice would be best; on its former island while it waits for that."""
        request = piece.request
        if not request.formerly or request.like:
            return self.room(request)
        home = self.inventory.islands.get(request.formerly)
        is_back = home is not None and home.state == "ready" and fits(home, request)
        return self.room_on(home, piece) if home is not None and is_back else None

    def _place_alone(self, piece: BoundSlice) -> None:
        """Bind, park or refuse a slice."""
        request, islands = piece.request, self.inventory.islands
        self._slices.pop(request.slice, None)
        room = self._room_for(piece)
        if room is not None:
            self._bind_parked(piece, room)
        elif (
            request.resumed
            or request.waits
            or self._waits_for_hosts(piece)
            or self.inventory.awaited_islands
            or any(i.state != "ready" and fits(i, request) for i in islands.values())
        ):
            self._slices[request.slice] = piece
            self._park(piece)
        else:
            self._refuse(piece)

    def _bind_parked(self, piece: BoundSlice, room: Room) -> None:
        """Bind a slice that was not bound; what it was before does not matter any more."""
        piece.request = msgspec.structs.replace(
            piece.request, resumed=False, formerly="", former_devices=(), together=False
        )
        self._slices.pop(piece.request.slice, None)
        self._slices[piece.request.slice] = piece
        self._bind(piece, SliceEvent.BIND, room)

    def _park(self, piece: BoundSlice) -> None:
        piece.happened(SliceEvent.PARK)
        self._are_parked = True

    def room(
        self,
        request: AllocateSlice,
        but: Island | None = None,
        busy: Callable[[Island], Mapping[Position, float]] | None = None,
    ) -> Room | None:
        """Return the devices on which a slice would be best; for a slice like another one, those of that.

        Args:
            request: how the client asks for the slice.
            but: an island where it is not to be.
            busy: function that returns the device time of the last minute of an island's devices, in seconds
                of each; None for what was measured.
        """
        if request.like:
            island = self._home_of(request.like)
            model = self._model_of(request)
            if model is None or island is but or island is None or island.state != "ready":
                return None
            return Room(island, model.positions[: request.devices])
        fitting = [
            island
            for island in self.inventory.islands.values()
            if island.state == "ready" and island is not but and fits(island, request)
        ]
        best: tuple[int, float, str] | None = None
        chosen = None
        for island in self._apart(request, fitting):
            times = self.busy_on(island) if busy is None else busy(island)
            positions = choose(island, request, times)
            if positions is not None:
                steps = sum(int(times.get(position, 0.0) / STEP_S) for position in positions)
                count = island.device_count - len(island.failed_positions())
                shared = (island.bound.total() + request.devices) / max(1, count)
                if best is None or (steps, shared, island.name) < best:
                    best, chosen = (steps, shared, island.name), Room(island, positions)
        return chosen

    def room_on(self, island: Island, piece: BoundSlice) -> Room | None:
        """Return the devices of an island for a slice: those that it had there, if they are free."""
        request = piece.request
        if request.like:
            room = self.room(request)
            return room if room is not None and room.island is island else None
        if not fits(island, request):
            return None
        former = self._former_room(piece)
        if former is not None and former.island is island:
            return former
        positions = choose(island, request, self.busy_on(island))
        return None if positions is None else Room(island, positions)

    def busy_on(self, island: Island) -> dict[Position, float]:
        """Return the device time of the last minute of an island's devices, in seconds of each."""
        ranks = {node: rank for rank, node in enumerate(island.ranks)}
        return {
            (ranks[device.host], device.ordinal): busy_s
            for device, busy_s in self.busy(island.name).items()
            if device.host in ranks
        }

    def _apart(self, request: AllocateSlice, islands: list[Island]) -> list[Island]:
        """Return the islands without the slices that a new slice must be apart from; a slice that moves may
        join them.
        """
        homes = [self._home_of(number) for number in request.apart]
        free = [island for island in islands if island not in homes]
        return free if request.slice not in self._slices else free or islands

    def _home_of(self, number: int) -> Island | None:
        """Return the island that a slice is bound to."""
        slice_ = self._slices.get(number)
        is_bound = slice_ is not None and slice_.state is SliceState.BOUND
        return self.inventory.islands.get(slice_.island) if slice_ and is_bound else None

    def _waits_for_hosts(self, piece: BoundSlice) -> bool:
        """Whether a slice that had its place waits, however long, for an island with its named hosts."""
        request = piece.request
        are_there = any(
            island.state == "ready"
            and request.island in (None, island.name)
            and set(request.hosts) <= set(island.ranks)
            for island in self.inventory.islands.values()
        )
        return bool(piece.island and request.hosts and not are_there)

    def _bind(self, piece: BoundSlice, event: SliceEvent, room: Room) -> None:
        """Bind a slice to these devices."""
        room.island.occupy(room.positions, piece.request)
        self._tell_bound(piece, event, *room)

    def _tell_bound(
        self, piece: BoundSlice, event: SliceEvent, island: Island, positions: tuple[Position, ...]
    ) -> None:
        """Tell the controller that a slice has these devices, which it occupies."""
        piece.bound(event, island.name, positions)
        places = {} if island.grid is None else island.grid.at
        bound = SliceBound(
            piece.request.slice,
            island.name,
            island.platform,
            island.kind,
            island.located(positions),
            island.epoch,
            island.machine,
            tuple(places.get(position, ()) for position in positions),
            piece.request.topology or (),
            piece.request.attempt,
        )
        self.env.send(CONTROL, bound)
        for one in self.parked:
            if one.request.like == piece.request.slice and one.state is SliceState.PARKED:
                self._place(one)

    def vacate(self, piece: BoundSlice) -> None:
        """Count the devices of a bound slice as its own no more."""
        self.inventory.islands[piece.island].vacate(piece.positions, piece.request)

    def _model_of(self, request: AllocateSlice) -> BoundSlice | None:
        """Return the bound slice that a slice is to be like."""
        model = self._slices.get(request.like) if request.like else None
        return model if model is not None and model.state is SliceState.BOUND else None

    def _refuse(self, piece: BoundSlice) -> None:
        request = piece.request
        self._slices.pop(request.slice, None)
        piece.happened(SliceEvent.REFUSE)
        error = refusal(self.inventory, request)
        self.env.send(CONTROL, SliceRefused(request.slice, ErrorReport.of(error)))
