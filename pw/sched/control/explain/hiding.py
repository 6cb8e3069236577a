"""Leaves out of reports what a client may not see: the work of other tenants.

Numbers of work, bytes and devices stay, so that a report still says whether a device is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from pw.core.ids import client_of
from pw.core.messages import DeviceUse, Explanation, HostReport, IslandReport, OwnerMemory

Sees = Callable[[int], bool]
"""Whether the asker may see what the client with a number has."""

OTHERS = "(other tenants)"


def without_others(facts: Explanation, sees: Sees) -> Explanation:
    """Return an explanation's reports without the work and the clients that the asker may not see."""
    return replace(
        facts,
        work=tuple(_island(report, sees) for report in facts.work),
        hosts=tuple(_host(report, sees) for report in facts.hosts),
        clients=tuple(client for client in facts.clients if sees(client.client)),
    )


def _island(report: IslandReport, sees: Sees) -> IslandReport:
    return replace(
        report,
        oldest=tuple(work for work in report.oldest if sees(client_of(work.run))),
        heads=tuple(work for work in report.heads if sees(client_of(work.run))),
        installing=tuple(one for one in report.installing if sees(client_of(one.program))),
    )


def _host(report: HostReport, sees: Sees) -> HostReport:
    """Return a host's report; threads name functions, and no client."""
    return replace(
        report,
        launches=tuple(launch for launch in report.launches if sees(client_of(launch.run))),
        edges=tuple(edge for edge in report.edges if sees(client_of(edge.run))),
        threads=(),
    )


def memory_without_others(
    devices: Sequence[DeviceUse], sees: Callable[[int], bool]
) -> tuple[DeviceUse, ...]:
    """Return the memory of devices with one sum for all owners that the asker may not see."""
    return tuple(_device(device, sees) for device in devices)


def _device(device: DeviceUse, sees: Sees) -> DeviceUse:
    owners = [owner for owner in device.owners if sees(owner.client)]
    others = [owner for owner in device.owners if not sees(owner.client)]
    if others:
        owners.append(
            OwnerMemory(
                0,
                OTHERS,
                sum(owner.arrays for owner in others),
                sum(owner.arrays_bytes for owner in others),
                sum(owner.reserved_bytes for owner in others),
            )
        )
    largest = tuple(array for array in device.largest if sees(array.client))
    return replace(device, owners=tuple(owners), largest=largest)
