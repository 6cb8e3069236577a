"""Users publish arrays under names, and look names up (`pw.sched.control.names`).

A publication has a tree that no other has, so a lookup says what its user must get: the values of all arrays of
one publication. The monitor also follows the versions: a name means one publication for all, no user sees it go
back, each finds what it has published itself, and no later controller has a version whose publisher knew that
it was ended. A publication that was ended before it was answered may fail with its controller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pw.client.session.thread_messages import Allocate, Ask, Tell
from pw.core import messages as msg
from pw.core.errors import Error, InsufficientDevices, NameNotFound, OutOfDeviceMemory
from pw.core.ids import Address
from pw.core.programs.program import Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Placement
from pw.sched.control.versions import VersionState
from pw.testing.sim.handovers import MOVED, Deal
from pw.testing.sim.oracle import INFRASTRUCTURE
from pw.testing.sim.programs import ProgramDraft
from pw.testing.sim.world import Violation

User = Any
"""`SimClient`, which imports this module."""

NAMES = ("base", "adapter")
_LOST = INFRASTRUCTURE | {"PlacementError", "InsufficientDevices"}
"""Names of errors of a publication that faults excuse."""


@dataclass(slots=True, eq=False)
class Edition:
    """One publication."""

    deal: Deal
    name: str
    parts: list[list[int]]
    """Numbers of the publisher's arrays on each slice."""
    specs: dict[int, ArraySpec]
    oracle: Any
    start: int
    """Number of the controller's start at which it was published."""
    request: int = 0
    """Number of the request, once the session has sent it."""
    is_open: bool = True
    """True if the publisher has no answer."""
    end: int | None = None
    """Number of the controller's start at which its publisher knew that it had ended it."""


@dataclass(slots=True, eq=False)
class Editions:
    """All publications, and what users have seen of them."""

    by_tree: dict[bytes, Edition] = field(default_factory=dict)
    """Publications by their trees."""
    versions: dict[tuple[int, str, int], bytes] = field(default_factory=dict)
    """Tree of each version that was seen, by the controller's start, the name and its number."""
    newest: dict[tuple[int, User, int, str], int] = field(default_factory=dict)
    """Newest version that each user has seen, by the controller's start, user, life and name."""

    def watch(self, cluster: Any) -> None:
        """Note which publications their sessions know to have ended."""

        def ended(sender: Address, to: Address, message: msg.VersionEnded) -> None:
            for edition in self.by_tree.values():
                maker = edition.deal.exporter
                is_alive = maker.name == to.node and maker.lives == edition.deal.life
                if is_alive and edition.request == message.request:
                    edition.end = cluster.starts

        cluster.world.watch_handled(msg.VersionEnded, ended)

    def see(self, user: User, offer: msg.VersionOffer) -> None:
        """Note that a user sees a version. Raises Violation if it is none that the user may see."""
        start, name, version = user.cluster.starts, offer.name, offer.version
        user.world.checked["names"] += 1
        edition = self.by_tree.get(offer.tree)
        if edition is None or edition.name != name:
            raise Violation("names", f"{user.name} finds {offer.tree!r} as {name!r}")
        if edition.end is not None and edition.end < start:
            raise Violation(
                "names", f"{user.name} finds {name!r}, which an earlier controller has ended"
            )
        if len(edition.parts) != len(offer.parts):
            raise Violation("names", f"{user.name} finds a part of version {version} of {name!r}")
        if self.versions.setdefault((start, name, version), offer.tree) != offer.tree:
            raise Violation("names", f"version {version} of {name!r} is two publications")
        seen = self.newest.get((start, user, user.lives, name), 0)
        if version < seen:
            raise Violation("names", f"{user.name} sees {name!r} go back from {seen} to {version}")
        self.newest[start, user, user.lives, name] = version


def share(user: User) -> None:
    """Publish some arrays, look a name up, or end one."""
    if user.cluster.node.alive:
        _check_readers(user.cluster.controller.names)
        _check_holders(user.cluster.controller.sessions)
    draw = user.random.random()
    if draw < 0.45 and user.arrays:
        _publish(user)
    elif draw < 0.95:
        _look_up(user)
    else:
        _unpublish(user)


