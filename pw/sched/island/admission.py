"""Which runs may take memory on an island, and when (DESIGN G5).

Theory of operation. A run is admitted before its first segment is launched: its peak is reserved beside
what live arrays and admitted runs hold. From then on it never waits for memory. A run that is chosen and
does not fit waits, and others that fit may pass it, but only `PATIENCE` times: after that nobody else is
admitted before it, so the island drains until it fits. Three ends are possible: it fits; it could not
have the island to itself, and is refused at once; or nothing is in flight on the island any more that
could free memory, and it is refused with the names of those who hold it. (A run that is alone on the
island, arrays included, either fits or never will.) An upload under way is in flight, too: its array may
have been deleted meanwhile, and what waits for it may free others. But one that begins later is not, or
somebody who uploads all the time could keep a run from its end. A refused run stays at the head of its
client's queue until the controller cancels it, so that later runs that need its results cannot slip by.

Runs on several islands. If a run were launched on one island while it waits for memory on another, two
runs could each hold what the other waits for. So such a run is admitted on all of its islands before it
is launched on any, in two rounds. First, each island tells the run's first island (by name) when the run
is at the head of its client's queue there, and all its uploads have come. Then the islands reserve one
after the other, in the order of their names; the last tells all that the run is admitted. An island
whose memory has no limit takes part, too, and lets everything pass.

Why no circle of waiting can come of it. Whoever holds memory is at the head of its client's queue on
each of its islands, so it never waits for another run of its client. Suppose some run waits for memory
and nothing ever changes, and let I be the island with the greatest name on which any run waits for
memory. Those who hold memory on I hold it for live arrays, or are runs. Such a run is either admitted
everywhere, or waits for memory on an island with a greater name, which was excluded. A run that is
admitted everywhere and at the head of its queues waits for nothing but the launches of its own producers,
which do not form a circle (`pw.core.segments`), and for the window, which opens because launched work
waits only for work launched before it (G4). So it ends. Hence in time no run holds memory on I, and
then the run that waits there fits or is refused. Passing, and not being allowed to pass, change only
which of those who wait on the same island goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core.actor import Env
from pw.core.errors import ErrorReport, OutOfDeviceMemory
from pw.core.ids import CONTROL, client_of, scheduler_of
from pw.core.messages import ReserveRun, RunAdmitted, RunAtHead, RunRefused, Submit
from pw.sched.island.memory import Claim, DeviceMemory

PATIENCE = 32
"""How many admissions may pass a run that does not fit."""


@dataclass(slots=True, eq=False)
class Request:
    """One run's way to admission on this island."""

    run: int
    program: int
    args: tuple[int | bytes, ...]
    results: tuple[int, ...]
    islands: tuple[str, ...]
    segments_left: int
    """Segments of the run here that have not ended."""
    heads_missing: int
    """On the first island: islands on which the run is not at the head of its queue."""
    has_told: bool = False
    """This island has said that the run is at the head of its queue."""
    has_turn: bool = False
    is_admitted: bool = False
    was_launched: bool = False
    claim: Claim | None = None
    passed: int = 0
    """How many runs were admitted while this one waited for memory."""
    tried_at: int = -1
    """`DeviceMemory.frees` when it was found not to fit."""
    hopes: frozenset[int] | None = None
    """Arrays that were on their way when first nothing else could make room."""


