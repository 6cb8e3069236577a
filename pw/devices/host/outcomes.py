"""Finds out whether results are valid before any op uses them.

Three kinds of computations need that. Results that are checked for NaNs (`Computation.checks`) come
with a replicated vector of flags, which every host of the gang reads for itself. A Python function
that runs on several hosts may raise on one of them, and an uneven view may have an error on one of them
(`pw.devices.host.views`), so each host tells the others through the scheduler, and the error of the first
host in the gang's order counts for all. The same holds for a
computation that calls its client (`Computation.calls_back`); if it runs on one host, that host waits
too, so that the client's later work, and no other, waits for the client.

Until the outcome is known, the results count as values that have not arrived. So work that reads
them is enqueued on all hosts of a gang or on none. The price is that the lane waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core.errors import ErrorReport, NaNFound
from pw.core.ids import Address
from pw.core.messages import CallEnded
from pw.core.programs.program import Computation
from pw.core.sharding import DeviceAddress
from pw.devices.host.backend import Op, Read, Watch, relative
from pw.devices.host.value import Value

TakeOutcome = Callable[[ErrorReport | None], None]
"""Called with the error of a computation, None if its results are valid."""


@dataclass(slots=True)
class _Call:
    """The call of a Python function, or an uneven view, on several hosts."""

    errors: dict[str, ErrorReport | None] = field(default_factory=dict)
    """The error of each host that has returned, None for success."""
    settle: TakeOutcome | None = None
    """Call that takes the outcome; None until the function is called here."""


class Outcomes:
    """Finds out about results on one host."""

    def __init__(self, host: str, send: Callable[[Address, object], None]) -> None:
        self._host = host
        self._send = send
        self._calls: dict[tuple[int, int], _Call] = {}

    def of_check(
        self,
        computation: Computation,
        devices: tuple[DeviceAddress, ...],
        results: tuple[Value, ...],
        settle: TakeOutcome,
    ) -> Op:
        """Return the op, right after the computation, that reads its flags."""
        spec = computation.outputs[-1]
        here = next(at for at, device in enumerate(devices) if device.host == self._host)

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                settle(views)
            elif views[0].any():
                names = [
                    name for name, bad in zip(computation.checks, views[0], strict=True) if bad
                ]
                error = NaNFound(
                    f"the computation {computation.name!r} made NaNs in {', '.join(names)}"
                )
                settle(ErrorReport.of(error, self._host))
            else:
                settle(None)

        return Read(results[-1], [(here, relative(spec.box(here)))], spec, devices, read)

    def of_call(
        self,
        epoch: int,
        scheduler: Address,
        call: tuple[int, int],
        gang: tuple[str, ...],
        results: tuple[Value, ...],
        settle: TakeOutcome,
    ) -> Op:
        """Return the op, right after the call of a Python function or a view, that tells the gang.

        `call` is the run and the slot of the first result, which are the same on all hosts.
        """
        self._calls.setdefault(call, _Call()).settle = settle

        def returned(error: ErrorReport | None) -> None:
            ended = CallEnded(epoch, *call, self._host, gang, error)
            self._send(scheduler, ended)
            self.ended(ended)

        return Watch(results, returned)

    def ended(self, message: CallEnded) -> None:
        """Take the outcome of one host of the gang; the last one makes the outcome known."""
        key = (message.run, message.slot)
        call = self._calls.setdefault(key, _Call())
        call.errors[message.host] = message.error
        if call.settle is not None and len(call.errors) == len(message.gang):
            del self._calls[key]
            errors = (call.errors[host] for host in message.gang)
            call.settle(next((error for error in errors if error is not None), None))
