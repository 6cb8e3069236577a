"""Messages of other roles, as a client that is an intruder forges them."""

from __future__ import annotations

from random import Random

from pw.core.errors import ErrorReport, PlacementError
from pw.core.ids import CONTROLLER, Address, scheduler_of
from pw.core.messages import (
    ArraysLost,
    GangBroken,
    HostRejected,
    IslandInfo,
    IslandJoinFailed,
    LaunchGap,
    Leave,
    RegisterHost,
    ReleaseSlice,
)

_ERROR = ErrorReport.of(PlacementError("forged"))


def forged(
    random: Random, peer: str, islands: tuple[IslandInfo, ...], slices: list[int], arrays: list[int]
) -> tuple[Address, object]:
    """A message of another role than a client's, and an actor of `peer` that would take it.

    Args:
        random: chooses.
        peer: a host, or the controller.
        islands: of the cluster.
        slices: of all clients.
        arrays: of all clients.
    """
    if peer != CONTROLLER:
        return Address(peer, "executor"), random.choice((Leave("forged"), HostRejected(_ERROR)))
    resources = Address(CONTROLLER, "resources")
    choices: list[tuple[Address, object]] = [
        (resources, RegisterHost("forged", 1, 1, "cpu", "", 0)),
    ]
    for island in islands:
        scheduler = scheduler_of(island.name)
        choices += [
            (scheduler, LaunchGap(island.formed, 0, 1)),
            (scheduler, GangBroken(island.formed, "forged")),
            (resources, IslandJoinFailed(island.name, island.formed, _ERROR)),
        ]
    if slices:
        choices.append((resources, ReleaseSlice(random.choice(slices))))
    if arrays:
        choices.append((Address(CONTROLLER, "controller"), ArraysLost((random.choice(arrays),))))
    return random.choice(choices)
