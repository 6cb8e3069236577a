"""Makes arrays of host bytes: small ones at once, large ones on a thread that copies."""

from __future__ import annotations

import threading
from functools import cached_property

import jax

from pw.core.dtypes import PACKED
from pw.core.platforms import platform_of
from pw.devices.host.backend import Build
from pw.devices.jax.answers import ResultAnswers
from pw.devices.jax.layouts import Layouts, aligned_copy, bytes_to_copy, host_shards, put
from pw.devices.jax.threads import Completions, QueueThread
from pw.devices.jax.values import Failures

_AT_ONCE_BYTES = 64 * 1024
"""Builds that copy less than this cost less than a change of threads."""


class Builds:
    """Runs `Build` ops; a value is `building` while the thread copies."""

    def __init__(
        self, layouts: Layouts, completions: Completions, answers: ResultAnswers, failures: Failures
    ) -> None:
        self._layouts = layouts
        self._completions = completions
        self._answers = answers
        self._failures = failures
        self.thread: QueueThread[Build] = QueueThread("pw-copy", self.finish, completions.fail)

    def overtakes(self, op: Build) -> bool:
        """Whether a build runs before earlier ops; small arguments for devices wait for their turn."""
        return self._shares_memory or op.done is not None or op.size_bytes > _AT_ONCE_BYTES

    def begin(self, op: Build) -> None:
        """Build now, or on the thread that copies; on the loop."""
        if self._takes_long(op):
            op.result.begin(threading.Event())
            self.thread.put(op)
        else:
            with jax.enable_x64(True):
                self.finish(op)

    def finish(self, op: Build) -> None:
        """Make the array; on any thread."""
        result = op.result
        try:
            for view in op.padding:
                view[...] = 0
            layout = self._layouts.of(op.spec, op.devices)
            parts = op.parts
            if op.is_copied and self._shares_memory:
                parts = [(positions, box, aligned_copy(data)) for positions, box, data in parts]
            shards = host_shards(op.spec, tuple(layout.local), parts, over_zeros=op.over_zeros)
            result.fill(put(op.spec, layout, shards))
        except Exception as error:  # noqa: BLE001 - the failure belongs to the result
            result.fail(self._failures.report(error), alone=True)
        if result.building is not None:
            result.building.set()
        self._answers.tell(result)
        if op.done is not None:
            self._completions.post(op.done, result.error)

    def _takes_long(self, op: Build) -> bool:
        """Whether a build takes longer than a change of threads."""
        if op.is_copied or not self._shares_memory:
            return True
        if op.size_bytes <= _AT_ONCE_BYTES:
            return False
        try:
            written_bytes = sum([view.nbytes for view in op.padding])
            written_bytes += bytes_to_copy(op.spec, op.parts)
            return op.spec.dtype in PACKED or written_bytes > _AT_ONCE_BYTES
        except Exception:  # noqa: BLE001 - wrong parts: `finish` reports them
            return False

    @cached_property
    def _shares_memory(self) -> bool:
        """Whether the devices compute on host memory."""
        return platform_of(jax.local_devices()[0].platform).is_host
