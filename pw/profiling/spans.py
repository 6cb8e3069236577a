"""Arithmetic of spans of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Span = tuple[float, float]
"""Start and end, in seconds."""


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the moments that some span covers, as spans in order that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def common(some: list[Span], others: list[Span]) -> Iterator[Span]:
    """Yield the moments that both lists cover; each list is as `joined` returns it."""
    a = b = 0
    while a < len(some) and b < len(others):
        start, end = max(some[a][0], others[b][0]), min(some[a][1], others[b][1])
        if start < end:
            yield start, end
        if some[a][1] < others[b][1]:
            a += 1
        else:
            b += 1


def length_s(spans: Iterable[Span]) -> float:
    """Return the length of all spans together."""
    return sum(end - start for start, end in spans)
