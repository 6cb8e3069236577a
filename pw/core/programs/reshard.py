"""Re-sharding: which part of which shard goes where when an array changes its sharding or its devices.

Both shardings cut every dimension into equal parts, so the source shards that overlap a destination
box are a
range of part numbers in each dimension: the plan never looks at pairs of shards that do not overlap. Among
equal shards it prefers the destination device itself, then another device of its host, then the host that has
the fewest bytes to send so far. Bytes cross between two hosts once, however many devices of the receiving host
need them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from pw.core.errors import ShardingError
from pw.core.programs.plan import BoxCopy, Route
from pw.core.sharding import ArraySpec, Box, DeviceAddress, box_bytes, packed_offsets

LAYOUTS_KEPT = 1024
"""Number of layouts that are cached: both ends of an edge need theirs at every run."""

_Cell = tuple[int, ...]
"""Part numbers, one a dimension, of a box in the grid that a sharding cuts an array into."""


def plan_routes(
    source: ArraySpec,
    destination: ArraySpec,
    source_devices: tuple[DeviceAddress, ...],
    destination_devices: tuple[DeviceAddress, ...],
) -> tuple[Route, ...]:
    """Return the routes that re-shard an array from `source` to `destination`.

    Args:
        source: the present spec.
        destination: the wanted spec; same shape and dtype.
        source_devices: the physical device at every mesh position of `source` (`Binding.located`).
        destination_devices: the same for `destination`.

    Returns:
        One route for each pair of hosts that have pieces to move, those inside one host included,
        ordered by destination and then by source. The pieces of all routes to a host write each
        element of its shards exactly once. An array without elements travels as empty pieces, so
        that every receiver still hears from a sender.

    Raises:
        ShardingError: the two sides differ in shape or dtype.
    """
    if (source.shape, source.dtype) != (destination.shape, destination.dtype):
        raise ShardingError(
            f"an array of shape {source.shape} and dtype {source.dtype} cannot become one of shape "
            f"{destination.shape} and dtype {destination.dtype} by moving it"
        )
    widths = source.sharding.shard_shape(source.shape)
    cell_at: dict[DeviceAddress, tuple[_Cell, int]] = {}
    holders: dict[_Cell, dict[str, int]] = {}
    for box, positions in source.distinct_boxes():
        cell = tuple(
            start // width if width else 0 for (start, _), width in zip(box, widths, strict=True)
        )
        first_on_host = holders.setdefault(cell, {})
        for position in positions:
            address = source_devices[position]
            cell_at[address] = (cell, position)
            first_on_host.setdefault(address.host, position)

    bytes_given: defaultdict[str, int] = defaultdict(int)
    pieces: defaultdict[tuple[str, str], list[BoxCopy]] = defaultdict(list)
    for box, positions in destination.distinct_boxes():
        wanting: defaultdict[str, list[int]] = defaultdict(list)
        holding: defaultdict[tuple[str, _Cell], dict[int, int]] = defaultdict(dict)
        for position in positions:
            address = destination_devices[position]
            wanting[address.host].append(position)
            if address in cell_at:
                cell, origin = cell_at[address]
                holding[address.host, cell][position] = origin
        for cell, source_box, destination_box in _overlaps(box, widths):
            size_bytes = box_bytes(source_box, source.dtype)
            for host, wanted in wanting.items():
                at_home = holding.get((host, cell), {})
                for position, origin in at_home.items():
                    pieces[host, host].append(
                        BoxCopy(origin, source_box, (position,), destination_box)
                    )
                rest = tuple(position for position in wanted if position not in at_home)
                if not rest:
                    continue
                replicas = holders[cell]
                sender = host
                if host not in replicas:
                    sender = min(replicas, key=lambda replica: bytes_given[replica])
                    bytes_given[sender] += size_bytes
                pieces[host, sender].append(
                    BoxCopy(replicas[sender], source_box, rest, destination_box)
                )

    senders = _ranks(source_devices)
    receivers = _ranks(destination_devices)
    order = sorted(pieces, key=lambda pair: (receivers[pair[0]], senders[pair[1]]))
    return tuple(
        Route(sender, receiver, tuple(pieces[receiver, sender])) for receiver, sender in order
    )


@lru_cache(maxsize=LAYOUTS_KEPT)
def route_layout(route: Route, source: ArraySpec) -> tuple[tuple[int, ...], int]:
    """Return the offset of each piece in the buffer of `route`, and the buffer's size, in bytes."""
    sizes_bytes = [box_bytes(piece.source_box, source.dtype) for piece in route.pieces]
    offsets, total = packed_offsets(sizes_bytes)
    return tuple(offsets), total


def _overlaps(box: Box, widths: tuple[int, ...]) -> Iterator[tuple[_Cell, Box, Box]]:
    """Yield the source cells that overlap `box`, with the common part relative to the cell and to `box`."""
    dimensions = []
    for (start, stop), width in zip(box, widths, strict=True):
        parts = []
        for part in range(start // width, -(-stop // width)) if width else (0,):
            low, high = max(start, part * width), min(stop, (part + 1) * width)
            inside_cell = (low - part * width, high - part * width)
            parts.append((part, inside_cell, (low - start, high - start)))
        dimensions.append(parts)
    for chosen in itertools.product(*dimensions):
        yield (
            tuple(part for part, _, _ in chosen),
            tuple(inside_cell for _, inside_cell, _ in chosen),
            tuple(inside_box for _, _, inside_box in chosen),
        )


def _ranks(devices: tuple[DeviceAddress, ...]) -> dict[str, int]:
    """Number the hosts in the order of the mesh."""
    return {host: rank for rank, host in enumerate(dict.fromkeys(d.host for d in devices))}
