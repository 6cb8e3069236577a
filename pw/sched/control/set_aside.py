"""The part of a client's stream that waits for islands that are away, while the rest goes on.

Theory of operation. A message that needs a slice whose island is away, or an array that was lost, is *set
aside*. A later message passes it if it needs nothing that it will make, and takes nothing away that
it reads: then no value depends on their order. Nor does it take away what lost arrays will be made of
again. What has effects keeps its order with all that has.
When an island is back or given up, or arrays are made again, all that was set aside returns to the front
of the stream, in its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.ids import arrays_in
from pw.sched.control.array_states import ArrayTable
from pw.sched.control.lineage import Lineage
from pw.sched.control.programs import RegisteredProgram

Ordered = (
    msg.Run
    | msg.Delete
    | msg.CreateArray
    | msg.Offer
    | msg.ReleaseProgram
    | msg.ReleaseSlice
    | msg.Checkpoint
    | msg.SaveArrays
    | msg.Publish
    | msg.Lookup
    | msg.Unpublish
    | msg.Inquire
)
"""Messages that the controller handles in the client's order."""


@dataclass(slots=True)
class Away:
    """What a client is without while islands are away."""

    slices: Set[int]
    """Numbers of the slices that are expected back."""
    arrays: ArrayTable
    lineage: Lineage
    programs: Mapping[int, RegisteredProgram]
    last_run: int
    """Number of the newest run that has come: what has a lower one, and was not passed, comes again."""

    @property
    def state(self) -> tuple[frozenset[int], int]:
        """The slices that are away, and how often lost arrays changed: while it stays, so does what can pass.

        The second one only grows, so what was set aside between two changes is looked at too.
        """
        return frozenset(self.slices), self.arrays.changes


