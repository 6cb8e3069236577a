"""Compares two runs of a file: of the tests that pass with plain JAX, how many pass with the gateway."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from tests.jax_suite.known import cause
from tests.jax_suite.processes import FileRun

KIND_CHARACTERS = 110


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that failed, or were skipped, for the same reason."""

    reason: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One file's figures. `passed + failed + skipped == base`."""

    file: str
    base: int
    """How many tests passed with plain JAX."""
    passed: int
    failures: tuple[Group, ...] = field(default=())
    skips: tuple[Group, ...] = field(default=())
    note: str = ""
    """What went wrong beside the tests, in one line."""

    @property
    def failed(self) -> int:
        return sum(len(group.tests) for group in self.failures)

    @property
    def skipped(self) -> int:
        return sum(len(group.tests) for group in self.skips)

    @property
    def percent(self) -> float:
        return 100 * self.passed / self.base if self.base else 100.0


def compare(file: str, wanted: list[str], gateway: FileRun) -> Comparison:
    """Compare with the tests that passed with plain JAX; a test without an outcome has failed."""
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    missing = gateway.broken or "the gateway's run did not collect this test"
    for test in wanted:
        outcome = gateway.outcomes.get(test)
        if outcome is None:
            failed[test] = missing
        elif outcome.outcome == "failed":
            failed[test] = cause(outcome.reason)
        elif outcome.outcome == "skipped":
            skipped[test] = outcome.reason
    return Comparison(
        file=file,
        base=len(wanted),
        passed=len(wanted) - len(failed) - len(skipped),
        failures=grouped(failed),
        skips=grouped(skipped),
        note=gateway.broken,
    )


def grouped(reasons: dict[str, str]) -> tuple[Group, ...]:
    """Tests by reason, the most frequent first; reasons that differ in numbers only are one."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for test, reason in reasons.items():
        tests[kind_of(reason)].append(test)
    groups = [
        Group(reasons[names[0]] or "no reason given", tuple(names)) for names in tests.values()
    ]
    return tuple(sorted(groups, key=lambda group: -len(group.tests)))


def kind_of(reason: str) -> str:
    """A reason without what differs from test to test: addresses, shapes, numbers, the end."""
    place = re.search(r" \[\w+\.py:\d+\]$", reason)
    words = re.sub(r"0x[0-9a-f]+|\[[\d,]*\]|\([\d, ]*\)", "#", reason)
    words = re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", words)
    return words[:KIND_CHARACTERS] + (place[0] if place else "")
