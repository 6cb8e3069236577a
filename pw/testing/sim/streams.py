"""Named streams of random numbers, all from one seed.

Each link, host and client draws from a stream of its own, so one more actor or draw does not change
the numbers of the others.
"""

from __future__ import annotations

from random import Random


class Streams:
    """Gives out one generator for each name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, Random] = {}

    def __call__(self, name: str) -> Random:
        """The stream called `name`; seeded by text, so the same in every process."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = Random(f"{self.seed}/{name}")
        return stream
