"""Reports the transfers and counters of this host, while the controller publishes events."""

from __future__ import annotations

from collections.abc import Callable

from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.ids import CONTROL, CONTROLLER, Address
from pw.core.messages import Observe, Observed, Transferred

TRANSFERS_KEPT = 4096
"""Transfers between two reports; more are only counted."""


class Observing(Part):
    """Keeps the transfers that have ended until the next report; nothing unless it was asked."""

    def __init__(self, env: Env, counters: Callable[[], dict[str, int]]) -> None:
        self._env = env
        self._counters = counters
        self._kept: list[Transferred] = []
        self._skipped = 0
        self._ticker: Ticker | None = None

    @property
    def is_on(self) -> bool:
        """Whether the controller wants reports."""
        return self._ticker is not None

    def ended(self, transfer: Transferred) -> None:
        """An edge has ended; only where `is_on`."""
        if len(self._kept) < TRANSFERS_KEPT:
            self._kept.append(transfer)
        else:
            self._skipped += 1

    @handles(Observe)
    def _observe(self, sender: Address, message: Observe) -> None:
        if sender.node != CONTROLLER:
            self._env.count("messages_refused")
        elif self._ticker is None:
            self._ticker = Ticker(self._env, message.period_s, self._report)
            self._ticker.start()

    def _report(self) -> bool:
        transfers, self._kept = tuple(self._kept), []
        skipped, self._skipped = self._skipped, 0
        self._env.send(CONTROL, Observed(transfers, skipped, self._counters()))
        return True
