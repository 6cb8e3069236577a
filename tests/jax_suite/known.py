"""Reasons in words, for failures whose cause is known."""

from __future__ import annotations

import re

CAUSES = (
    (
        r"PjRt-compatible backend only.* \[pxla.py",
        "jaxlib's client of the remote protocol cannot analyse costs before compiling",
    ),
    (
        r"PjRt-compatible backend only",
        "the array's memory is in another process: it has no address here",
    ),
    (
        r"Only local arrays are supported",
        "the array's memory is in another process: no buffer protocol, no DLPack",
    ),
)


def cause(reason: str) -> str:
    """Return the cause of a failure if it is known, else the reason itself."""
    return next((words for pattern, words in CAUSES if re.search(pattern, reason)), reason)
