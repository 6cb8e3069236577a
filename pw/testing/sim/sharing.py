"""Users hand arrays to each other (`pw.sched.control.shares`), and what the taker then has.

The taker asks for a slice on the devices of one of the giver's. The offer and the take go to the controller in
any order. What is taken has the giver's values; it may be lost with the giver, or with a host of either.
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
"""A `SimClient`, which imports this module."""


@dataclass(slots=True)
class Deal:
    """Arrays that one user hands to another."""

    giver: User
    life: int
    """The giver's."""
    is_offered: bool = False

    @property
    def is_off(self) -> bool:
        """Whether the taker may get nothing."""
        giver = self.giver
        return not self.is_offered or giver.lives != self.life or giver.closing


GONE = (
    "session that handed it over",
    "session that handed the array over",
    "no session has offered",
    "nothing to offer",
)
"""Words of errors that the end of the giver's session excuses."""
_WITHDRAWN = ErrorReport.of(ArrayLost("the giver has nothing to offer any more"))
MOVED = "cannot be handed over"
"""Words of the error of an array whose devices are not those of the taker any more."""


def give(giver: User, takers: list[User]) -> None:
    """Hand some arrays of one slice to another user; then perhaps delete one of them."""
    taker = giver.random.choice(takers)
    number = giver.random.choice(list(giver.slices))
    own = taker.likes.get(number)
    if own is None:
        _ask_for_slice(giver, taker, number)
        return
    if own not in taker.slices:
        return
    lying = [n for n, spec in giver.arrays.items() if spec.placement.slice == number]
    if not lying:
        return
    chosen = giver.random.sample(lying, min(len(lying), giver.random.choice((1, 1, 2, 3))))
    token = giver.random.randbytes(16)
    given = tuple(giver.arrays[array] for array in chosen)
    specs = [_like(spec, own) for spec in given]

    deal = Deal(giver, giver.lives)

    def offer(life: int) -> None:
        if life != giver.lives or giver.closing or not giver.node.alive:
            return
        if not giver.may_take or not all(array in giver.arrays for array in chosen):
            giver._post(Tell(msg.Offer(giver._id(), token, (), (), _WITHDRAWN)))
            return
        deal.is_offered = True
        giver._post(Tell(msg.Offer(giver._id(), token, tuple(chosen), given)))
        if giver.random.random() < 0.5:
            giver._delete(giver.random.choice(chosen))

    def take(life: int) -> None:
        if life != taker.lives or own not in taker.slices or not taker.may_take:
            return
        for index, (array, spec) in enumerate(zip(chosen, specs, strict=True)):
            made = taker._id()
            taker.oracle.take(made, spec, giver.oracle, array, chosen)
            taker.arrays[made] = spec
            taker.cluster.deals[made] = deal
            taker._post(Tell(msg.CreateArray(made, spec, source=msg.OfferSource(token, index))))
        taker.world.checked["taken"] += len(chosen)

    acts = [(offer, giver), (take, taker)]
    giver.random.shuffle(acts)
    (first, one), (second, other) = acts
    if giver.random.random() < 0.5:
        second_s = giver.random.choice((1e-4, 1e-3, 0.1))
        giver.world.after(second_s, second, other.lives)
        first(one.lives)
    else:
        first(one.lives)
        second(other.lives)


def _like(spec: ArraySpec, slice: int) -> ArraySpec:
    return msgspec.structs.replace(spec, placement=Placement(slice, spec.placement.devices))


def _ask_for_slice(giver: User, taker: User, number: int) -> None:
    taker.likes[number] = 0
    request = msg.AllocateSlice(
        taker._id(), len(giver.slices[number].devices), None, None, None, like=number
    )

    def bound(answer: msg.SliceBound | None, error: BaseException | None) -> None:
        if answer is not None:
            taker.slices[answer.slice] = answer
            taker.likes[number] = answer.slice
        elif isinstance(error, InsufficientDevices):  # the giver's is gone, or away
            taker.likes.pop(number, None)
        else:
            taker._cut_off(error)

    taker._post(Allocate(request, taker._promise("allocate", bound)))
