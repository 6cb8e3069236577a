"""Binds slices to devices: which island has room, which of its places a slice gets, and when it moves.

A slice goes to the island whose devices it would share the least. It keeps its places over the epochs of its
island, so that arrays lie where they lay. While no island that is ready can have it, but one that is being
formed again could, the request waits; so does a slice of an earlier controller, first for the island that it
was on, then for any that has room.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pw.core.actor import Env
from pw.core.errors import ErrorReport, InsufficientDevices
from pw.core.ids import CONTROL
from pw.core.messages import AllocateSlice, SliceBound, SliceRefused
from pw.sched.cluster.inventory import SETTLING_S, Inventory, Island, Place, counted

MOVE_S = 30.0
"""How long slices wait for their island before they move to another one."""
RESUME_S = 60.0
"""How long slices of an earlier controller wait for any island that has room."""


@dataclass(frozen=True, slots=True)
class WaitedEnough:
    """Note to the resource manager: this slice has waited for its former island, or for any."""

    slice: int
    is_over: bool


@dataclass(slots=True)
class _Bound:
    request: AllocateSlice
    island: str
    places: tuple[Place, ...]


class Slices:
    """The resource manager's part that binds slices; see the module.

    Args:
        env: of the resource manager.
        inventory: the islands.
        fill: gives an island's free places to spares.
    """

    def __init__(self, env: Env, inventory: Inventory, fill: Callable[[Island], None]) -> None:
        self._env = env
        self._inventory = inventory
        self._fill = fill
        self._bound: dict[int, _Bound] = {}
        self._parked: list[AllocateSlice] = []
        """Requests that only an island can satisfy which is not ready."""

    def allocate(self, request: AllocateSlice) -> None:
        """Bind a slice, now or when an island is back that can have it; or refuse it."""
        if request.resumed:
            self._inventory.settling_until_s = self._env.now_s() + SETTLING_S
            self._env.call_later(MOVE_S, WaitedEnough(request.slice, False))
            self._env.call_later(RESUME_S, WaitedEnough(request.slice, True))
        self._place(request)
        if not request.resumed and request in self._parked:
            self._env.call_later(MOVE_S, WaitedEnough(request.slice, True))

    def release(self, number: int) -> None:
        """A slice is no longer used."""
        self._parked = [request for request in self._parked if request.slice != number]
        bound = self._bound.pop(number, None)
        if bound is not None:
            self._inventory.islands[bound.island].load.subtract(bound.places)

    def counts(self) -> Counter[str]:
        """How many slices each island has."""
        return Counter(bound.island for bound in self._bound.values())

    # --- what becomes of their islands -----------------------------------------------------------------

    def bind_again(self, island: Island) -> None:
        """An island has another epoch: its slices have their places again."""
        island.load.clear()
        for number, bound in self._on(island):
            if _fits(island, bound.request):
                self._bind(bound.request, island, bound.places)
            else:  # the island came back smaller, or as another platform
                del self._bound[number]
                self._refuse(bound.request)

    def retry_parked(self) -> None:
        """An island is ready again, or will not be: requests that waited for it have their answer."""
        parked, self._parked = self._parked, []
        for request in parked:
            self._place(request)

    def move(self, island: Island) -> None:
        """An island does not come back: its slices go where there is room."""
        for _, bound in self._on(island):
            target = self._roomiest(bound.request)
            if target is not None:
                island.load.subtract(bound.places)
                self._bind(bound.request, target)

    def stuck_on(self, island: Island) -> int:
        """How many slices of an island no other one has room for."""
        return sum(self._roomiest(bound.request, island) is None for _, bound in self._on(island))

    def waited_enough(self, note: WaitedEnough) -> None:
        """A slice's own island does not come back, or none that could have it."""
        for request in [request for request in self._parked if request.slice == note.slice]:
            self._parked.remove(request)
            home = self._inventory.islands.get(request.formerly)
            if home is not None and not home.formed:
                home.is_open = True
                self._fill(home)
            request = msgspec.structs.replace(request, formerly="")
            if note.is_over and self._roomiest(request) is None:
                self._refuse(request)
            else:
                self._place(request)

    def _on(self, island: Island) -> list[tuple[int, _Bound]]:
        return [(n, bound) for n, bound in self._bound.items() if bound.island == island.name]

    # --- where they go ---------------------------------------------------------------------------------

    def _place(self, request: AllocateSlice) -> None:
        islands = self._inventory.islands
        island = self._roomiest(request)
        if request.formerly:
            home = islands.get(request.formerly)
            is_back = home is not None and home.state == "ready" and _fits(home, request)
            island = home if is_back else None
        if island is not None:
            self._bind(msgspec.structs.replace(request, resumed=False, formerly=""), island)
        elif request.resumed or any(
            i.formed and i.state != "ready" and _fits(i, request) for i in islands.values()
        ):
            self._parked.append(request)
        else:
            self._refuse(request)

    def _roomiest(self, request: AllocateSlice, but: Island | None = None) -> Island | None:
        """The island on which a slice would share its devices the least."""
        fitting = [
            island
            for island in self._inventory.islands.values()
            if island.state == "ready" and island is not but and _fits(island, request)
        ]
        return min(
            fitting,
            key=lambda island: (
                (island.load.total() + request.devices) / island.device_count,
                island.name,
            ),
            default=None,
        )

    def _bind(self, request: AllocateSlice, island: Island, places: tuple[Place, ...] = ()) -> None:
        """Bind a slice, to the places that it had in this island if it had any."""
        if not places or not set(places) <= set(island.places()):
            places = _choose(island, request)
        island.load.update(places)
        self._bound[request.slice] = _Bound(request, island.name, places)
        bound = SliceBound(
            request.slice,
            island.name,
            island.platform,
            island.kind,
            island.located(places),
            island.epoch,
        )
        self._env.send(CONTROL, bound)

    def _refuse(self, request: AllocateSlice) -> None:
        asked = counted(request.devices, "device")
        for name in ("kind", "island", "topology"):
            value = getattr(request, name)
            if value is not None:
                asked += f" with {name}={value!r}"
        there = "; ".join(island.describe() for island in self._inventory.islands.values())
        error = InsufficientDevices(
            f"no island has {asked} for one slice. There are: {there or 'no islands yet'}"
        )
        self._env.send(CONTROL, SliceRefused(request.slice, ErrorReport.of(error)))


