"""Messages of other roles, as a client that is an intruder forges them."""

from __future__ import annotations

from random import Random

from pw.core import messages as msg
from pw.core.errors import ErrorReport, PlacementError
from pw.core.ids import CONTROLLER, Address, scheduler_of

_ERROR = ErrorReport.of(PlacementError("forged"))


def forged(
    random: Random,
    peer: str,
    islands: tuple[msg.IslandInfo, ...],
    slices: list[int],
    arrays: list[int],
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
        return Address(peer, "executor"), random.choice(
            (msg.Leave("forged"), msg.HostRejected(_ERROR))
        )
    resources = Address(CONTROLLER, "resources")
    choices: list[tuple[Address, object]] = [
        (resources, msg.RegisterHost("forged", 1, 1, "cpu", "", 0)),
    ]
    for island in islands:
        scheduler = scheduler_of(island.name)
        choices += [
            (scheduler, msg.LaunchGap(island.formed, 0, 1)),
            (scheduler, msg.GangBroken(island.formed, "forged")),
            (resources, msg.IslandJoinFailed(island.name, island.formed, _ERROR)),
        ]
    if slices:
        choices.append((resources, msg.ReleaseSlice(random.choice(slices))))
    if arrays:
        choices.append(
            (Address(CONTROLLER, "controller"), msg.ArraysLost((random.choice(arrays),)))
        )
    return random.choice(choices)
