"""How often something is tried again, and after which pause.

A run is run again, and an array is brought again, while hosts are lost on the way. Tries that
follow each other closely count as one attempt, because a network may need a while to heal. After
`ATTEMPTS` attempts the thing is given up. When the last attempt is long ago, counting begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ATTEMPTS = 16
"""Attempts at one run or one array, before it is given up."""
ANEW_S = 60.0
"""After so long without an attempt, counting begins anew."""
ATTEMPT_S = 4.0
"""Tries within this time are one attempt."""
AGAIN_S = 0.02
"""The first pause before another try."""
DOUBLINGS = 7
"""How often the pause is doubled, once for each try."""


def pause_s(tries: int) -> float:
    """Return the pause before the next try, in seconds."""
    return AGAIN_S * (1 << min(tries, DOUBLINGS))


@dataclass(slots=True, kw_only=True, eq=False)
class Attempts:
    """Counts the tries at one thing."""

    tries: int = 0
    attempts: int = 0
    attempted_s: float = -math.inf
    """When the last attempt began."""

    def count(self, now_s: float) -> None:
        """Count one more try."""
        since_s = now_s - self.attempted_s
        if since_s >= ANEW_S:
            self.tries = self.attempts = 0
        self.tries += 1
        if since_s >= ATTEMPT_S:
            self.attempts += 1
            self.attempted_s = now_s

    def in_vain(self, now_s: float) -> bool:
        """Return whether it was attempted so often that it is given up."""
        return self.attempts >= ATTEMPTS and now_s - self.attempted_s < ANEW_S
