"""What becomes of results that nobody may see before it is known: checked ones, and those of Python functions.

Two kinds of computations end with a question. Results that are checked for NaNs (`Computation.checks`) come
with a replicated vector of answers, which every host of the gang reads for itself: all read the same. A
Python function that runs on several hosts may raise on one of them, so each host tells the others, by way of
the scheduler, whose links to all of them last as long as the epoch does. The first of the gang's hosts that
has failed says for all what happened.

Until there is a verdict the executor treats the results like values that are still on their way from another
host. Whatever reads them is therefore enqueued after it, on no host or on all of them: an error spreads like
any other, and no gang is torn apart. The price is that the host's queue waits for the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core.errors import ErrorReport, NaNFound
from pw.core.ids import Address
from pw.core.messages import CallEnded
from pw.core.program import Computation
from pw.core.sharding import DeviceAddress
from pw.devices.host.backend import Op, Read, Value, Watch, relative

Judged = Callable[[ErrorReport | None], None]
"""Told what is wrong with the results of a computation, None if nothing is."""

Send = Callable[[Address, object], None]


@dataclass(slots=True)
class _Call:
    """A Python function on several hosts: who has returned from it, and how."""

    outcomes: dict[str, ErrorReport | None] = field(default_factory=dict)
    judged: Judged | None = None
    """None until it has been called here."""


class Verdicts:
    """Finds out about results on one host."""

    def __init__(self, host: str, send: Send) -> None:
        self._host = host
        self._send = send
        self._calls: dict[tuple[int, int], _Call] = {}

    def checked(
        self,
        computation: Computation,
        devices: tuple[DeviceAddress, ...],
        results: tuple[Value, ...],
        judged: Judged,
    ) -> Op:
        """The op, to come right after the computation, that reads what its check says."""
        spec = computation.outputs[-1]
        here = next(at for at, device in enumerate(devices) if device.host == self._host)

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                judged(views)
            elif views[0].any():
                names = [
                    name for name, bad in zip(computation.checks, views[0], strict=True) if bad
                ]
                error = NaNFound(
                    f"the computation {computation.name!r} made NaNs in {', '.join(names)}"
                )
                judged(ErrorReport.of(error, self._host))
            else:
                judged(None)

        return Read(results[-1], [(here, relative(spec.box(here)))], spec, devices, read)

    def called(
        self,
        epoch: int,
        scheduler: Address,
        call: tuple[int, int],
        gang: tuple[str, ...],
        results: tuple[Value, ...],
        judged: Judged,
    ) -> Op:
        """The op, to come right after the call of a Python function, that has its gang agree.

        `call` is the run and the slot of the first result, which are the same on all hosts.
        """
        self._calls.setdefault(call, _Call()).judged = judged

        def returned(error: ErrorReport | None) -> None:
            ended = CallEnded(epoch, *call, self._host, gang, error)
            self._send(scheduler, ended)
            self.ended(ended)

        return Watch(results, returned)

    def ended(self, message: CallEnded) -> None:
        """A host of the gang, or this one, has returned from a Python function."""
        key = (message.run, message.slot)
        call = self._calls.setdefault(key, _Call())
        call.outcomes[message.host] = message.error
        if call.judged is not None and len(call.outcomes) == len(message.gang):
            del self._calls[key]
            errors = (call.outcomes[host] for host in message.gang)
            call.judged(next((error for error in errors if error is not None), None))
