"""Sizes in bytes: from words, and in words."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that a text such as `4GiB`, `512 MB` or `1000000` means.

    Raises:
        ValueError: it is no size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get((match[2] or "b").lower()) if match else None
    size_bytes = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if size_bytes < 1:
        raise ValueError(f"{text!r} is no size; write it as 4GiB, 512MiB or a number of bytes")
    return size_bytes


def size_in_words(size_bytes: int) -> str:
    """Return a size as people write it, as in `1.50 GiB`."""
    for unit, one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size_bytes) >= one:
            return f"{size_bytes / one:.2f} {unit}"
    return f"{size_bytes} B"
