"""The clients that parts of reports belong to, and what one client may see of a report.

A part of a report, such as one launch, belongs to the client that one of its fields names: the type
of the field says so. A client sees the parts that belong to clients of its tenant. Parts that
belong to no client (0) are for operators. Counts of work, bytes and devices always stay, so that a
report still says whether a device is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from pw.core.ids import client_of

Sees = Callable[[int], bool]
"""Function that returns whether the asker may see what belongs to the client with a number; with 0, whether it
is an operator."""

Report = TypeVar("Report", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class OwnerMark:
    """Marks the field of a part that names its client."""

    client: Callable[[Any], int]
    """Function that returns the client's number for a value of the field."""


ClientNumber = Annotated[int, OwnerMark(int)]
"""Number of the client that a part belongs to."""
ClientId = Annotated[int, OwnerMark(client_of)]
"""Run or program of the client that a part belongs to."""


@cache
def _marks(kind: type) -> tuple[tuple[tuple[str, OwnerMark], ...], tuple[str, ...]]:
    """Return the fields of a struct that name its client, and those whose parts belong to clients."""
    owners, parts = [], []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        owners += [(name, mark) for mark in get_args(hint) if isinstance(mark, OwnerMark)]
        inner = (one for one in get_args(hint) if isinstance(one, type))
        parts += [name for one in inner if issubclass(one, msgspec.Struct) and any(_marks(one))]
    return tuple(owners), tuple(parts)


def visible(report: Report, sees: Sees) -> Report:
    """Return a report without the parts that the asker may not see."""
    shown = {
        name: tuple(visible(part, sees) for part in getattr(report, name) if _is_seen(part, sees))
        for name in _marks(type(report))[1]
    }
    return msgspec.structs.replace(report, **shown) if shown else report


def _is_seen(part: msgspec.Struct, sees: Sees) -> bool:
    return all(sees(mark.client(getattr(part, name))) for name, mark in _marks(type(part))[0])
