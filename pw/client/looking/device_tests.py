"""`pw.test_devices()`: whether devices compute what they should, and how fast, as an object and as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pw.client.connection import current
from pw.client.display.tables import Shown, Table
from pw.client.keywords import checks_keywords
from pw.core.messages import DeviceOutcome, DevicesTested, DeviceTest, TestRow

__all__ = ["DeviceTest", "DeviceTests", "TestRow", "test_devices"]

TESTED_S = 15.0
"""Seconds to wait for the controller, which answers within 9 s."""


@dataclass(frozen=True, slots=True, repr=False)
class DeviceTests(Shown):
    """The tests of devices; prints as a table."""

    rows: tuple[TestRow, ...]
    """Devices of the islands that are ready, by island and host."""
    skipped: tuple[str, ...]
    """Hosts without a place in a ready island, whose devices are not open."""

    @classmethod
    def of(cls, reply: DevicesTested) -> DeviceTests:
        """Return the controller's answer."""
        return cls(reply.rows, reply.skipped)

    @property
    def failed(self) -> tuple[TestRow, ...]:
        """Devices that computed wrong bits, or raised an error."""
        return self._with(DeviceOutcome.FAILED)

    @property
    def untested(self) -> tuple[TestRow, ...]:
        """Devices whose test came to no end, which says nothing about them."""
        return self._with(DeviceOutcome.UNTESTED)

    def _with(self, outcome: DeviceOutcome) -> tuple[TestRow, ...]:
        return tuple(row for row in self.rows if row.test.outcome is outcome)

    @property
    def head(self) -> str:
        """One line about all devices."""
        well = len(self.rows) - len(self.failed) - len(self.untested)
        line = f"{well} of {len(self.rows)} devices are ok"
        for name, rows in (("failed", self.failed), ("not tested", self.untested)):
            line += f", {len(rows)} {name}" * bool(rows)
        if self.skipped:
            line += f"; not in a ready island: {', '.join(self.skipped)}"
        return line

    def tables(self) -> tuple[Table, ...]:
        """Return the table of devices."""
        columns: dict[str, Callable[..., Any]] = {
            "island": lambda row: row.island,
            "host": lambda row: row.host,
            "device": lambda row: row.test.device,
            "test": lambda row: str(row.test.outcome),
            "matrix product": lambda row: _rate(row.test.flop_per_s, "flop/s"),
            "sum": lambda row: _rate(row.test.read_bytes_per_s, "B/s"),
            "copy": lambda row: _rate(row.test.copy_bytes_per_s, "B/s"),
            "what is wrong": lambda row: row.test.words,
        }
        return (Table.of("Devices", ((row,) for row in self.rows), columns),)


def _rate(per_s: float, unit: str) -> str:
    for prefix, one in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_s >= one:
            return f"{per_s / one:.1f} {prefix}{unit}"
    return f"{per_s:.0f} {unit}" if per_s else ""


@checks_keywords
def test_devices(  # no test of pytest
    island: str | None = None,  # noqa: PT028
    *,
    timeout_s: float = TESTED_S,  # noqa: PT028
) -> DeviceTests:
    """Test the devices of the cluster, beside what runs there: whether their results are right, and how fast.

    Each device multiplies matrices, adds up words and copies them; the bits of the results are known. In a
    terminal the result prints as a table, in a notebook it shows as such; a script reads its attributes, as in
    `assert not pw.test_devices().failed`. Rates are those beside what else runs: in flop and bytes per second.
    A device that is busy for 8 s is `untested`.

    Args:
        island: name of an island; None for all.
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        AccessRefused: this tenant has no right to `may_drain`, and is not the operator.
        ArgumentError: there is no such island.
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    return DeviceTests.of(current.runtime().ask.test_devices(island or "", timeout_s))


test_devices.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for that of a test
