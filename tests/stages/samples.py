"""Which values of a parameter `make test` takes; all others have the mark `long`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

MORE_EXAMPLES = "PW_TEST_MORE_EXAMPLES"
"""A variable: how many times as many examples hypothesis makes as in `make test`."""


def examples(many: int) -> int:
    """Return how many examples hypothesis makes where `make long` makes so many or more."""
    return max(1, many * int(os.environ.get(MORE_EXAMPLES, "1")) // 4)


def long(*values: Any) -> Any:
    """Return a parameter of `make long` only."""
    return pytest.param(*values, marks=pytest.mark.long)


def some(values: Sequence[Any], every: int = 4) -> list[Any]:
    """Return each value as a parameter; `make test` takes the first of every so many."""
    return [long(value) if at % every else value for at, value in enumerate(values)]


def parts(values: Sequence[Any], every: int = 4) -> list[Any]:
    """Return two parameters, for a test that loops: the first of every so many values, and all others."""
    return [values[::every], long([value for at, value in enumerate(values) if at % every])]


def diagonal(*values: Sequence[Any]) -> list[Any]:
    """Return all combinations; `make test` takes few of them, in which each value occurs."""
    length = max(map(len, values))
    few = {tuple(at % len(each) for each in values) for at in range(length)}
    return [
        tuple(each[at] for each, at in zip(values, places, strict=True))
        if places in few
        else long(*(each[at] for each, at in zip(values, places, strict=True)))
        for places in itertools.product(*(range(len(each)) for each in values))
    ]
