"""What tests see of the insides of arrays and functions, each private name once."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pw.client.connection import current


def number_of(array: Any) -> int:
    """Return the number by which the runtime knows an array."""
    return int(array._id)


def type_of(array: Any) -> Any:
    """Return the type of an array or tracer: aval, sharding, and how hosts hold it."""
    return getattr(array, "_type", None) or array.type


def is_fetched(array: Any) -> bool:
    """Whether the array's value was ever asked for."""
    return array._fetching is not None


def set_fetching(array: Any, fetching: Future[Any] | Any) -> None:
    """Have a read of the array end as this future does."""
    array._fetching = fetching


def set_waiting(array: Any, waiting: Future[Any]) -> None:
    """Have a wait for the array end as this future does."""
    array._waiting = waiting


def traced_of(function: Any) -> Any:
    """Return what a function of `pw.jit` was traced to, of which there is one."""
    (traced,) = function._by_types.values()
    return traced


def without_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls find no session for as long as a test lasts."""
    monkeypatch.setattr(current, "_current", None)
