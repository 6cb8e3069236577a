"""Structured log lines, `event node=... actor=... key=value`, through the logger "pw"."""

from __future__ import annotations

import logging
import math
from collections import deque

from pw.core.messages import LogLine

logger = logging.getLogger("pw")
_audit = logging.getLogger("pw.audit")
logger.addHandler(logging.NullHandler())  # a library says nothing unless its user wants to hear it

FIELDS = "pw_fields"
"""The attribute of a record with its event and its fields."""

_REMEMBERED = 1000

FIELD_CHARACTERS = 1024
"""Most characters of a field's value: peers choose some of them."""

LINES_KEPT = 12
LINE_CHARACTERS = 300
"""Most characters of a line that is kept for those who look at the cluster from elsewhere."""

TRACEBACK_CHARACTERS = 1 << 15
"""Most characters of a traceback; its end is kept, because that matters most."""


def log(level: str, event: str, node: str, actor: str = "", /, **fields: object) -> None:
    """Write one line, if `level` (debug, info, warning, error) is enabled."""
    number: int = getattr(logging, level.upper())
    if not logger.isEnabledFor(number):
        return
    pairs: dict[str, object] = {"node": node, **({"actor": actor} if actor else {}), **fields}
    logger.log(number, "%s %s", event, _pairs(pairs), extra=_extra(event, pairs))


def _extra(event: str, fields: dict[str, object]) -> dict[str, object]:
    """Return what a record has beside its text, for formats that write fields apart."""
    return {FIELDS: {"event": event} | {key: _plain(key, value) for key, value in fields.items()}}


def _plain(key: str, value: object) -> object:
    """Return a value that JSON has: numbers stay numbers."""
    is_number = isinstance(value, bool | int | float) and math.isfinite(value)
    return value if is_number else _cut(key, value)


def _pairs(fields: dict[str, object]) -> str:
    return " ".join(f"{key}={_quoted(_cut(key, value))}" for key, value in fields.items())


def audit(event: str, /, **fields: object) -> None:
    """Write one line about access, through the logger "pw.audit" at level info.

    Args:
        event: login, refused, drain, cancel, revoked or insecure.
        fields: as known: tenant, name, node, peer (an address), reason.
    """
    if _audit.isEnabledFor(logging.INFO):
        _audit.info("%s %s", event, _pairs(fields), extra=_extra(event, fields))


class RecentRecords(logging.Handler):
    """Keeps the newest warnings and errors of this process, of whatever logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[tuple[str, LogLine]] = deque(maxlen=LINES_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        text = record.getMessage()[:LINE_CHARACTERS]
        node = str(getattr(record, FIELDS, {}).get("node", ""))
        self._lines.append((node, LogLine(record.created, record.levelname.lower(), text)))

    def of(self, node: str) -> tuple[LogLine, ...]:
        """Return the lines of a node, and those that name none, the oldest first."""
        return tuple(line for named, line in list(self._lines) if named in ("", node))


recent = RecentRecords()
"""Handles the records of all loggers in daemons (`pw.cli.process.configure_logging`)."""


class Warnings:
    """Writes each warning of a node once, also when its cause repeats."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._keys: set[object] = set()

    def once(self, key: object, event: str, peer: object, **fields: object) -> bool:
        """Write a warning about `peer`, unless one with this key was written; whether it was new."""
        if key in self._keys:
            return False
        if len(self._keys) >= _REMEMBERED:
            self._keys.clear()
        self._keys.add(key)
        log("warning", event, self._node, peer=peer, **fields)
        return True


def _cut(key: str, value: object) -> str:
    text = str(value)
    if key == "traceback":
        return text if len(text) <= TRACEBACK_CHARACTERS else f"...{text[-TRACEBACK_CHARACTERS:]}"
    return text if len(text) <= FIELD_CHARACTERS else f"{text[:FIELD_CHARACTERS]}..."


def _quoted(text: str) -> str:
    plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if plain and text else repr(text)
