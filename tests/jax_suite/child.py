"""Runs tests of one file of JAX's suite, and writes each event to a file as it happens.

A process of its own: `python child.py ORDER`, where ORDER is a json file. This folder is not on the
child's path, because JAX's folder of tests has the same name as this project's.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Order:
    """Which tests of a file to run."""

    file: str
    events: str
    """The file that gets one json object per line."""
    jax: str
    """The checkout of JAX."""
    match: str = ""
    """A regular expression; a test runs if it is found in the test's name."""
    sample: int = 1
    """Run every n-th test, chosen by a checksum of its name."""
    only: list[str] | None = None
    """The tests to choose from; None means all."""
    without: list[str] = field(default_factory=list)


def chosen(test: str, match: str, sample: int) -> bool:
    """Whether a selection has this test; the same in every process and for every order of tests."""
    return zlib.crc32(test.encode()) % sample == 0 and re.search(match, test) is not None


def name_of(nodeid: str) -> str:
    """A test's name without its file: `PJitTest.testBasic`."""
    return ".".join(nodeid.split("::")[1:])


def first_words(text: str) -> str:
    """An error's first lines as one line; of a traceback in it, only the last line."""
    head, traceback, rest = text.partition("Traceback (most recent call last)")
    if traceback:
        text = "\n".join([head, *rest.strip().splitlines()[-1:]])
    lines = [line.strip() for line in text.strip().splitlines()]
    return " ".join(line for line in lines[:12] if line)[:REASON_CHARACTERS]


class Recorder:
    """The pytest plugin: selects tests and records their outcomes."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.descriptor = os.open(order.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.outcome: dict[str, Any] = {}
        self.only = None if order.only is None else set(order.only)
        self.without = set(order.without)

    def wants(self, test: str) -> bool:
        return (
            chosen(test, self.order.match, self.order.sample)
            and (self.only is None or test in self.only)
            and test not in self.without
        )

    def write(self, event: str, **fields: object) -> None:
        # One write per event: a crash in the next instruction loses nothing.
        os.write(self.descriptor, (json.dumps({"event": event, **fields}) + "\n").encode())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("broken", reason=reason_of(report))

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        wanted = [item for item in items if self.wants(name_of(item.nodeid))]
        config.hook.pytest_deselected(
            items=[item for item in items if not self.wants(name_of(item.nodeid))]
        )
        items[:] = wanted
        self.write("collected", tests=[name_of(item.nodeid) for item in wanted])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome = {"outcome": "passed", "reason": "", "seconds": 0.0}
        self.write("start", test=name_of(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has a report for each phase and each subtest; the worst of them counts."""
        self.outcome["seconds"] = round(self.outcome["seconds"] + report.duration, 3)
        if report.failed and self.outcome["outcome"] != "failed":
            self.outcome.update(outcome="failed", reason=reason_of(report))
        elif report.skipped and self.outcome["outcome"] == "passed":
            self.outcome.update(outcome="skipped", reason=reason_of(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write("end", test=name_of(nodeid), **self.outcome)

    def pytest_sessionfinish(self) -> None:
        self.write("finished")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test failed or was skipped, in one line."""
    if isinstance(report.longrepr, tuple):  # a skip
        return first_words(str(report.longrepr[2])).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return first_words(str(report.longrepr))
    raised_in = Path(crash.path)
    # The same words from two places of JAX are two reasons; places in tests say nothing.
    inside_jax = "jax" in raised_in.parts and raised_in.name != "test_util.py"
    return first_words(crash.message) + (
        f" [{raised_in.name}:{crash.lineno}]" if inside_jax else ""
    )


def run(order: Order) -> int:
    # As if the file were run by its path: JAX's folder of tests is first on the path.
    arguments: Iterable[str] = (
        "--rootdir",
        order.jax,
        "-c",
        str(Path(order.jax, "pyproject.toml")),
        "--import-mode=prepend",
        "--noconftest",  # it would put the checkout's jax before the installed one
        "--capture=no",  # output of a process that crashes is not lost
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-v",
        str(Path(order.jax, "tests", order.file)),
    )
    return int(pytest.main(list(arguments), plugins=[Recorder(order)]))


if __name__ == "__main__":
    sys.path.pop(0)
    sys.exit(run(Order(**json.loads(Path(sys.argv[1]).read_text()))))
