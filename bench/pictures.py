"""Charts of timelines: what devices do, and what comes to their hosts from others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.measure import GaveUp
from bench.report import Span
from pw.operating.timeline.timeline import Computation, Timeline


def window(spans: Sequence[Span], first_s: float, last_s: float) -> list[Span]:
    """Return the spans between two moments, the first of which becomes 0. Raises GaveUp if there is none."""
    shown = [
        span.between(first_s, last_s).moved(-first_s)
        for span in spans
        if first_s < span.end_s and span.start_s < last_s
    ]
    if not shown:
        raise GaveUp("the timeline shows no computations")
    return shown


def middle(spans: Sequence[Span], length_s: float) -> list[Span]:
    """Return the spans in the middle of the time that they take. Raises GaveUp if there is none."""
    if not spans:
        raise GaveUp("the timeline shows no computations")
    middle_s = (min(span.start_s for span in spans) + max(span.end_s for span in spans)) / 2
    return window(spans, middle_s - length_s / 2, middle_s + length_s / 2)


def of_hosts(timeline: Timeline, kind: Callable[[Computation], str]) -> list[Span]:
    """Return two rows for each host: its computations, of a kind each, and what other hosts send to it."""
    hosts = sorted({one.host for one in timeline.computations})
    computing = [Span(one.host, kind(one), one.start_s, one.end_s) for one in timeline.computations]
    coming = [
        Span(f"to {one.host}", "transfer", one.start_s, one.end_s)
        for one in timeline.transfers
        if one.kind == "edge" and one.is_incoming and one.host in hosts
    ]
    order = [row for host in hosts for row in (host, f"to {host}")]
    return sorted([*computing, *coming], key=lambda span: order.index(span.row))


def hidden(spans: Sequence[Span]) -> float:
    """Return the part of the transfers' time in which the host that they come to computes."""
    coming = [span for span in spans if span.kind == "transfer"]
    both_s = sum(
        max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s))
        for one in coming
        for other in spans
        if one.row == f"to {other.row}"
    )
    return both_s / sum(span.length_s for span in coming)