def _check_readers(names: Any) -> None:
    """Raise Violation if a version that has readers is gone."""
    for shared, version in names.offered.values():
        if version.state is VersionState.GONE:
            raise Violation(
                "names", f"version {version.number} of {shared.name!r} went before its readers"
            )


def _check_holders(sessions: Any) -> None:
    """Raise Violation if the controller does not look at a holder that has something to do."""
    for client in sessions.clients:
        is_over = client.slices.borrowed and not client.recovering
        has_work = client.stream or client.lineage.has_unneeded or is_over
        if client.is_holder and has_work and client not in sessions.busy():
            raise Violation(
                "names", f"nothing goes on with what the holder of {client.name} has to do"
            )


def _publish(user: User) -> None:
    """Publish arrays, perhaps of several slices; then perhaps delete one of them."""
    editions: Editions = user.cluster.editions
    name = user.random.choice(NAMES)
    count = min(len(user.arrays), user.random.choice((1, 2, 3, 5)))
    parts: dict[int, list[int]] = {}
    for array in user.random.sample(list(user.arrays), count):
        parts.setdefault(user.arrays[array].placement.slice, []).append(array)
    chosen = [array for part in parts.values() for array in part]
    specs = {array: user.arrays[array] for array in chosen}
    offers = tuple(
        msg.Offer(
            user._id(),
            user.random.randbytes(16),
            tuple(part),
            tuple(specs[array] for array in part),
        )
        for part in parts.values()
    )
    tree = user.random.randbytes(12)
    deal = Deal(user, user.lives, is_offered=True)
    start = user.cluster.starts
    edition = Edition(deal, name, list(parts.values()), specs, user.oracle, start)
    editions.by_tree[tree] = edition
    keep_s = user.random.choice((0.0, 0.0, 0.5, 5.0))

    def answered(answer: msg.Published | None, error: BaseException | None) -> None:
        edition.is_open = False
        if answer is not None:
            wrong = [text for array in chosen if (text := edition.oracle.check_ready(array))]
            if wrong:
                raise Violation("names", f"{user.name} published {wrong[0]}")
            user.world.checked["published"] += 1
            return
        if edition.end is None or not isinstance(error, NameNotFound):
            _check_refusal(user, chosen, error)

    def publication(number: int) -> msg.Publish:
        edition.request = number
        return msg.Publish(number, name, offers, tree, keep_s)

    promise = user._promise(f"publish {name}", answered)
    user._post(Ask(publication, promise, tuple(chosen)))
    if user.random.random() < 0.4:
        user._delete(user.random.choice(chosen))


def _check_refusal(user: User, chosen: list[int], error: BaseException | None) -> None:
    if user.session.closed is not None:
        return
    is_lost = type(error).__name__ in _LOST or MOVED in str(error)
    if isinstance(error, Error) and is_lost and user.world.ledger.any:
        return
    assert error is not None
    wrong = [user._check_error(array, error) for array in chosen]
    if all(wrong):
        raise Violation("names", f"{user.name} cannot publish: {wrong[0]}")


def _look_up(user: User) -> None:
    """Take the arrays of a name, and perhaps move one of them to other devices."""
    name = user.random.choice(NAMES)
    wait_s = user.random.choice((0.0, 0.0, 0.1, 2.0))
    editions: Editions = user.cluster.editions
    start = user.cluster.starts
    own = _own(user, name)

    def answered(answer: msg.VersionOffer | None, error: BaseException | None) -> None:
        if answer is None:
            _check_miss(user, name, error)
            return
        editions.see(user, answer)
        if start == user.cluster.starts and any(one.is_open and one.start == start for one in own):
            raise Violation("names", f"{user.name} does not find what it published before")
        if user.may_take:
            _take(user, answer, editions.by_tree[answer.tree])

    promise = user._promise(f"look up {name}", answered)
    user._post(Ask(lambda number: msg.Lookup(number, name, wait_s=wait_s), promise))


def _own(user: User, name: str) -> list[Edition]:
    """Return what a user has published under a name in this life."""
    return [
        edition
        for edition in user.cluster.editions.by_tree.values()
        if edition.deal.exporter is user
        and edition.deal.life == user.lives
        and edition.name == name
    ]


