"""`pw.rebalance()`: moves slices, so that a new one has room or devices are shared evenly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pw.client.arrays.slice_arguments import check_count, count_of, shape_of, size_of
from pw.client.connection import current
from pw.client.connection.questions import Questions
from pw.client.connection.waiting import seconds
from pw.client.display.tables import Shown, Table
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError
from pw.core.ids import run_name
from pw.core.messages import PlanMoves, SliceMove
from pw.core.sizes import size_in_words

__all__ = ["PlannedMoves", "SliceMove", "moved", "rebalance"]


@dataclass(frozen=True, slots=True, repr=False)
class PlannedMoves(Shown):
    """Slices that move, in order; prints as a table."""

    moves: tuple[SliceMove, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays that move."""
        return sum(move.size_bytes for move in self.moves)

    @property
    def head(self) -> str:
        """One line about all moves."""
        count = len(self.moves)
        if not count:
            return "nothing has to move"
        return f"{count} move{'' if count == 1 else 's'}, {size_in_words(self.size_bytes)}"

    def tables(self) -> tuple[Table, ...]:
        """Return the table of moves."""
        rows = tuple(
            (
                move.client,
                move.name,
                run_name(move.slice),
                len(move.devices),
                move.source,
                move.island,
                ", ".join(f"{device.host}:{device.ordinal}" for device in move.devices),
                size_in_words(move.size_bytes),
            )
            for move in self.moves
        )
        columns = ("client", "name", "slice", "devices", "from", "to", "there", "bytes")
        return (Table("", columns, rows),) if rows else ()


@checks_keywords
def rebalance(
    devices: int | None = None,
    *,
    topology: Sequence[int] | None = None,
    island: str | None = None,
    exclusive: bool = False,
    memory: int | str | None = None,
    dry_run: bool = False,
    timeout_s: float | None = None,
) -> PlannedMoves:
    """Move slices to other devices, so that a new slice has room, or so that devices are shared evenly.

    Without arguments slices move from loaded devices to less loaded ones, as after islands have joined: by
    the device time of the last minute, then by the number of slices. With arguments, which are those of
    `add_slice`, slices move out of the way: those with the fewest bytes. One client moves after the other, and
    each pauses as with `migrate`. Returns when all have left their devices.

    Args:
        devices: how many a new slice is to have; those of `topology` if None.
        topology: number of devices along each axis of its block.
        island: name of its island; any if None.
        exclusive: whether it is to share its devices with no other slice.
        memory: bytes that it is to have on each device, as a number or such as "24GiB".
        dry_run: True to return what would move, and to move nothing.
        timeout_s: how long to wait, in seconds; a move that has begun goes on afterwards.

    Returns:
        The moves; none if there is room already, or no slice would be better elsewhere. Only slices of this
        tenant move, unless it has the right `may_suspend`.

    Raises:
        InsufficientDevices: no moves make room for such a slice.
        TimeoutError: it took longer.
        ArgumentError: an argument is not what it should be.
    """
    ask = current.runtime().ask
    request = plan_request(devices, topology, island, exclusive, memory)
    moves = PlannedMoves(ask.plan_moves(request).moves)
    if not dry_run:
        moved(ask, moves, timeout_s)
    return moves


def moved(ask: Questions, moves: PlannedMoves, timeout_s: float | None) -> None:
    """Have slices move, one after the other; returns when the last has left its devices."""
    bound = seconds(timeout_s)
    for move in moves.moves:
        ask.migrate(move.client, move.slice, move.island, move.devices).result(bound)


def plan_request(
    devices: int | None,
    topology: Sequence[int] | None,
    island: str | None,
    exclusive: bool,
    memory: int | str | None,
) -> PlanMoves:
    """Return the question for moves. Raises ArgumentError."""
    try:
        shape = None if topology is None else shape_of(topology)
        count = 0 if shape is None else math.prod(shape)
        if devices is not None:
            count = count_of(devices)
            check_count(count, shape or (count,))
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    more: Any = {"exclusive": exclusive, "memory_bytes": 0 if memory is None else size_of(memory)}
    if not count and (island is not None or exclusive or memory is not None):
        raise ArgumentError(
            "say how many devices the new slice is to have, as rebalance(4) or rebalance(topology=(2, 2)); "
            "without a slice, all islands are looked at"
        )
    return PlanMoves(0, count, shape, island, **more)