@dataclass(slots=True, eq=False)
class SetAside:
    """Messages of one client that wait for islands that are away."""

    messages: list[Ordered] = field(default_factory=list)
    overtaken: set[int] = field(default_factory=set)
    """Numbers of runs that later ones have passed, or may have."""
    _since: tuple[frozenset[int], int] | None = None
    """State of what is away in which the first message was set aside."""
    _needed: Set[int] = frozenset()
    """Numbers of the arrays of which lost ones are made again."""
    _needed_in: tuple[frozenset[int], int] | None = None
    """State of what is away for which these were found."""
    results: set[int] = field(default_factory=set)
    """Numbers of arrays that the messages will make."""
    arguments: set[int] = field(default_factory=set)
    """Numbers of arrays that the messages need."""
    _programs: set[int] = field(default_factory=set)
    _leases: set[int] = field(default_factory=set)
    _has_effects: bool = False
    _publishes: bool = False
    """True if one of the messages publishes: lookups and later publications wait for it."""

    def sift(self, message: Ordered, away: Away) -> Ordered | None:
        """Return what of a message can go on now; the rest is set aside."""
        state = away.state
        if not self.messages:
            self._since = state
        if self._needed_in != state:
            self._needed_in = state
            self._needed = away.lineage.sources(away.arrays.lost, away.arrays.is_good)
        if isinstance(message, msg.Delete):
            now: list[int] = []
            later: list[int] = []
            for array in message.arrays:
                must_wait = array in away.arrays.lost or self._is_kept(array)
                (later if must_wait else now).append(array)
            if not later:
                return message
            self.add(msg.Delete(tuple(later)), away)
            return replace(message, arrays=tuple(now)) if now else None
        if self._can_pass(message, away):
            return message
        self.add(message, away)
        return None

    def _is_kept(self, array: int) -> bool:
        """Whether an array must not go, because something that waits needs or makes it."""
        return array in self._needed or array in self.arguments or array in self.results

    def _can_pass(self, message: Ordered, away: Away) -> bool:
        lost = away.arrays.lost.keys()
        if isinstance(message, msg.Run):
            program = away.programs.get(message.program)
            if program is None:
                return True  # it is refused
            args = arrays_in(message.args)
            return (
                program.slices.isdisjoint(away.slices)
                and lost.isdisjoint(args)
                and self.results.isdisjoint(args)
                and not any(map(self._is_kept, program.donated(message.args)))
                and message.lease not in self._leases
                and (program.body.is_repeatable or not self._has_effects)
            )
        if isinstance(message, msg.CreateArray):
            return message.spec.placement.slice not in away.slices
        if isinstance(message, msg.ReleaseProgram):
            program = away.programs.get(message.program)
            is_there = program is None or program.slices.isdisjoint(away.slices)
            return is_there and message.program not in self._programs
        if isinstance(message, msg.Publish):
            arrays = [array for offer in message.offers for array in offer.arrays]
            slices = {spec.placement.slice for offer in message.offers for spec in offer.specs}
            return (
                not self._publishes
                and slices.isdisjoint(away.slices)
                and all(map(away.arrays.is_good, arrays))
            )
        if isinstance(message, (msg.Lookup, msg.Unpublish)):
            return not self._publishes
        if isinstance(message, msg.Inquire) and not away.slices.isdisjoint(message.slices):
            return False
        if isinstance(message, (msg.Checkpoint, msg.SaveArrays, msg.Inquire)):
            # Of what the client does not hold any more, a host that is away may know.
            return all(one in away.arrays and one not in lost for one in message.arrays)
        return False

    def add(self, message: Ordered, away: Away) -> None:
        """Set a message aside."""
        self.messages.append(message)
        if isinstance(message, msg.Run):
            program = away.programs.get(message.program)
            self._note(message.run, away)
            self.results.update(message.results)
            self.arguments.update(arrays_in(message.args))
            self._programs.add(message.program)
            if message.lease:
                self._leases.add(message.lease)
            self._has_effects |= program is not None and not program.body.is_repeatable
        elif isinstance(message, msg.CreateArray):
            self.results.add(message.array)
        elif isinstance(message, (msg.Offer, msg.Publish)):
            self._publishes |= isinstance(message, msg.Publish)
            for offer in (message,) if isinstance(message, msg.Offer) else message.offers:
                self._note(offer.run, away)
                self.arguments.update(offer.arrays)
        elif isinstance(message, (msg.Delete, msg.Checkpoint, msg.SaveArrays, msg.Inquire)):
            self.arguments.update(message.arrays)

    def _note(self, run: int, away: Away) -> None:
        if run > away.last_run:
            self.overtaken.add(run)

    def may_go_on(self, away: Away | None) -> bool:
        """Whether to look again at what was set aside: other slices are away, or other arrays are lost."""
        return bool(self.messages) and (away is None or self._since != away.state)

    def take(self) -> list[Ordered]:
        """Take all messages out, in their order."""
        messages = self.messages
        self.messages = []
        for numbers in (self.results, self.arguments, self._programs, self._leases):
            numbers.clear()
        self._has_effects = self._publishes = False
        self._needed_in = None
        return messages


class Stream:
    """The messages of one client that wait."""

    __slots__ = ("aside", "backlog")

    def __init__(self) -> None:
        self.backlog: deque[Ordered] = deque()
        """Messages that wait for what the first of them needs (`pw.sched.control.client_order`)."""
        self.aside = SetAside()

    def __len__(self) -> int:
        return len(self.aside.messages) + len(self.backlog)

    def __iter__(self) -> Iterator[Ordered]:
        yield from self.aside.messages
        yield from self.backlog

    def replace(self, messages: Iterable[Ordered]) -> None:
        """Have these messages wait in place of all that do."""
        messages = list(messages)
        self.aside.take()
        self.backlog.clear()
        self.backlog.extend(messages)

    def will_make(self, array: int) -> bool:
        """Whether a run that waits makes an array."""
        return any(isinstance(one, msg.Run) and array in one.results for one in self)
