"""The trace of a run: its last events, all of them as text, or a digest of all messages.

A note costs as little as appending a tuple; text is made only for readers. The text depends on the
run only, so two runs of one seed can be compared byte for byte.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from functools import partial
from typing import Any

import msgspec

from pw.core.actors.ticker import Ticker
from pw.core.ids import Address
from pw.core.messages import Base

KEPT = 400


class Trace:
    """The last notes; with `full`, all of them."""

    def __init__(self, full: bool = False) -> None:
        self.is_full = full
        self._notes: deque[tuple[float, str, Address | None, Any]] = deque(
            maxlen=None if full else KEPT
        )
        self.add = self._notes.append

    def lines(self) -> list[str]:
        """The notes as text, one line each."""
        return [_line(*note) for note in self._notes]


class Digest(Trace):
    """Hashes every message between two nodes: its time, sender, receiver and content.

    Two runs have equal digests if all processes did the same. The digest leaves out words for
    people, names of types and fields, and timers, so a changed sentence does not change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sum = hashlib.sha256()
        self.add = self._add

    @property
    def value(self) -> str:
        """Hexadecimal; of all messages so far."""
        return self._sum.hexdigest()

    def _add(self, note: tuple[float, str, Address | None, Any]) -> None:
        self._notes.append(note)
        time_s, to, sender, what = note
        if sender and isinstance(what, Base) and to.partition("/")[0] != sender.node:
            origin = f"{sender.node}/{sender.actor}"
            self._sum.update(f"{time_s:.6f} {to} {origin} {_content(what)}\n".encode())


def _content(value: Any) -> str:
    """Return the content of a message as text, without words for people."""
    if isinstance(value, msgspec.Struct):
        fields = [_content(getattr(value, name)) for name in value.__struct_fields__]
        return f"{value.__struct_config__.tag}({','.join(fields)})"
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(_content, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_content(key)}:{_content(item)}' for key, item in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(map(_content, value)))}}}"
    if isinstance(value, str):
        return "words" if " " in value else value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{zlib.crc32(value):08x}"
    if isinstance(value, (int, float)) or value is None:
        return repr(value)
    return type(value).__name__


def _line(time_s: float, where: str, sender: Address | None, what: Any) -> str:
    origin = f" <- {sender.node}/{sender.actor}" if sender else ""
    return f"{time_s:12.6f}  {where}{origin}  {what if isinstance(what, str) else describe(what)}"


def describe(value: Any, depth: int = 0) -> str:
    """Return a message in a few words, with checksums for long values."""
    if isinstance(value, msgspec.Struct) or hasattr(value, "__dataclass_fields__"):
        name = type(value).__name__
        if depth > 1:
            return name
        is_struct = isinstance(value, msgspec.Struct)
        fields = value.__struct_fields__ if is_struct else value.__dataclass_fields__
        inner = (f"{field}={describe(getattr(value, field), depth + 1)}" for field in fields)
        return f"{name}({', '.join(inner)})"
    if isinstance(value, Ticker):
        return repr(value)
    if isinstance(value, partial):
        args = ", ".join(describe(one, depth + 1) for one in value.args)
        return f"{value.func.__qualname__}({args})"
    if callable(value):
        return str(value.__qualname__)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes {zlib.crc32(value):08x}>" if len(value) > 4 else repr(value)
    if isinstance(value, (tuple, list)):
        if len(value) > 8:
            return f"[{len(value)} items]"
        return "[" + ", ".join(describe(item, depth + 1) for item in value) + "]"
    if isinstance(value, (int, float, str, bool)) or value is None:
        return repr(value)
    return type(value).__name__
