"""Structured log lines, `event node=... actor=... key=value`, through the logger "pw"."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger("pw")
logger.addHandler(logging.NullHandler())  # a library says nothing unless its user wants to hear it

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def log(
    level: str, event: str, node: str, actor: str = "", fields: Mapping[str, object] | None = None
) -> None:
    """Write one line, if anyone listens at `level` (debug, info, warning, error)."""
    number = LEVELS[level]
    if not logger.isEnabledFor(number):
        return
    pairs: dict[str, object] = {
        "node": node,
        **({"actor": actor} if actor else {}),
        **(fields or {}),
    }
    text = " ".join(f"{key}={_quoted(value)}" for key, value in pairs.items())
    logger.log(number, "%s %s", event, text)


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if plain and text else repr(text)
