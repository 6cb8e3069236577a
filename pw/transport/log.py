"""Structured log lines, `event node=... actor=... key=value`, through the logger "pw"."""

from __future__ import annotations

import logging

logger = logging.getLogger("pw")
logger.addHandler(logging.NullHandler())  # a library says nothing unless its user wants to hear it

_REMEMBERED = 1000


def log(level: str, event: str, node: str, actor: str = "", /, **fields: object) -> None:
    """Write one line, if `level` (debug, info, warning, error) is enabled."""
    number: int = getattr(logging, level.upper())
    if not logger.isEnabledFor(number):
        return
    pairs: dict[str, object] = {"node": node, **({"actor": actor} if actor else {}), **fields}
    text = " ".join(f"{key}={_quoted(value)}" for key, value in pairs.items())
    logger.log(number, "%s %s", event, text)


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


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if plain and text else repr(text)
