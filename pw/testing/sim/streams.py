"""Named streams of random numbers, all from one seed.

Everything that may vary draws from a stream named after what varies (a link, a host, a client), so that
one more actor, or one more draw by another, shifts nobody else's numbers.
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
