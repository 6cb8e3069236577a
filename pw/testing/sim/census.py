"""The census: every collection in an actor that is not empty.

It finds collections by itself, so a new dictionary in an actor is part of it at once. The list
below names the collections that may stay.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sized
from typing import Any

PERMANENT = frozenset(
    (
        # machinery, and arguments of constructors
        *("_handlers", "_resuming", "_table", "_counters", "_registration"),
        *("env", "_env", "policy"),
        # hosts and islands
        *(
            "_islands",
            "schedulers",
            "islands",
            "spares",
            "_spares",
            "hosts",
            "_hosts",
            "_directory",
            "_absent",
            "_states",
            "_ends",
            "_reporters",
            "failed_devices",
        ),
        # one entry for each device, host or island
        *("_below", "_lost", "limited", "_numbers", "_device_sets", "_unsettled"),
        "_busy_until_s",
        # one entry for each tenant
        "by_tenant",
        # bounded memories of the past
        *(
            "_dropped",
            "_gone_clients",
            "gone_clients",
            "_void_clients",
            "_recent",
            "recent",
            "strikes",
            "_sums",
            "_former",
            "_newest_launches",
        ),
    )
)
"""Attributes that need not be empty in the end."""


def held(name: str, actor: object) -> Counter[str]:
    """Return the sizes of all collections of an actor and its parts that should become empty."""
    sizes: Counter[str] = Counter()
    for path, size in _collections(name, actor, set()):
        sizes[path] += size
    return sizes


def _collections(path: str, thing: Any, seen: set[int]) -> Iterator[tuple[str, int]]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    for name, value in _attributes(thing):
        if name in PERMANENT:
            continue
        inside = f"{path}.{name.strip('_')}"
        if isinstance(value, (dict, set, list, deque, Counter)):
            if _size(value):
                yield inside, _size(value)
        elif _is_part(value):
            yield from _collections(inside, value, seen)


def _size(value: Sized) -> int:
    return len(+value) if isinstance(value, Counter) else len(value)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def _is_part(value: Any) -> bool:
    """Whether it is an object of the runtime that belongs to the actor, and not another actor."""
    folders = ("pw.sched.", "pw.devices.", "pw.client.", "pw.core.timeline")
    return type(value).__module__.startswith(folders) and not hasattr(value, "turn_ended")
