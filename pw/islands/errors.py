"""Why a function cannot be cut."""

from __future__ import annotations

import re
from typing import Any, NoReturn

_SOURCE = re.compile(r'"([^"]+\.py)":(\d+)')
_OURS = re.compile(r"/(?:jax|jaxlib|pw/(?:client|islands))/")


class CannotCut(Exception):
    """A function cannot run on several islands: the reason, and the user's line."""

    def __init__(self, why: str, operation: Any = None) -> None:
        super().__init__(why)
        self.why = why
        self.where = "" if operation is None else where(operation)


class UncountedLoop(CannotCut):
    """A loop needs other islands in each iteration, and it is not known how often it runs."""


def cannot(why: str, operation: Any) -> NoReturn:
    """Raise CannotCut."""
    raise CannotCut(why, operation)


def where(operation: Any) -> str:
    """Return the user's line of an operation, if it has one: ` (train.py:12)`."""
    for file, line in _SOURCE.findall(str(operation.location)):
        if not _OURS.search(file):
            return f" ({file.rsplit('/', 1)[-1]}:{line})"
    return ""
