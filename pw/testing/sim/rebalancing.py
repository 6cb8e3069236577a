"""Users that ask which slices should move, and move them; and the promises of such a plan.

| monitor | promise |
|---|---|
| moves | slices get devices that they may have, and a wanted slice has room then, with few bytes |

With the profile's `rebalances`, a user asks for room for a slice that may fit nowhere, or for slices to be
shared evenly, and then moves the slices one after the other. The monitor knows nothing of how moves are
planned: it has a table of all slices, changes it as the plan says, and looks for room in each block. No single
slice with fewer bytes than in all may have made room.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as altered

from pw.client.session.thread_messages import Ask
from pw.core import messages as msg
from pw.core.ids import CONTROLLER, Address
from pw.testing.sim.ledger import SUSPENDED
from pw.testing.sim.shapes import blocks, grid_of, random_shape
from pw.testing.sim.world import Violation

Device = tuple[str, int]


def rebalance(user: Any) -> None:
    """Have a user ask for moves, and carry them out."""
    random, world = user.suspensions, user.world
    wanted = msg.PlanMoves(0)
    if random.random() < 0.8:
        devices = random.choice((1, 2, 2, 4))
        shape = random_shape(random, devices) if random.random() < 0.7 else None
        exclusive = random.random() < 0.7
        wanted = msg.PlanMoves(0, devices, shape, exclusive=exclusive)
    life = user.lives

    def planned(answer: msg.MovesPlanned | None, error: BaseException | None) -> None:
        if answer is not None and answer.moves and user.lives == life:
            world.checked["rebalances"] += 1
            _move(user, list(answer.moves))

    promise = user._promise("plan moves", planned)
    user._post(Ask(lambda request: altered(wanted, request=request), promise, ()))


def _move(user: Any, moves: list[msg.SliceMove]) -> None:
    """Have the first slice move, and then the others."""
    move, life = moves.pop(0), user.lives

    def left(answer: None, error: BaseException | None) -> None:
        if moves and user.lives == life and user.session.closed is None:
            _move(user, moves)

    user.world.ledger.injected[SUSPENDED] += 1
    promise = user._promise(f"move slice {move.slice:x}", left)
    user._post(
        Ask(
            lambda request: msg.MigrateClient(
                request, move.island, move.client, move.slice, move.devices
            ),
            promise,
            (),
        )
    )


@dataclass(frozen=True)
class _Piece:
    """A slice and its devices."""

    request: msg.AllocateSlice
    island: str
    devices: tuple[Device, ...]


class RebalancingMonitor:
    """Watches the answers to `PlanMoves`."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._asked: dict[int, msg.PlanMoves] = {}
        if not world.profile.rebalances:
            return
        world.watch_handled(msg.PlanMoves, self._handling)
        world.watch_sent(msg.MovesPlanned, self._planned)
        world.watch_sent(msg.Answered, self._refused)

    def _handling(self, sender: Address, to: Address, message: msg.PlanMoves) -> None:
        self._asked = {message.request: message}  # it is answered in the same turn

    def _pieces(self) -> dict[int, _Piece]:
        """Return all slices that have devices."""
        resources = self._cluster.resources
        return {
            one.request.slice: _Piece(
                one.request,
                island.name,
                tuple((island.ranks[rank], at) for rank, at in one.positions),
            )
            for island in resources.inventory.islands.values()
            for one in resources.slices.on(island)
            if island.state == "ready"
        }

    def _sizes(self) -> dict[int, int]:
        """Return the bytes on each slice of a client that could move."""
        sizes: dict[int, int] = {}
        for client in self._cluster.controller.sessions.calling:
            if client.suspension or client.resuming or client.slices.unbound:
                continue
            sizes.update(dict.fromkeys(client.slices.owned, 0))
            for _, array in client.arrays.all():
                if (number := array.spec.placement.slice) in sizes:
                    sizes[number] += array.spec.size_bytes
        return sizes

    def _planned(self, sender: Address, to: Address, message: msg.MovesPlanned) -> None:
        asked = self._asked.pop(message.request, None)
        if sender.node != CONTROLLER or asked is None:
            return
        self._world.checked["plans of moves"] += 1
        pieces = self._pieces()
        total = sum(move.size_bytes for move in message.moves)
        if asked.devices and message.moves:
            self._check_fewest(asked, pieces, total)
        for move in message.moves:
            devices = tuple((device.host, device.ordinal) for device in move.devices)
            pieces[move.slice] = replace(pieces[move.slice], island=move.island, devices=devices)
        for move in message.moves:
            piece = pieces[move.slice]
            if not self._may_have(piece, pieces):
                raise Violation("moves", f"slice {move.slice:x} cannot have {piece.devices}")
        if asked.devices and self._room(self._request(asked), pieces) is None:
            raise Violation("moves", f"after {message.moves} there is no room for {asked}")

    def _refused(self, sender: Address, to: Address, message: msg.Answered) -> None:
        asked = self._asked.pop(message.request, None)
        if sender.node == CONTROLLER and asked is not None:
            self._world.checked["refused plans"] += 1
            self._check_fewest(asked, self._pieces(), None)

    def _check_fewest(
        self, asked: msg.PlanMoves, pieces: dict[int, _Piece], total: int | None
    ) -> None:
        """No single slice with fewer bytes than in all could have made room."""
        wanted, sizes = self._request(asked), self._sizes()
        models = {one.request.like for one in pieces.values()}
        for number, size_bytes in sizes.items():
            piece = pieces.get(number)
            if piece is None or piece.request.like or number in models:
                continue
            if total is not None and size_bytes >= total:
                continue
            rest = {at: one for at, one in pieces.items() if at != number}
            for room in self._rooms(wanted, rest, piece.island):
                there = rest | {0: room}
                if self._room(altered(piece.request, former_devices=()), there) is not None:
                    words = f"slice {number:x} with {size_bytes} bytes makes room for {asked}"
                    raise Violation("moves", f"{words}; planned were {total} bytes")

    @staticmethod
    def _request(asked: msg.PlanMoves) -> msg.AllocateSlice:
        how: Any = {"exclusive": asked.exclusive, "memory_bytes": asked.memory_bytes}
        return msg.AllocateSlice(0, asked.devices, None, asked.island, asked.topology, **how)

    def _room(self, request: msg.AllocateSlice, pieces: dict[int, _Piece]) -> _Piece | None:
        """Return devices that a slice may have, None if there are none."""
        islands = self._cluster.resources.inventory.islands.values()
        names = [one.name for one in islands if one.state == "ready"]
        rooms = (
            self._rooms(request, pieces, name) for name in names if request.island in (None, name)
        )
        return next(itertools.chain.from_iterable(rooms), None)

    def _rooms(
        self, request: msg.AllocateSlice, pieces: dict[int, _Piece], name: str
    ) -> Iterator[_Piece]:
        """Yield devices of an island that a slice may have; without a shape, the first ones only."""
        island = self._cluster.resources.inventory.islands[name]
        ranks = [at for at in island.ranks if not request.hosts or at in request.hosts]
        if request.hosts and len(ranks) < len(request.hosts):
            return
        everywhere = list(itertools.product(ranks, range(island.local_devices)))
        free = [one for one in everywhere if self._may_have(_Piece(request, name, (one,)), pieces)]
        if request.topology is not None:
            cells, wraps = grid_of(self._cluster, island)
            there = {cell: device for cell, device in cells.items() if device in free}
            for block in blocks(there, wraps, request.topology):
                yield _Piece(request, name, block)
        elif request.hosts:
            each = request.devices // len(ranks)
            parts = [[one for one in free if one[0] == at][:each] for at in ranks]
            if all(len(part) == each for part in parts):
                yield _Piece(request, name, tuple(itertools.chain.from_iterable(parts)))
        elif len(free) >= request.devices:
            yield _Piece(request, name, tuple(free[: request.devices]))

    def _may_have(self, piece: _Piece, pieces: dict[int, _Piece]) -> bool:
        """Whether other slices leave a slice its devices."""
        request = piece.request
        limit_bytes = self._world.profile.device_memory_bytes
        for device in piece.devices:
            there = [
                one.request
                for number, one in pieces.items()
                if device in one.devices and number != request.slice
            ]
            if any(request.exclusive or one.exclusive for one in there):
                return False
            promised = request.memory_bytes + sum(one.memory_bytes for one in there)
            if request.memory_bytes and 0 < limit_bytes < promised:
                return False
        return True
