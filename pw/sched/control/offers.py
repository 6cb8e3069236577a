"""One handover: its offer, what is taken, what may be offered, and the view that makes the importer's arrays.

`pw.sched.control.handovers` says how the two sides come together, and how a handover ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from pw.core.errors import ArrayDeleted, ArrayLost, Error, ErrorReport, NotOwner, PlacementError
from pw.core.ids import client_of
from pw.core.messages import Offer
from pw.core.programs.program import Program
from pw.core.programs.views import view_program
from pw.core.sharding import ArraySpec, Binding, Placement
from pw.sched.control.clients import Client
from pw.sched.control.lineage import Record

ALONE_S = 240.0
"""Seconds for which an offer waits for its importer, and a taken array for its offer: the other client may
have to wait for its runs in flight first."""

ENDED = ErrorReport.of(
    ArrayLost(
        "the session that handed the array over has ended, and there are no replicas of it; call pw.checkpoint "
        "on the arrays that your program cannot do without"
    )
)
ALONE = ErrorReport.of(
    ArrayLost(
        f"no session has offered the array within {ALONE_S:.0f} s: the call that hands it over was not made "
        "there, or has failed. Hand it over again"
    )
)
REUSED = ErrorReport.of(
    NotOwner(
        "the array was taken already, or never offered; each offer can be taken once. Hand it over again"
    )
)


@dataclass(slots=True, eq=False)
class Handover:
    """Arrays that one client hands to another: the offer, the arrays that are taken, or both."""

    token: bytes
    until_s: float
    """Time at which it ends if only one side has come, in seconds."""
    exporter: Client | None = None
    offer: Offer | None = None
    importer: int = 0
    """Number of the importer; 0 while no client has taken an array."""
    imports: dict[int, tuple[int, ArraySpec]] = field(default_factory=dict)
    """Number and spec of each array of the importer, by its place in the offer."""
    asked: dict[int, int] = field(default_factory=dict)
    """Arrays for which the importer waits before the offer has come, with the names under which they arrive."""
    error: ErrorReport | None = None
    """Error of each array that is taken, if there is nothing to take."""
    untaken: int = 0
    """Number of arrays that have still to get that error; negative if it is not known."""
    record: Record | None = None
    """Record of the run that makes the importer's arrays."""
    guarded: dict[int, None] = field(default_factory=dict)
    """Offered arrays that stay until that run is submitted."""
    guarded_until_s: float = 0.0
    """Time until which these arrays stay, in seconds."""
    deleted: list[int] = field(default_factory=list)
    """Guarded arrays that the exporter has deleted."""

    @property
    def is_complete(self) -> bool:
        """Whether both sides have come."""
        return self.offer is not None and len(self.imports) == len(self.offer.arrays)


def why_not(client: Client, message: Offer) -> ErrorReport | None:
    """Return why these arrays cannot be offered; an array that has failed can."""
    if message.error is not None:
        return message.error
    error: Error | None = None
    slices = {spec.placement.slice for spec in message.specs}
    if len(message.arrays) != len(message.specs) or len(slices) != 1:
        error = PlacementError("arrays of several slices, or none, were offered at once")
    for number, spec in zip(message.arrays, message.specs, strict=False):
        array = client.arrays.get(number)
        if client_of(number) != client.number:
            error = NotOwner(
                f"the array {spec.short} belongs to another session than the one that offers it"
            )
        elif array is None:
            error = ArrayDeleted(
                f"the array {spec.short} was deleted or donated before it was handed over; keep a copy, or do "
                "not donate it"
            )
        elif array.error is None and array.spec != spec:
            error = PlacementError(
                f"the array {spec.short} was offered with another layout than it has"
            )
    return None if error is None else ErrorReport.of(error)


def view_of(handover: Handover, offer: Offer, bindings: Mapping[int, Binding]) -> Program:
    """Return the program that makes the importer's arrays, in terms of the exporter's slice.

    Raises PlacementError if the arrays lie on other devices than the importer's, or on none.
    """
    outputs, shards = [], []
    for index, spec in enumerate(offer.specs):
        _, wanted = handover.imports[index]
        own = bindings.get(spec.placement.slice)
        theirs = bindings.get(wanted.placement.slice)
        if own is None or theirs is None:
            raise PlacementError(
                f"the array {spec.short} cannot be handed over: its devices have been given back, or "
                "have not come back after a loss. Put it on other ones first, with pw.put"
            )
        here, there = own.located(spec.placement), theirs.located(wanted.placement)
        if set(here) != set(there):
            raise PlacementError(
                f"the array {spec.short} cannot be handed over: it lies on other devices than those that "
                "the other session names for it. Move it there first, with pw.put or jax.device_put"
            )
        on = {device: at for at, device in enumerate(own.devices)}
        placement = Placement(spec.placement.slice, tuple([on[device] for device in there]))
        outputs.append(replace(wanted, placement=placement))
        at = {device: position for position, device in enumerate(here)}
        shards.append([(index, at[device]) for device in there])
    return view_program(offer.specs, outputs, shards)
