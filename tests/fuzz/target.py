"""What a fuzz target is."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

Run = Callable[[bytes], None]
"""Takes one input. Raises the target's allowed errors, or the input is a failure."""


@dataclass(frozen=True)
class Target:
    """One decoder, or a component behind one.

    Args:
        name: of the target, and of its folder of seeds.
        seeds: returns valid inputs: `run` raises nothing for them.
        run: takes one input; or `opened` is given, and gives such a function for many inputs.
        allowed: the errors that the decoder promises for bytes that are not valid.
        weight: its part of all inputs, roughly in proportion to its speed.
        mutate: changes a seed in a way of its own; by default bytes are changed.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    run: Run | None = None
    opened: Callable[[], AbstractContextManager[Run]] | None = None
    allowed: tuple[type[BaseException], ...] = ()
    weight: float = 1.0
    mutate: Callable[[random.Random, list[bytes]], Callable[[], bytes]] | None = None

    def open(self) -> AbstractContextManager[Run]:
        """Return the function that takes inputs, for the time of the context."""
        if self.opened is not None:
            return self.opened()
        assert self.run is not None
        return nullcontext(self.run)