class Admission:
    """Admits runs to the memory of one island."""

    def __init__(self, env: Env, island: str) -> None:
        self._env = env
        self._island = island
        self.memory: DeviceMemory | None = None
        """None where nothing limits it."""
        self._blocked: dict[int, Request] = {}
        """Runs that were chosen and did not fit, the oldest first."""
        self._refused: set[int] = set()
        """Runs that the controller has been asked to cancel."""

    def reset(self, capacity_bytes: int | None) -> None:
        """Start anew, with nothing held."""
        unlimited = capacity_bytes is None
        self.memory = None if unlimited else DeviceMemory(self._island, capacity_bytes or 0)
        self._blocked.clear()
        self._refused.clear()

    def request(self, submit: Submit) -> Request | None:
        """A run's request; None if memory limits it nowhere."""
        if self.memory is None and not submit.islands:
            return None
        return Request(
            submit.run,
            submit.program,
            submit.args,
            submit.results,
            submit.islands,
            len(submit.segments),
            len(submit.islands),
        )

    def may_be_chosen(self, request: Request) -> bool:
        """Whether the policy may choose this run, which is at the head of its queue.

        A run on several islands may only when it has been admitted on all.
        """
        if not request.islands:
            return request.run not in self._refused
        if not request.has_told:
            request.has_told = True
            first = request.islands[0]
            if first == self._island:
                self.is_at_head(request)
            else:
                self._env.send(scheduler_of(first), RunAtHead(request.run))
        return request.is_admitted or (request.has_turn and self.admit(request))

    def is_at_head(self, request: Request) -> None:
        """The run is next of its client on one more island."""
        request.heads_missing -= 1
        request.has_turn = not request.heads_missing

    def admit(self, request: Request) -> bool:
        """Reserve a run's memory if it fits now; True when the run may be launched."""
        if self.memory is not None and not self._reserve(self.memory, request):
            return False
        request.has_turn = False
        place = request.islands.index(self._island) if request.islands else -1
        request.is_admitted = place == len(request.islands) - 1
        if not request.is_admitted:
            self._env.send(scheduler_of(request.islands[place + 1]), ReserveRun(request.run))
            return False
        for island in request.islands[:-1]:
            self._env.send(scheduler_of(island), RunAdmitted(request.run))
        return True

    def _overdue(self) -> Request | None:
        for request in self._blocked.values():
            if request.passed >= PATIENCE:
                return request
        return None

    def _reserve(self, memory: DeviceMemory, request: Request) -> bool:
        if request.run in self._refused or request.tried_at == memory.frees:
            return False
        overdue = self._overdue() if self._blocked else None
        if overdue is not None and overdue is not request:
            return False
        request.claim = memory.reserve(request.program, request.args, request.results)
        if request.claim is None:
            request.tried_at = memory.frees
            error = memory.never_fits(request.program, request.args)
            if error is not None:
                self._refuse(request, error)
            else:
                self._blocked.setdefault(request.run, request)
            return False
        self._blocked.pop(request.run, None)
        for other in self._blocked.values():
            other.passed += 1
        return True

    def refuse_if_stuck(self) -> None:
        """Nothing can be launched: if nothing in flight can free memory either, a run must fail.

        One at a time, because what its client then drops may be what others wait for.
        """
        memory = self.memory
        if memory is None or not self._blocked or self._refused or memory.claims:
            return
        request = self._overdue() or next(iter(self._blocked.values()))
        if request.hopes is None:
            request.hopes = frozenset(memory.arriving)
        if not memory.arriving.isdisjoint(request.hopes):
            return
        client = client_of(request.run)
        self._refuse(request, memory.no_room(request.program, request.args, client))

    def _refuse(self, request: Request, error: OutOfDeviceMemory) -> None:
        self._blocked.pop(request.run, None)
        self._refused.add(request.run)
        self._env.count("runs_refused")
        self._env.send(CONTROL, RunRefused(request.run, ErrorReport.of(error)))

    def segments_ended(self, request: Request, count: int = 1) -> None:
        """So many segments of an admitted run have ended here, or never will be launched."""
        request.segments_left -= count
        if request.segments_left or self.memory is None or request.claim is None:
            return
        claim, request.claim = request.claim, None
        if request.was_launched:
            self.memory.end(claim)
        else:
            self.memory.withdraw(claim)

    def give_up(self, request: Request, segments: int) -> None:
        """These segments, the last ones of a run, have been cancelled before they were launched."""
        self._blocked.pop(request.run, None)
        self._refused.discard(request.run)
        self.segments_ended(request, segments)
