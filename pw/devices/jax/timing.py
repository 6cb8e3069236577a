"""Records when computations were called and ended on the devices of this host, for timelines.

A computation begins when it was called, the one before it on its devices has ended, and its arguments
are there; the reader of the records works that out. Its end is seen here: at once if its result is
ready when the call returns, else on a thread that waits for it. A result that is donated before that
thread looks tells nothing: the computation that took it ends later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from pw.core.recorder import COMPUTED, ENDED, Recorder
from pw.devices.host.backend import Execute
from pw.devices.jax.watcher import Watchers


class Timing:
    """Makes the records of one host's computations."""

    def __init__(self, recorder: Recorder, failed: Callable[[BaseException], None]) -> None:
        self._add = recorder.add
        self.watchers = Watchers(failed)
        self._serials = count(1)

    def computed(self, op: Execute, called_s: float, outputs: Sequence[Any]) -> None:
        """Record a call of a computation that has returned; on the thread that has called it."""
        last = outputs[-1] if outputs else None
        try:
            is_ready = last is None or last.is_ready()
        except Exception:  # noqa: BLE001 - it has failed: its readers find out how
            is_ready = True
        ended_s = time.monotonic() if is_ready else 0.0
        serial = next(self._serials)
        maker, rest = 0, None
        for value in op.args:
            made_by = value.record
            if made_by and made_by != maker:
                if not maker:
                    maker = made_by
                elif rest is None:
                    rest = {made_by}
                else:
                    rest.add(made_by)
        for value in op.results:
            value.record = serial
        run, segment, what = op.origin
        self._add(
            COMPUTED,
            called_s,
            ended_s,
            run,
            segment,
            serial,
            what,
            maker,
            () if rest is None else tuple(rest),
        )
        if not is_ready:
            assert last is not None
            place = frozenset(last.sharding.addressable_devices)
            self.watchers.wait(place, serial, last, partial(self._ended, serial, last))

    def called(self, op: Execute, called_s: float) -> None:
        """Record a Python function that has returned."""
        serial = next(self._serials)
        for value in op.results:
            value.record = serial
        run, segment, what = op.origin
        self._add(COMPUTED, called_s, time.monotonic(), run, segment, serial, what)

    def _ended(self, serial: int, array: Any) -> None:
        """The array is ready, has failed, or was donated."""
        if not array.is_deleted():
            self._add(ENDED, time.monotonic(), 0.0, serial)
