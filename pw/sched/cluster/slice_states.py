"""The lifecycle of a slice: virtual devices that a client owns, bound to devices of one island.

Theory of operation. A client asks for a slice. The slice is bound if an island that is ready fits
it, and refused if no island can. It is parked while only an island that is away could have it: one
that left its epoch and has not formed again, or, for a slice of an earlier controller, any island
that hosts may still bring back. While the cluster starts, it is parked whatever it asks for: the
islands that are still to come may have that. A parked slice is tried again whenever an island becomes
ready, and when it has waited for long enough.

A bound slice keeps its positions (ranks and ordinals) when its island is formed again, so that
arrays lie where they lay; it is only bound again, to the hosts that now have the ranks. If its
island does not come back, it moves to an island that has room. If its island comes back in a form
that no longer fits, it is refused. Its client releases it.

A slice that names hosts is bound to those and to no others. If its island is formed again without
one of them, it is parked until that host has a place in an island again.

A slice with a shape has a block of the island's grid. If its island is formed again and its devices are no
block any more, as when a spare at another place has joined, it gets another block there, or on another island.
Where that needs devices that other slices have, it is parked for a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pw.core.actors.lifecycle import Lifecycle
from pw.core.messages import AllocateSlice
from pw.sched.cluster.grid import Position


class SliceState(StrEnum):
    """State of a slice."""

    REQUESTED = "requested"
    """State of a slice that a client has asked for."""
    PARKED = "parked"
    """State of a slice that waits for an island."""
    BOUND = "bound"
    """State of a slice that has positions on an island, which may be away for a while."""
    REFUSED = "refused"
    """State of a slice that fits no island."""
    RELEASED = "released"
    """State of a slice that its client has given back."""


class SliceEvent(StrEnum):
    """Event that changes the state of a slice."""

    PARK = "park"
    BIND = "bind"
    REBIND = "bind again"
    MOVE = "move"
    REFUSE = "refuse"
    RELEASE = "release"


SLICE = Lifecycle[
    SliceState, SliceEvent
](
    "slice",
    {
        SliceState.REQUESTED: {
            SliceEvent.PARK: SliceState.PARKED,
            SliceEvent.BIND: SliceState.BOUND,
            SliceEvent.REFUSE: SliceState.REFUSED,
        },
        SliceState.PARKED: {
            SliceEvent.PARK: SliceState.PARKED,  # the island that became ready does not fit
            SliceEvent.BIND: SliceState.BOUND,
            SliceEvent.REFUSE: SliceState.REFUSED,
            SliceEvent.RELEASE: SliceState.RELEASED,
        },
        SliceState.BOUND: {
            SliceEvent.REBIND: SliceState.BOUND,
            SliceEvent.MOVE: SliceState.BOUND,
            SliceEvent.PARK: SliceState.PARKED,  # its island has a spare in place of a host that it names
            SliceEvent.REFUSE: SliceState.REFUSED,
            SliceEvent.RELEASE: SliceState.RELEASED,
        },
        SliceState.REFUSED: {},
        SliceState.RELEASED: {},
    },
)


@dataclass(slots=True, eq=False)
class BoundSlice:
    """One slice."""

    request: AllocateSlice
    state: SliceState = SliceState.REQUESTED
    island: str = ""
    """Name of the island where the slice is bound, or was last."""
    positions: tuple[Position, ...] = ()

    def happened(self, event: SliceEvent) -> None:
        """Change the state. Raises ImpossibleTransition."""
        self.state = SLICE.after(self.state, event)

    def bound(self, event: SliceEvent, island: str, positions: tuple[Position, ...]) -> None:
        """Bind the slice to these positions."""
        self.happened(event)
        self.island, self.positions = island, positions
