"""Which slices have to move so that a request fits, or so that devices are shared evenly.

To make room is to find the fewest bytes: each block where the request could be is a candidate, with the slices
that are in its way; for a request without a shape, each set of slices of an island. Candidates are tried in the
order of the bytes that would move, until one is found whose slices all have room elsewhere.

To spread is to ask for each slice where it would be placed if it were asked for now. It moves there if the most
loaded of its devices is less loaded then: by device time of the last minute in the steps of placement, of which
each slice on a device is given the same part, and of equal ones by the number of slices. Slices with few
bytes are asked for first, and each moves once at most.

Where slices would be on another island, if they moved there now, is asked before they do.

Plans change nothing: slices are taken off their devices and put on others only while a plan is made.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pw.core.errors import InsufficientDevices
from pw.core.messages import AllocateSlice
from pw.core.sharding import DeviceAddress
from pw.sched.cluster.fitting import STEP_S, choose, fits, is_free
from pw.sched.cluster.grid import Position
from pw.sched.cluster.inventory import Inventory, Island
from pw.sched.cluster.refusals import refusal
from pw.sched.cluster.slice_states import BoundSlice
from pw.sched.cluster.slices import Room, SliceTable

TRIES = 4096
"""Number of candidates of an island that are tried for a request."""


class PlannedMove(NamedTuple):
    """A slice that moves."""

    slice: int
    island: str
    """Name of the island to which it moves; it may be the one where it is."""
    devices: tuple[DeviceAddress, ...]
    """The devices that it gets there, in order."""


class Destination(NamedTuple):
    """Devices that a slice would have on another island."""

    slice: int
    devices: tuple[DeviceAddress, ...]
    epoch: int
    """Epoch of the island."""


class _Candidate(NamedTuple):
    """Slices that might leave an island; the least in order is the best."""

    size_bytes: int
    slices: int
    """Number of the slices."""
    island: str
    number: int
    pieces: tuple[BoundSlice, ...]
    block: tuple[Position, ...]
    """The devices that they leave for the request; empty for any."""


@dataclass(eq=False, repr=False)
class MovePlanner:
    """Plans moves of slices.

    Args:
        slices: the slices of the cluster.
        inventory: its islands.
    """

    slices: SliceTable
    inventory: Inventory

    def plan(
        self, wanted: AllocateSlice | None, sizes: Mapping[int, int]
    ) -> tuple[PlannedMove, ...]:
        """Return the moves that make room for a request; without one, those that spread the slices.

        Args:
            wanted: the request. Nothing moves if there is room for it.
            sizes: bytes of the arrays of each slice that may move, by its number.

        Raises:
            InsufficientDevices: the request has no room, whatever moves.
        """
        return self._spread(sizes) if wanted is None else self._make_room(wanted, sizes)

    def _movable(self, island: Island, sizes: Mapping[int, int]) -> list[BoundSlice]:
        """Return the slices of an island that may move, those with few bytes first.

        One that is like another one stays with it.
        """
        pieces = [
            piece
            for piece in self.slices.on(island)
            if piece.request.slice in sizes and not piece.request.like
        ]
        return sorted(pieces, key=lambda piece: (sizes[piece.request.slice], piece.request.slice))

    def _planned(self, piece: BoundSlice, room: Room) -> PlannedMove:
        located = room.island.located(room.positions)
        return PlannedMove(piece.request.slice, room.island.name, located)

    def destinations(
        self, slices: Collection[int], name: str, devices: tuple[DeviceAddress, ...] = ()
    ) -> tuple[Destination, ...]:
        """Return the devices that bound slices would have on an island if they moved there now, in turn.

        Args:
            slices: numbers of the slices; one that has no room there is left out.
            name: name of the island.
            devices: devices that the only slice is to have there, in order; empty for any.
        """
        island = self.inventory.islands.get(name)
        if island is None or island.state != "ready":
            return ()
        bound = [piece for piece in self.slices.bound if piece.request.slice in slices]
        rooms: dict[int, Room] = {}
        with ExitStack() as changes:
            for piece in bound:
                _leave(changes, piece, self.inventory.islands[piece.island])
            for piece in sorted(bound, key=lambda one: one.request.slice):
                request = msgspec.structs.replace(
                    piece.request,
                    formerly=name,
                    former_devices=devices,
                    island=name if piece.request.island else None,
                )
                model = rooms.get(request.like)
                if model is not None:
                    room: Room | None = Room(island, model.positions[: request.devices])
                else:
                    room = self.slices.room_on(island, BoundSlice(request))
                if room is not None:
                    _take(changes, request, room)
                    rooms[request.slice] = room
            return tuple(
                [
                    Destination(number, island.located(room.positions), island.epoch)
                    for number, room in rooms.items()
                ]
            )

    # --- room for a request -----------------------------------------------------------------------

    def _make_room(
        self, wanted: AllocateSlice, sizes: Mapping[int, int]
    ) -> tuple[PlannedMove, ...]:
        if self.slices.room(wanted) is not None:
            return ()
        islands = [
            island
            for island in self.inventory.islands.values()
            if island.state == "ready" and fits(island, wanted)
        ]
        for candidate in heapq.merge(*[self.candidates(one, wanted, sizes) for one in islands]):
            moves = self.tried(candidate, wanted)
            if moves is not None:
                return moves
        why = str(refusal(self.inventory, wanted))
        raise InsufficientDevices(f"{why}; nothing that may move would make room for it")

    def candidates(
        self, island: Island, wanted: AllocateSlice, sizes: Mapping[int, int]
    ) -> Iterator[_Candidate]:
        """Yield the sets of slices that might leave an island, those with the fewest bytes first."""
        pieces, name, numbers = self._movable(island, sizes), island.name, itertools.count()
        bytes_of = [sizes[piece.request.slice] for piece in pieces]
        if wanted.topology is None or island.grid is None:
            for total, chosen in itertools.islice(_subsets(bytes_of), TRIES):
                leaving = tuple([pieces[at] for at in chosen])
                yield _Candidate(total, len(chosen), name, next(numbers), leaving, ())
            return
        blocks = []
        for block in itertools.islice(island.grid.blocks(wanted.topology), TRIES):
            held = {at for at in block if not is_free(island, wanted, at)}
            there = tuple(piece for piece in pieces if _is_in_the_way(piece, wanted, held))
            total = sum(sizes[piece.request.slice] for piece in there)
            blocks.append(_Candidate(total, len(there), name, next(numbers), there, block))
        yield from sorted(blocks)

    def tried(self, candidate: _Candidate, wanted: AllocateSlice) -> tuple[PlannedMove, ...] | None:
        """Return where the slices of a candidate go; None if the request has no room then, or one of them."""
        island, block = self.inventory.islands[candidate.island], candidate.block
        with ExitStack() as changes:
            for piece in candidate.pieces:
                _leave(changes, piece, island)
            if not block:
                block = choose(island, wanted, {}) or ()
            if not block or not all(is_free(island, wanted, position) for position in block):
                return None
            _take(changes, wanted, Room(island, block))
            moves = []
            for piece in sorted(candidate.pieces, key=lambda one: -one.request.devices):
                room = self.slices.room(piece.request)
                if room is None:
                    return None
                _take(changes, piece.request, room)
                moves.append(self._planned(piece, room))
            return tuple(moves)

    # --- evenly -----------------------------------------------------------------------------------

    def _spread(self, sizes: Mapping[int, int]) -> tuple[PlannedMove, ...]:
        islands = [one for one in self.inventory.islands.values() if one.state == "ready"]
        loads = {
            island.name: _Load(island, dict(self.slices.busy_on(island))) for island in islands
        }
        stay = sorted(
            [
                (piece, loads[island.name])
                for island in islands
                for piece in self._movable(island, sizes)
            ],
            key=lambda one: (sizes[one[0].request.slice], one[0].request.slice),
        )
        moves: list[PlannedMove] = []
        with ExitStack() as changes:
            while True:
                left = [one for one in stay if not self._moves(changes, *one, loads, moves)]
                if len(left) == len(stay):
                    return tuple(moves)
                stay = left

    def _moves(
        self,
        changes: ExitStack,
        piece: BoundSlice,
        load: _Load,
        loads: Mapping[str, _Load],
        moves: list[PlannedMove],
    ) -> bool:
        """Move a slice if it would be better elsewhere; return whether it would."""
        now = load.highest(piece.positions)
        with ExitStack() as attempt:
            busy_s = load.shares(piece.positions)
            _leave(attempt, piece, load.island)
            load.add(piece.positions, [-one for one in busy_s])
            room = self.slices.room(piece.request, busy=lambda island: loads[island.name].busy)
            if room is not None:
                target = loads[room.island.name]
                target.add(room.positions, busy_s)
                _take(attempt, piece.request, room)
                if target.highest(room.positions) < now:
                    changes.push(attempt.pop_all())
                    moves.append(self._planned(piece, room))
                    return True
                target.add(room.positions, [-one for one in busy_s])
            load.add(piece.positions, busy_s)
        return False


@dataclass(eq=False)
class _Load:
    """How loaded the devices of an island are."""

    island: Island
    busy: dict[Position, float] = field(default_factory=dict)
    """Device time of the last minute, in seconds, of each device that has some."""

    def highest(self, positions: Sequence[Position]) -> tuple[int, int]:
        """Return the steps of device time, and the slices, of the most loaded device."""
        return max(
            (int(self.busy.get(at, 0.0) / STEP_S), self.island.bound[at]) for at in positions
        )

    def shares(self, positions: Sequence[Position]) -> list[float]:
        """Return the device time of a slice on each of its devices, in seconds."""
        return [self.busy.get(at, 0.0) / max(1, self.island.bound[at]) for at in positions]

    def add(self, positions: Sequence[Position], busy_s: Sequence[float]) -> None:
        """Add the device time of a slice to that of its devices."""
        for at, more_s in zip(positions, busy_s, strict=True):
            self.busy[at] = self.busy.get(at, 0.0) + more_s


def _leave(changes: ExitStack, piece: BoundSlice, island: Island) -> None:
    """Take a slice off its devices, until the changes end."""
    island.vacate(piece.positions, piece.request)
    changes.callback(island.occupy, piece.positions, piece.request)


def _take(changes: ExitStack, request: AllocateSlice, room: Room) -> None:
    """Put a slice on devices, until the changes end."""
    room.island.occupy(room.positions, request)
    changes.callback(room.island.vacate, room.positions, request)


def _is_in_the_way(piece: BoundSlice, wanted: AllocateSlice, held: set[Position]) -> bool:
    """Whether a slice keeps a request from devices that it cannot have."""
    request = piece.request
    keeps = (
        wanted.exclusive or request.exclusive or bool(wanted.memory_bytes and request.memory_bytes)
    )
    return keeps and not held.isdisjoint(piece.positions)


def _subsets(sizes: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the subsets of ascending sizes, as their sum and their places, those with a small sum first.

    From each subset come two: one with the next place, too, and one with the next place for the last.
    """
    waiting: list[tuple[int, tuple[int, ...]]] = [(sizes[0], (0,))] if sizes else []
    while waiting:
        total, chosen = heapq.heappop(waiting)
        yield total, chosen
        following = chosen[-1] + 1
        if following < len(sizes):
            more = total + sizes[following]
            heapq.heappush(waiting, (more, (*chosen, following)))
            heapq.heappush(waiting, (more - sizes[chosen[-1]], (*chosen[:-1], following)))
