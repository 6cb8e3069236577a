"""How far launches run ahead of what has ended: enough to keep devices busy, no further than others may wait.

What has been launched has its turn before all that comes later, whoever that belongs to. So launches that have
not ended are counted, with the time that they are expected to take, where they run: on each device, and on the
host where what is launched computes nothing on a device (a Python function, or only transfers). A segment may
be launched when there is room everywhere it runs; what is full elsewhere does not hold it up.

A gang's devices are many, and nearly always used together. They are counted once, as one part, until something
runs on some of them only; then the part is divided, and both halves have what the whole had. So a launch costs
a step for each part, however many devices there are. Now and then parts are made anew of what is still in use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from pw.core.messages import InstallProgram
from pw.core.plan import Execute
from pw.sched.island.policy import Account

SEGMENTS = 256
"""Launched segments that have not ended, when one client has the island to itself."""
TIME_US = 50_000.0
"""The time that they are expected to take: how long a second client may have to wait."""
CONTENDED_TIME_US = 5_000.0
"""The same, when several clients want the island: a longer one leaves the policy less to decide."""
CONTENDED_SEGMENTS = 32
FEW = 16
"""Footprints after which it is not worth to look whether parts can be joined again."""


@dataclass(slots=True, eq=False)
class Part:
    """Places that have all been used together so far, and what is under way on each of them."""

    size: int
    launched: int = 0
    time_us: float = 0.0
    turn_s: float = 0.0
    """Since when it has been the turn of what was launched first there and has not ended."""
    account: Account = field(default_factory=Account)
    """How the time of each of them was shared until now."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Footprint:
    """Where something runs."""

    places: frozenset[Hashable]
    parts: list[Part]

    @property
    def accounts(self) -> list[Account]:
        """Of all these places."""
        return [part.account for part in self.parts]


class Window:
    """What is under way on one island."""

    def __init__(self) -> None:
        self._part_of: dict[Hashable, Part] = {}
        self._footprints: WeakValueDictionary[frozenset[Hashable], Footprint]
        self._footprints = WeakValueDictionary()
        self._made = 0
        """How many footprints were made since parts were."""

    def footprint(self, places: Iterable[Hashable]) -> Footprint:
        """The one footprint of these places."""
        wanted = frozenset(places)
        known = self._footprints.get(wanted)
        if known is None:
            if self._made > 2 * len(self._footprints) + FEW:
                self.tidy()
            self._made += 1
            known = self._footprints[wanted] = Footprint(wanted, self._divide(wanted))
        return known

    def tidy(self) -> None:
        """Forget the places where nothing runs any more, and which of the others were ever apart."""
        before, self._part_of, self._made = self._part_of, {}, 0
        users: defaultdict[Hashable, list[Footprint]] = defaultdict(list)
        for footprint in self._footprints.values():
            footprint.parts.clear()
            for place in footprint.places:
                users[place].append(footprint)
        parts: dict[tuple[Footprint, ...], Part] = {}
        joined: dict[Part, set[Part]] = {}
        for place, using in users.items():
            old, part = before[place], parts.get(tuple(using))
            if part is None:
                # Whatever is under way at one of these places is so at all of them.
                part = parts[tuple(using)] = replace(old, size=0, account=old.account.copy())
                joined[part] = {old}
                for footprint in using:
                    footprint.parts.append(part)
            elif old not in joined[part]:
                joined[part].add(old)
                part.account.join(old.account)
            part.size += 1
            self._part_of[place] = part

    def _divide(self, wanted: frozenset[Hashable]) -> list[Part]:
        """The parts that the wanted places are, divided where they are in one with others."""
        inside = Counter(self._part_of.get(place) for place in wanted)
        becomes: dict[Part | None, Part] = {}
        for part, count in inside.items():
            if part is None:
                becomes[None] = Part(count)
            elif count == part.size:
                becomes[part] = part
            else:
                becomes[part] = half = replace(part, size=count, account=part.account.copy())
                part.size -= count
                for footprint in self._footprints.values():
                    if part in footprint.parts:
                        footprint.parts.append(half)
        for place in wanted:
            self._part_of[place] = becomes[self._part_of.get(place)]
        return list(becomes.values())

    def accounts(self) -> list[Account]:
        """Of all places."""
        return [part.account for part in dict.fromkeys(self._part_of.values())]

    def is_open(self, footprint: Footprint, contended: bool) -> bool:
        """Whether there is room for one more launch; `contended` if several clients want the island."""
        segments, time_us = SEGMENTS, TIME_US
        if contended:
            segments, time_us = CONTENDED_SEGMENTS, CONTENDED_TIME_US
        for part in footprint.parts:
            if part.launched >= 2 and (part.launched >= segments or part.time_us >= time_us):
                return False
        return True

    def launched(self, footprint: Footprint, time_us: float, now_s: float) -> None:
        """Something has been launched that is expected to take so long."""
        for part in footprint.parts:
            if not part.launched:
                part.turn_s = now_s
            part.launched += 1
            part.time_us += time_us

    def ended(self, footprint: Footprint, time_us: float, now_s: float) -> None:
        """It has ended; `time_us` is what was expected when it was launched."""
        for part in footprint.parts:
            part.turn_s = now_s
            part.launched -= 1
            part.time_us -= time_us


def places_of(message: InstallProgram) -> dict[int, frozenset[Hashable]]:
    """Where each segment of a program runs on this island."""
    bindings = {binding.slice: binding for plan in message.plans for binding in plan.bindings}
    computations: dict[int, set[int]] = {}
    hosts: dict[int, set[str]] = {}
    for plan in message.plans:
        for part in plan.segments:
            here = (one.computation for one in part.instructions if isinstance(one, Execute))
            computations.setdefault(part.segment, set()).update(here)
            hosts.setdefault(part.segment, set()).add(plan.host)
    places: dict[int, frozenset[Hashable]] = {}
    for segment, numbers in computations.items():
        found: set[Hashable] = set()
        for number in numbers:
            computation = message.body.computations[number]
            placement = computation.placement
            devices = bindings[placement.slice].located(placement)
            found.update(d.host for d in devices) if computation.python else found.update(devices)
        places[segment] = frozenset(found or hosts[segment])
    return places
