"""The devices that `jax.devices()` shows: the virtual devices of the session's slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pw.client.arrays.devices import Slice
from pw.core.platforms import platform_of
from pw.core.sharding import DeviceAddress, Placement
from pw.gateway.protocol.statuses import StatusError, unsupported

_MEMORIES_EACH = 8
"""The numbers of a device's memories begin at its own number times this."""


@dataclass(frozen=True, slots=True)
class Device:
    """One virtual device."""

    slice: Slice
    index: int
    island_number: int


def _coords_of(device: Device) -> tuple[int, ...]:
    """Return the coordinates of a device in the grid of its island, with three axes at least, as JAX has."""
    coords = device.slice.coords
    own = coords[device.index] if device.index < len(coords) else ()
    own = own or (device.index,)
    return own + (0,) * (3 - len(own))


class DevicesOfIsland(NamedTuple):
    """The devices of a list that are on one island."""

    positions: tuple[int, ...]
    """Among all of them."""
    devices: tuple[int, ...]
    """JAX's numbers."""
    placement: Placement


class Devices:
    """The devices of a session in JAX's order: slice by slice.

    Args:
        slices: at least one.
        are_slices: whether JAX sees each island as a slice of its own (`slice_index`), else all as one.

    Raises:
        StatusError: the slices are of several platforms.
    """

    def __init__(self, slices: Sequence[Slice], are_slices: bool = False) -> None:
        self.slices = tuple(slices)
        self._are_slices = are_slices
        islands = list(dict.fromkeys(one.island for one in slices))
        self.all = [
            Device(one, index, islands.index(one.island))
            for one in slices
            for index in range(one.size)
        ]
        self._placements: dict[tuple[int, ...], Placement] = {}
        self._numbers = {
            (device.slice.id, device.index): number for number, device in enumerate(self.all)
        }
        platforms = sorted({one.platform for one in slices})
        if len(platforms) > 1:
            raise unsupported(
                f"the islands {', '.join(islands)} have devices of the platforms {', '.join(platforms)}; JAX "
                "sees one platform at a time: choose islands of one, with PW_ISLANDS or connect(islands=...)"
            )
        self.platform = platforms[0]
        self.memories = platform_of(self.platform).memories

    def __len__(self) -> int:
        return len(self.all)

    def numbers(self, placement: Placement) -> tuple[int, ...]:
        """Return JAX's numbers of the devices of a placement. Raises KeyError for another slice."""
        return tuple(self._numbers[placement.slice, index] for index in placement.devices)

    def placement(self, numbers: tuple[int, ...]) -> Placement:
        """Return the placement of devices of one island.

        Raises:
            StatusError: they are not, or there is no such device.
        """
        placement = self._placements.get(numbers)
        if placement is None:
            devices = [self._device(number) for number in numbers]
            islands = list(dict.fromkeys(device.slice.island for device in devices))
            if len(islands) > 1:
                raise unsupported(
                    f"the devices are on the islands {' and '.join(islands)}, and this works on one only; "
                    "make a mesh for each island (device.island), and move values with jax.device_put"
                )
            indices = tuple(device.index for device in devices)
            placement = self._placements[numbers] = Placement(devices[0].slice.id, indices)
        return placement

    def islands(self, numbers: tuple[int, ...]) -> list[DevicesOfIsland]:
        """Return the islands of devices, with their share. Raises StatusError: there is no such device."""
        islands = []
        for positions in self.by_slice(numbers).values():
            own = tuple(numbers[at] for at in positions)
            islands.append(DevicesOfIsland(tuple(positions), own, self.placement(own)))
        return islands

    def alike(self, placement: Placement) -> list[Placement]:
        """Return placements on as many devices of each other slice that has so many."""
        count = len(placement.devices)
        return [
            Placement(one.id, tuple(range(count)))
            for one in self.slices
            if one.id != placement.slice and one.size >= count
        ]

    def by_slice(self, numbers: Iterable[int]) -> dict[Slice, list[int]]:
        """Group positions in `numbers` by the slice of the device there."""
        groups: dict[Slice, list[int]] = {}
        for position, number in enumerate(numbers):
            groups.setdefault(self._device(number).slice, []).append(position)
        return groups

    def _device(self, number: int) -> Device:
        if not 0 <= number < len(self.all):
            raise StatusError(
                "NOT_FOUND", f"there is no device {number}; jax.devices() shows {len(self.all)}"
            )
        return self.all[number]

    def address(self, number: int) -> DeviceAddress | None:
        """Return where a device is now; None if that is not known. Raises StatusError: there is none."""
        device = self._device(number)
        devices = device.slice.runtime.devices(device.slice.id)
        return devices[device.index] if devices else None

    def default_assignment(self, count: int) -> list[int]:
        """Return the first devices of the first island that has so many; without one, the first of all."""
        for slice_, positions in self.by_slice(range(len(self.all))).items():
            if slice_.size >= count:
                return positions[:count]
        return list(range(min(count, len(self.all))))

    def describe(self, into: Any, cluster: str) -> None:
        """Fill an `InitResponse`.

        Args:
            into: the message.
            cluster: where other sessions reach the same controller; empty if they cannot.
        """
        into.platform_name = self.platform
        into.platform_version = "pw"
        into.platform_id = platform_of(self.platform).number
        into.process_index = 0
        into.runtime_type = "pw"
        for number, device in enumerate(self.all):
            name = f"{self.platform.upper()}_{number}"
            words = f"{name} of island {device.slice.island}"
            added = into.all_devices.add(
                id=number,
                local_device_id=number,
                local_hardware_id=device.index,
                platform_name=self.platform,
                device_kind=device.slice.kind or self.platform,
                default_memory_id=number * _MEMORIES_EACH,
                debug_string=words,
                to_string=name,
            )
            for kind_number, kind in enumerate(self.memories):
                memory = number * _MEMORIES_EACH + kind_number
                added.memory_ids.append(memory)
                into.memories.add(
                    id=memory,
                    memory_space_kind=kind,
                    kind_id=kind_number,
                    device_ids=[number],
                    debug_string=f"{kind} of {words}",
                    to_string=f"{kind} of {name}",
                )
            attributes = added.attributes.attributes
            attributes["slice_index"].int64_value = device.island_number * self._are_slices
            attributes["coords"].int64_list_value.elements.extend(_coords_of(device))
            attributes["core_on_chip"].int64_value = 0
            attributes["island"].string_value = device.slice.island.encode()
            attributes["pw_slice"].int64_value = device.slice.id
            attributes["pw_index"].int64_value = device.index
            attributes["pw_cluster"].string_value = cluster.encode()
            into.primary_device_ids.append(number)
            into.addressable_device_ids.append(number)
        client = into.client_attributes.attributes
        client["serialize_with_sdy"].bool_value = True
        client["supports_executable_serialization"].bool_value = False
