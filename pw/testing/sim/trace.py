"""What happened, in order: the last events of every run, or all of them as text.

Noting costs as little as appending a tuple; text is made only when somebody wants to read it. The text
depends on nothing but the run, so two runs of one seed can be compared byte for byte.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import msgspec

KEPT = 400


class Trace:
    """Notes of what happened; `full` keeps all of them."""

    def __init__(self, full: bool = False) -> None:
        self._notes: deque[tuple[float, str, str, Any]] = deque(maxlen=None if full else KEPT)
        self.add = self._notes.append

    def lines(self, last: int | None = None) -> list[str]:
        """The notes as text, one line each."""
        notes = list(self._notes)
        return [_line(*note) for note in (notes if last is None else notes[-last:])]


def _line(time_s: float, where: str, sender: str, what: Any) -> str:
    origin = f" <- {sender}" if sender else ""
    return f"{time_s:12.6f}  {where}{origin}  {what if isinstance(what, str) else describe(what)}"


def describe(value: Any, depth: int = 0) -> str:
    """A message in a few words; what is too long to read appears as a checksum."""
    if isinstance(value, msgspec.Struct) or hasattr(value, "__dataclass_fields__"):
        name = type(value).__name__
        if depth > 1:
            return name
        is_struct = isinstance(value, msgspec.Struct)
        fields = value.__struct_fields__ if is_struct else value.__dataclass_fields__
        inner = (f"{field}={describe(getattr(value, field), depth + 1)}" for field in fields)
        return f"{name}({', '.join(inner)})"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes {zlib.crc32(value):08x}>" if len(value) > 4 else repr(value)
    if isinstance(value, (tuple, list)):
        if len(value) > 8:
            return f"[{len(value)} items]"
        return "[" + ", ".join(describe(item, depth + 1) for item in value) + "]"
    if isinstance(value, (int, float, str, bool)) or value is None:
        return repr(value)
    return type(value).__name__
