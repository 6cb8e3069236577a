"""The nearest right name to a wrong one, for errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHORTEST_PART = 3
"""Number of characters that a part of a name has at least, to stand for the name."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is meant by `word`: spelt nearly so, or with it as a part; None if none is."""
    names = list(names)
    if close := difflib.get_close_matches(word, names, n=1, cutoff=0.75):
        return close[0]
    if len(word) < SHORTEST_PART:
        return None
    parts = [name for name in names if name.startswith(word)]
    return next((name for name in [*parts, *names] if word in name or name in word), None)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that names the nearest one, or all if none is near."""
    names = list(names)
    near = nearest(word, names)
    return f"did you mean {near}?" if near else f"there are {', '.join(names)}"