def _check_miss(user: User, name: str, error: BaseException | None) -> None:
    if isinstance(error, NameNotFound) or user.session.closed is not None:
        return
    is_lost = type(error).__name__ in _LOST
    ledger = user.world.ledger
    if isinstance(error, OutOfDeviceMemory) and ledger.injected["memory is short"]:
        return  # it could not be made again
    if not (isinstance(error, Error) and is_lost and ledger.any):
        raise Violation("names", f"{user.name} cannot look {name!r} up: {error!r}")


def _take(user: User, offer: msg.VersionOffer, edition: Edition) -> None:
    """Ask for slices on the devices of the arrays, and take them when all are bound."""
    missing = [part for part in offer.parts if user.likes.get(part.slice) not in user.slices]
    if not missing:
        imports: list[int] = []
        for part, arrays in zip(offer.parts, edition.parts, strict=True):
            imports += _take_part(user, part, arrays, edition)
        # A run between the arrays of one offer would wait for those that come behind it.
        for array in imports:
            if user.random.random() < 0.3 and user.may_run:
                _move(user, array, user.arrays[array])
        return
    part = missing[0]
    request = msg.AllocateSlice(user._id(), part.devices, None, None, None, like=part.slice)

    def bound(answer: msg.SliceBound | None, error: BaseException | None) -> None:
        if answer is not None:
            user.slices[answer.slice] = answer
            user.likes[part.slice] = answer.slice
            if user.may_take:
                _take(user, offer, edition)
        elif not isinstance(error, InsufficientDevices):  # the version is gone, or its hosts are
            user._cut_off(error)

    user._post(Allocate(request, user._promise("allocate for a name", bound)))


def _take_part(user: User, part: msg.SharedPart, arrays: list[int], edition: Edition) -> list[int]:
    """Take the arrays of one slice; return their numbers."""
    imports = []
    own, together = user.likes[part.slice], [one for group in edition.parts for one in group]
    for index, array in enumerate(arrays):
        imported, spec = user._id(), edition.specs[array]
        spec = msgspec.structs.replace(spec, placement=Placement(own, spec.placement.devices))
        user.oracle.take(imported, spec, edition.oracle, array, together)
        user.arrays[imported] = spec
        user.cluster.deals[imported] = edition.deal
        source = msg.OfferSource(part.token, index)
        user._post(Tell(msg.CreateArray(imported, spec, source=source)))
        user.world.checked["looked up"] += 1
        imports.append(imported)
    return imports


def _move(user: User, array: int, spec: ArraySpec) -> None:
    """Move an array to as many devices of another slice of the user."""
    count = len(spec.placement.devices)
    fitting = [
        number
        for number, bound in user.slices.items()
        if number != spec.placement.slice and len(bound.devices) >= count
    ]
    if not fitting:
        return
    number = user._id()
    there = Placement(user.random.choice(fitting), tuple(range(count)))
    moved = msgspec.structs.replace(spec, placement=there)
    body = Program(
        f"{user.name}/{number & 0xFFFF}", (), (), (spec,), (Output(ValueRef(-1, 0), moved),)
    )
    draft = ProgramDraft(body, (), {})
    user._add_program(number, draft)
    user.launch(number, draft, (array,))
    del user.programs[number]
    user._post(Tell(msg.ReleaseProgram(number)))


def _unpublish(user: User) -> None:
    name = user.random.choice(NAMES)
    published = [edition for edition in _own(user, name) if not edition.is_open]

    def answered(answer: Any, error: BaseException | None) -> None:
        if error is None:
            for edition in published:
                edition.end = user.cluster.starts
            for kept in user.session.link.journal.publications.values():
                if user.cluster.editions.by_tree[kept.tree] in published:
                    words = f"{user.name} would publish {name!r} again, which it has ended"
                    raise Violation("names", words)
        is_right = error is None or isinstance(error, NameNotFound)
        if not is_right and user.session.closed is None:
            raise Violation("names", f"{user.name} cannot end {name!r}: {error!r}")

    promise = user._promise(f"unpublish {name}", answered)
    user._post(Ask(lambda number: msg.Unpublish(number, name), promise))