def _fits(island: Island, request: AllocateSlice) -> bool:
    if request.island is not None and request.island != island.name:
        return False
    if request.kind is not None and request.kind.lower() not in (
        island.platform.lower(),
        island.kind.lower(),
    ):
        return False
    if request.topology is not None:
        extent = math.prod(request.topology)
        if extent != request.devices or any(size < 1 for size in request.topology):
            return False
        rows, columns = _block(request.topology)
        if rows > island.expected_hosts or columns > island.local_devices:
            return False
    return request.devices <= island.device_count


def _choose(island: Island, request: AllocateSlice) -> tuple[Place, ...]:
    """The least loaded devices; with a topology, the least loaded block of that form."""
    places = island.places()
    if request.topology is None or len(request.topology) < 2:
        chosen = sorted(places, key=lambda place: (island.load[place], place))
        return tuple(sorted(chosen[: request.devices]))
    rows, columns = _block(request.topology)
    width = island.local_devices
    blocks = [
        tuple(places[(row + r) * width + column + c] for r in range(rows) for c in range(columns))
        for row in range(island.expected_hosts - rows + 1)
        for column in range(width - columns + 1)
    ]
    return min(blocks, key=lambda block: sum(island.load[place] for place in block))


def _block(topology: tuple[int, ...]) -> tuple[int, int]:
    """Rows (hosts) and columns (devices of one host) that a topology asks for."""
    if len(topology) < 2:
        return 1, 1
    return topology[0], math.prod(topology[1:])
