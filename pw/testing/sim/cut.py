"""Programs as `pw.islands` cuts them: pieces on each slice, and between them what crosses islands.

All slices run the same pieces, one after the other. Between two pieces of a slice

- a bucket is *reduced in parts*: slice i adds part i of all slices, in their order, and all take the sums. The
  additions of a bucket come after the next piece, so that they do not hold it up;
- a small bucket is reduced as one part, which each slice adds for itself;
- values are *exchanged*: each slice takes one value of every slice, or the one that each has for it, or that
  of one other slice. That may be what the other slice carries, as it is.

Such steps also form the body of a loop, which is unrolled: the same computations in each iteration. All but
the first take over the buffers of what is carried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.programs import Drafting, ProgramDraft, SimSlice

ADDS = "/adds"
"""Part of the names of computations that add the parts of all slices."""
TAKES = "/takes"
"""Part of the names of pieces that take values of other slices."""
AGAIN = "/again"
"""Part of the names of pieces that take over the buffers of what they carry."""

Given = list[list[ValueRef]]
"""Values by slice."""


def cut_function(random: Random, slices: Sequence[SimSlice], name: str) -> ProgramDraft:
    """Return a program over slices that takes and gives one array on each.

    Args:
        random: the source of chance.
        slices: one of each of several islands.
        name: names its client, and makes its results differ from those of other programs.
    """
    width = random.choice([n for n in (1, 2, 4) if n <= min(part.size for part in slices)])
    cut = _CutDraft(name, random, slices, width, random.choice((16, 64, 4096)))
    donated = tuple(range(len(slices))) if random.random() < 0.4 else ()
    carried = [ValueRef(-1, at) for at in cut.islands]
    is_free = bool(donated)
    for number in range(random.choice((1, 1, 2))):
        if random.random() < 0.5:
            step = cut.random_step(f"/{number}")
            carried = step(carried, is_free)
        else:
            carried = cut.loop(f"/{number}", carried, is_free)
        is_free = False
    outputs = [Output(own, cut.states[at]) for at, own in enumerate(carried)]
    return cut.draft(cut.states, outputs, donated)


Step = Callable[[list[ValueRef], bool], list[ValueRef]]
"""Function that adds the pieces of a step; takes what each slice carries, and whether its buffers can be taken
over."""


class _CutDraft(Drafting):
    def __init__(
        self, name: str, random: Random, slices: Sequence[SimSlice], width: int, length: int
    ) -> None:
        super().__init__(name)
        self._random = random
        self.islands = range(len(slices))
        places = [Placement(part.number, tuple(range(width))) for part in slices]

        def spec(place: Placement, split: bool) -> ArraySpec:
            how = Sharding(("x",), (width,), (("x",),) * split)
            return ArraySpec((length,), "uint8", how, place)

        self.states = [spec(place, False) for place in places]
        self._wires = [spec(place, random.random() < 0.8) for place in places]
        self._numbers: dict[tuple[str, int], int] = {}
        """Number of each computation, by its name and slice."""

    def random_step(self, what: str) -> Step:
        """Choose a step; it may be called again."""
        random, count = self._random, len(self.islands)
        kind = random.choice(("parts", "parts", "small", "gather", "to all", "permute", "carried"))
        buckets = random.choice((1, 2, 3))
        shift = random.randrange(1, count)
        if kind == "parts":
            return lambda carried, free: self._reduced(what, carried, free, buckets)
        if kind == "small":
            return lambda carried, free: self._reduced_alike(what, carried, free)
        if kind == "gather":
            needs = [[(0, source) for source in self.islands] for _ in self.islands]
        elif kind == "to all":
            needs = [[(at, source) for source in self.islands] for at in self.islands]
        else:
            needs = [[(0, (at + shift) % count)] for at in self.islands]
            if random.random() < 0.3:
                needs[0] = []  # it takes nothing
        return lambda carried, free: self._exchanged(what, carried, free, needs, kind == "carried")

    def loop(self, what: str, carried: list[ValueRef], free: bool) -> list[ValueRef]:
        """Add iterations of one or two steps."""
        body = [self.random_step(f"{what}.{at}") for at in range(self._random.choice((1, 1, 2)))]
        for iteration in range(self._random.choice((2, 3, 5))):
            for at, step in enumerate(body):
                carried = step(carried, (free or bool(iteration)) and not at)
        return carried

    # --- steps ------------------------------------------------------------------------------------

    def _reduced(
        self, what: str, carried: list[ValueRef], free: bool, buckets: int
    ) -> list[ValueRef]:
        inner, filled, sums = carried, list[Given](), list[Given]()

        def add(number: int) -> None:
            parts = [[results[at] for results in filled[number]] for at in self.islands]
            added = self._adders(f"{what}{ADDS}{number}", parts)
            sums.append(added)

        for number in range(buckets):
            results = self._pieces(f"{what}/fills{number}", inner, [[] for _ in inner], len(inner))
            inner = [own[0] for own in results]
            filled.append([own[1:] for own in results])
            if number:
                add(number - 1)
        add(buckets - 1)
        arrived = [[one for added in sums for (one,) in added]] * len(inner)
        return self._last_pieces(what, carried, inner, arrived, free)

    def _reduced_alike(self, what: str, carried: list[ValueRef], free: bool) -> list[ValueRef]:
        results = self._pieces(f"{what}/fills", carried, [[] for _ in carried], 1)
        added = self._adders(f"{what}{ADDS}", [[own[1] for own in results]] * len(results))
        return self._last_pieces(what, carried, [own[0] for own in results], added, free)

    def _exchanged(
        self,
        what: str,
        carried: list[ValueRef],
        free: bool,
        needs: list[list[tuple[int, int]]],
        as_it_is: bool,
    ) -> list[ValueRef]:
        if as_it_is:
            arrived = [[carried[source] for _, source in own] for own in needs]
            return self._last_pieces(what, carried, carried, arrived, False)
        wires = 1 + max((wire for own in needs for wire, _ in own), default=0)
        results = self._pieces(f"{what}/sends", carried, [[] for _ in carried], wires)
        arrived = [[results[source][1 + wire] for wire, source in own] for own in needs]
        return self._last_pieces(what, carried, [own[0] for own in results], arrived, free)

    # --- computations -----------------------------------------------------------------------------

    def _pieces(self, what: str, carried: list[ValueRef], arrived: Given, wires: int) -> Given:
        """Add a piece that makes another state, and wires."""
        return [
            self._call(
                what,
                at,
                [self.states[at], *([self._wires[at]] * len(arrived[at]))],
                [self.states[at], *([self._wires[at]] * wires)],
                [own, *arrived[at]],
            )
            for at, own in enumerate(carried)
        ]

    def _adders(self, what: str, parts: Given) -> Given:
        return [
            self._call(what, at, [self._wires[at]] * len(own), [self._wires[at]], own)
            for at, own in enumerate(parts)
        ]

    def _last_pieces(
        self, what: str, carried: list[ValueRef], inner: list[ValueRef], arrived: Given, free: bool
    ) -> list[ValueRef]:
        """Add the piece behind an exchange, which ends the step."""
        results = []
        for at, own in enumerate(carried):
            extra = [] if inner[at] == own else [inner[at]]
            state = self.states[at]
            (result,) = self._call(
                f"{what}{TAKES}{len(arrived[at])}{AGAIN if free else ''}",
                at,
                [state] * (1 + len(extra)) + [self._wires[at]] * len(arrived[at]),
                [state],
                [own, *extra, *arrived[at]],
                (0,) if free else (),
            )
            results.append(result)
        return results

    def _call(
        self,
        what: str,
        at: int,
        takes: Sequence[ArraySpec],
        makes: Sequence[ArraySpec],
        args: Sequence[ValueRef],
        donated: tuple[int, ...] = (),
    ) -> list[ValueRef]:
        """Add a call of a computation on a slice; its code is the same on all slices."""
        number = self._numbers.get((what, at))
        if number is not None:
            return self.call(number, args)
        self._numbers[what, at] = len(self.computations)
        return self.compute(f"{self.name}{what}", takes, makes, args, donated=donated)
