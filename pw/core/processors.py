"""How many processors this process has."""

from __future__ import annotations

import os


def processors() -> int:
    """Return how many processors the system gives this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
