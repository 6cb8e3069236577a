"""Users hand arrays to each other (`pw.sched.control.handovers`), and what the importer then has.

The importer asks for a slice on the devices of one of the exporter's. The offer and the take go to the
controller in any order. What is taken has the exporter's values; it may be lost with the exporter, or with a
host of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pw.client.session.thread_messages import Allocate, Tell
from pw.core import messages as msg
from pw.core.errors import ArrayLost, ErrorReport, InsufficientDevices
from pw.core.sharding import ArraySpec, Placement

User = Any
"""`SimClient`, which imports this module."""


@dataclass(slots=True)
class Deal:
    """Arrays that one user hands to another."""

    exporter: User
    life: int
    """Number of the exporter's life."""
    is_offered: bool = False

    @property
    def is_off(self) -> bool:
        """Whether the importer may get nothing."""
        exporter = self.exporter
        return not self.is_offered or exporter.lives != self.life or exporter.closing


GONE = (
    "session that handed it over",
    "session that handed the array over",
    "no session has offered",
    "nothing to offer",
)
"""Words of errors that the end of the exporter's session excuses."""
_WITHDRAWN = ErrorReport.of(ArrayLost("the exporter has nothing to offer any more"))
MOVED = "cannot be handed over"
"""Words of the error of an array whose devices are not those of the importer any more."""


def give(exporter: User, importers: list[User]) -> None:
    """Hand some arrays of one slice to another user; then perhaps delete one of them."""
    importer = exporter.random.choice(importers)
    number = exporter.random.choice(list(exporter.slices))
    own = importer.likes.get(number)
    if own is None:
        _ask_for_slice(exporter, importer, number)
        return
    if own not in importer.slices:
        return
    lying = [n for n, spec in exporter.arrays.items() if spec.placement.slice == number]
    if not lying:
        return
    chosen = exporter.random.sample(lying, min(len(lying), exporter.random.choice((1, 1, 2, 3))))
    token = exporter.random.randbytes(16)
    offered = tuple(exporter.arrays[array] for array in chosen)
    specs = [_like(spec, own) for spec in offered]

    deal = Deal(exporter, exporter.lives)
    oracle = exporter.oracle  # its next life has another one

    def offer(life: int) -> None:
        if life != exporter.lives or exporter.closing or not exporter.node.alive:
            return
        if not exporter.may_take or not all(array in exporter.arrays for array in chosen):
            exporter._post(Tell(msg.Offer(exporter._id(), token, (), (), _WITHDRAWN)))
            return
        deal.is_offered = True
        exporter._post(Tell(msg.Offer(exporter._id(), token, tuple(chosen), offered)))
        if exporter.random.random() < 0.5:
            exporter._delete(exporter.random.choice(chosen))

    def take(life: int) -> None:
        if life != importer.lives or own not in importer.slices or not importer.may_take:
            return
        for index, (array, spec) in enumerate(zip(chosen, specs, strict=True)):
            imported = importer._id()
            importer.oracle.take(imported, spec, oracle, array, chosen)
            importer.arrays[imported] = spec
            importer.cluster.deals[imported] = deal
            importer._post(
                Tell(msg.CreateArray(imported, spec, source=msg.OfferSource(token, index)))
            )
        importer.world.checked["taken"] += len(chosen)

    acts = [(offer, exporter), (take, importer)]
    exporter.random.shuffle(acts)
    (first, one), (second, other) = acts
    if exporter.random.random() < 0.5:
        second_s = exporter.random.choice((1e-4, 1e-3, 0.1))
        exporter.world.after(second_s, second, other.lives)
        first(one.lives)
    else:
        first(one.lives)
        second(other.lives)


def _like(spec: ArraySpec, slice: int) -> ArraySpec:
    return msgspec.structs.replace(spec, placement=Placement(slice, spec.placement.devices))


def _ask_for_slice(exporter: User, importer: User, number: int) -> None:
    importer.likes[number] = 0
    request = msg.AllocateSlice(
        importer._id(), len(exporter.slices[number].devices), None, None, None, like=number
    )

    def bound(answer: msg.SliceBound | None, error: BaseException | None) -> None:
        if answer is not None:
            importer.slices[answer.slice] = answer
            importer.likes[number] = answer.slice
        elif isinstance(error, InsufficientDevices):  # the exporter's is gone, or away
            importer.likes.pop(number, None)
        else:
            importer._cut_off(error)

    importer._post(Allocate(request, importer._promise("allocate", bound)))
