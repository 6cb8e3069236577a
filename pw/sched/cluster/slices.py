"""Binds slices to devices: which island has room, which positions a slice gets, and when it moves.

A slice goes to the island whose devices it would share the least, or has the devices of another slice that it
is to be like. A slice that names hosts has devices of those only. A slice of an earlier controller
waits first for the island that it was on, then for any that has room
(`pw.sched.cluster.slice_states`). While the cluster starts, a slice that no island fits waits for those that
are still to come. `pw.sched.cluster.fitting` knows the devices that a slice may have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, Address
from pw.core.messages import AllocateSlice, ReleaseSlice, SliceBound, SliceRefused
from pw.core.waits import CLUSTER_START_S, MOVE_S
from pw.sched.cluster.fitting import choose, fits, refusal, suits
from pw.sched.cluster.inventory import SETTLING_S, Inventory, Island
from pw.sched.cluster.slice_states import BoundSlice, SliceEvent, SliceState

RESUME_S = 30.0
"""Seconds for which slices of an earlier controller wait after that for any island that has room."""


@dataclass(frozen=True, slots=True)
class WaitedEnough:
    """Timer: a parked slice has waited for its former island, or for any."""

    slice: int
    is_over: bool
    """True to refuse the slice if no island has room."""


@dataclass(eq=False, repr=False)
class SliceTable(Part):
    """Slices of the cluster."""

    env: Env
    inventory: Inventory
    move_s: float = MOVE_S
    """Seconds for which slices wait for their island before they move to another one."""
    _slices: dict[int, BoundSlice] = field(default_factory=dict, init=False)
    """Slices by number: parked ones in the order in which they were parked, bound ones in the order of
    binding."""

    @handles(AllocateSlice)
    def _allocate(self, sender: Address, request: AllocateSlice) -> None:
        if request.resumed:
            self.inventory.settling_until_s = self.env.now_s() + SETTLING_S
            self.env.call_later(self.move_s, WaitedEnough(request.slice, False))
            self.env.call_later(self.move_s + RESUME_S, WaitedEnough(request.slice, True))
        piece = BoundSlice(request, island=request.formerly)
        self._place(piece)
        if not request.resumed and piece.state is SliceState.PARKED:
            waits_s = CLUSTER_START_S if self.inventory.awaited_islands else self.move_s
            self.env.call_later(waits_s, WaitedEnough(request.slice, True))

    @handles(ReleaseSlice)
    def _release(self, sender: Address, message: ReleaseSlice) -> None:
        piece = self._slices.pop(message.slice, None)
        if piece is not None:
            if piece.state is SliceState.BOUND:
                self.inventory.islands[piece.island].load.subtract(piece.positions)
            piece.happened(SliceEvent.RELEASE)
            for one in self._slices.values():
                if one.request.like == message.slice and one.state is SliceState.BOUND:
                    one.request = msgspec.structs.replace(one.request, like=0)

    @handles(WaitedEnough)
    def _waited_enough(self, sender: Address, timer: WaitedEnough) -> None:
        """The slice's former island does not come back, or no island has had room for it."""
        piece = self._slices.get(timer.slice)
        if piece is None or piece.state is not SliceState.PARKED:
            return
        piece.request = msgspec.structs.replace(piece.request, formerly="", like=0)
        may_end = timer.is_over and not self._waits_for_hosts(piece)
        if may_end and self._roomiest(piece.request) is None:
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
        """An island has another epoch: bind its slices to their positions again."""
        island.load.clear()
        for piece in self._on(island):
            if fits(island, piece.request):
                self._bind(piece, SliceEvent.REBIND, island)
            elif set(piece.request.hosts) - set(island.ranks):
                piece.happened(SliceEvent.PARK)
            else:  # the island came back smaller, or as another platform
                self._refuse(piece)

    def retry_parked(self) -> None:
        """An island is ready: place the slices that wait."""
        for piece in self.parked:
            if piece.state is SliceState.PARKED:  # it is bound already if it is like another one
                self._place(piece)

    def move(self, island: Island) -> None:
        """An island does not come back: move its slices to islands that have room."""
        for piece in self._on(island):
            target = self._roomiest(piece.request)
            if target is not None and not (piece.request.like and target is island):
                island.load.subtract(piece.positions)
                piece.positions = ()
                self._bind(piece, SliceEvent.MOVE, target)

    def stuck_on(self, island: Island) -> int:
        """Return how many slices of an island no other island has room for."""
        own = (one.request for one in self._on(island) if not one.request.like)
        return sum(self._roomiest(request, island) is None for request in own)

    def naming(self, node: str) -> int:
        """Return how many slices name a host."""
        return sum(node in one.request.hosts for one in self._slices.values())

    def _on(self, island: Island) -> list[BoundSlice]:
        return [
            one
            for one in self._slices.values()
            if one.state is SliceState.BOUND and one.island == island.name
        ]

    # --- placing ----------------------------------------------------------------------------------

    def _place(self, piece: BoundSlice) -> None:
        """Bind, park or refuse a slice."""
        request, islands = piece.request, self.inventory.islands
        self._slices.pop(request.slice, None)
        island = self._roomiest(request)
        if request.formerly and not request.like:
            home = islands.get(request.formerly)
            is_back = home is not None and home.state == "ready" and fits(home, request)
            island = home if is_back else None
        if island is not None:
            piece.request = msgspec.structs.replace(request, resumed=False, formerly="")
            self._slices[request.slice] = piece
            self._bind(piece, SliceEvent.BIND, island)
        elif (
            request.resumed
            or self._waits_for_hosts(piece)
            or self.inventory.awaited_islands
            or any(i.state != "ready" and fits(i, request) for i in islands.values())
        ):
            self._slices[request.slice] = piece
            piece.happened(SliceEvent.PARK)
        else:
            self._refuse(piece)

    def _roomiest(self, request: AllocateSlice, but: Island | None = None) -> Island | None:
        """Return the island on which a slice would share its devices the least; for a slice like another one,
        its island.
        """
        if request.like:
            island = self._home_of(request.like)
            return None if island is but or island is None or island.state != "ready" else island
        fitting = [
            island
            for island in self.inventory.islands.values()
            if island.state == "ready" and island is not but and fits(island, request)
        ]
        fitting = self._apart(request, fitting)
        return min(
            fitting,
            key=lambda island: (
                (island.load.total() + request.devices) / island.device_count,
                island.name,
            ),
            default=None,
        )

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

    def _bind(self, piece: BoundSlice, event: SliceEvent, island: Island) -> None:
        """Bind a slice, to the positions that it had in this island if it had any."""
        positions = piece.positions
        model = self._slices.get(piece.request.like)
        if model is not None and self._home_of(model.request.slice) is island:
            positions = model.positions[: piece.request.devices]
        if not positions or not suits(island, piece.request, positions):
            positions = choose(island, piece.request)
        island.load.update(positions)
        piece.bound(event, island.name, positions)
        bound = SliceBound(
            piece.request.slice,
            island.name,
            island.platform,
            island.kind,
            island.located(positions),
            island.epoch,
            island.machine,
        )
        self.env.send(CONTROL, bound)
        for one in self.parked:
            if one.request.like == piece.request.slice and one.state is SliceState.PARKED:
                self._place(one)

    def _refuse(self, piece: BoundSlice) -> None:
        request = piece.request
        self._slices.pop(request.slice, None)
        piece.happened(SliceEvent.REFUSE)
        error = refusal(self.inventory, request)
        self.env.send(CONTROL, SliceRefused(request.slice, ErrorReport.of(error)))
