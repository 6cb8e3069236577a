"""Answers questions about values: whether they are ready (`Watch`), and what their bytes are (`Read`).

A question waits for the computations that make its values, and for no others:

    looked at -all values are made and ready-> answered
      |   |
      |   +- an array is not ready: a watcher waits for it, then looks again
      +- a value is not made, as its op has not run: the thread that makes it looks again

So the loop answers at once what is ready, even while the execute thread is blocked. All threads but
the watchers are in a hurry: they read only arrays that numpy can alias, and leave the rest to a
watcher.

Donation. The loop may read an array while the execute thread donates it, and JAX would then block
the loop until that call returns. So each announces its step before it checks for the other's: a
read is counted in `Value.reads_begun`, and the execute thread sets `Value.is_given` (see
`Value.may_donate`). If both see the other, the execute thread donates a copy, and a watcher reads the
array.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import jax
import numpy as np

from pw.core.dtypes import PACKED
from pw.core.errors import ErrorReport
from pw.core.platforms import platform_of
from pw.core.sharding import box_slices
from pw.devices.host.backend import Read, Watch
from pw.devices.host.spill_files import MappedFile
from pw.devices.host.value import Value
from pw.devices.jax.layouts import Layouts, is_whole, local_shards
from pw.devices.jax.threads import Completions
from pw.devices.jax.values import Failures, is_made, is_pending
from pw.devices.jax.watcher import Watchers

_FEW_VALUES = 64
"""Values that a thread in a hurry looks at in one go, at most."""


class ResultAnswers:
    """Answers the questions about the values of one host."""

    def __init__(self, layouts: Layouts, completions: Completions, failures: Failures) -> None:
        self._layouts = layouts
        self._completions = completions
        self.failures = failures
        self.watchers = Watchers(completions.fail)
        self._lock = threading.Lock()

    # --- questions -----------------------------------------------------------------------------------

    def look(self, op: Watch | Read, *, nothing_comes: bool = False) -> None:
        """Answer a question, or have it looked at again when its values change; from any thread.

        `nothing_comes`: all submitted ops have run, so a value that is not made and not `building`
        never will be.
        """
        values = op.values if isinstance(op, Watch) else (op.value,)
        if nothing_comes and any(not is_made(v) and v.building is None for v in values):
            self._completions.post(op.done, self.failures.unmade)
        else:
            self._look(op, is_watcher=False)

    def _look(self, op: Watch | Read, is_watcher: bool = True) -> None:
        if isinstance(op, Read):
            self._look_at_read(op, is_watcher)
        elif len(op.values) > _FEW_VALUES and not is_watcher:
            self.watchers.wait(Watch, 0, None, partial(self._look, op))
        else:
            self._look_at_watch(op)

    def _look_at_watch(self, op: Watch) -> None:
        values = op.values
        while values:
            heirs: dict[Value, None] = {}
            for at, value in enumerate(values):
                if is_pending(value):
                    if at or values is not op.values:
                        op = Watch((*heirs, *values[at:]), op.done, op.hurried)
                    return self._come_back(value, op)
                error = self.failures.settled(value)
                if error is self.failures.deleted:
                    if value.heir is not None:
                        heirs[value.heir] = None
                elif error is not None:
                    return self._completions.post(op.done, error)
            values = tuple(heirs)
        if op.hurried:
            self._completions.post(op.done, None)
        else:
            self._completions.post_unhurried(op.done, None)
        return None

    def _look_at_read(self, op: Read, is_watcher: bool) -> None:
        if is_pending(op.value):
            self._come_back(op.value, op)
        elif is_watcher or self._is_quick(op):
            self._answer(op)
        else:
            # Not in the place of its array, where another question may wait for a computation.
            self.watchers.wait(Read, 0, None, partial(self._look, op))

    def _come_back(self, pending: Value, op: Watch | Read) -> None:
        """Look at `op` again when the pending value is made, or ready."""
        array = pending.payload
        if array is not None:
            sharding = array.sharding
            place = sharding.memory_kind, frozenset(sharding.addressable_devices)
            self.watchers.wait(place, pending.order, array, partial(self._look, op))
            return
        with self._lock:
            pending.ask(op)
        if is_made(pending):  # meanwhile: its maker may have seen no question
            self.tell(pending)

    def tell(self, value: Value) -> None:
        """Look at the questions about a value, now that it is made.

        Each is taken once, whichever threads come here at the same time.
        """
        while value.questions and is_made(value):
            try:
                op = value.questions.popleft()
            except IndexError:
                return
            self._look(op, is_watcher=False)

    # --- answers -------------------------------------------------------------------------------------

    def _is_quick(self, op: Read) -> bool:
        """Whether a thread in a hurry may read this ready value."""
        array = op.value.payload
        if array is None:
            return True  # it has failed
        if op.value.is_in_file:
            return False
        return not op.value.is_given and in_host_memory(array) and op.spec.dtype not in PACKED

    def read_now(self, op: Read) -> list[np.ndarray[Any, Any]] | None:
        """Host views of a value that is there; None if they take time."""
        op.value.begin_read()
        try:
            return shard_views(op, self._layouts) if self._is_quick(op) else None
        except Exception:  # noqa: BLE001 - the ordinary way finds out
            return None
        finally:
            with self._lock:
                op.value.end_read()

    def _answer(self, op: Read) -> None:
        answer: list[np.ndarray[Any, Any]] | ErrorReport | None = self.failures.settled(op.value)
        if answer is None:
            try:
                answer = shard_views(op, self._layouts)
            except Exception as error:  # noqa: BLE001 - the error is the answer
                answer = self.failures.report(error)
        with self._lock:
            op.value.end_read()  # a view is a copy, or JAX sees it and does not donate
        self._completions.post(op.done, answer)


def shard_views(op: Read, layouts: Layouts) -> list[np.ndarray[Any, Any]]:
    """Host views of the boxes that a read asks for."""
    if op.value.is_in_file:
        file: MappedFile = op.value.payload
        return file.read(op.boxes)
    local = layouts.of(op.spec, op.devices).local
    shards = local_shards(op.value.payload)
    shape = op.spec.sharding.shard_shape(op.spec.shape)
    if not in_host_memory(op.value.payload):
        for position in {position for position, _ in op.boxes}:
            shards[local[position]].copy_to_host_async()
    seen: dict[int, np.ndarray[Any, Any]] = {}
    views = []
    for position, box in op.boxes:
        if position not in seen:
            seen[position] = np.asarray(shards[local[position]])
        # An array without dimensions, indexed, would be a scalar.
        views.append(seen[position] if is_whole(box, shape) else seen[position][box_slices(box)])
    return views


def in_host_memory(array: jax.Array) -> bool:
    """Whether an array's devices share the host's memory."""
    first: Any = next(iter(array.sharding.device_set), None)
    return first is None or platform_of(first.platform).is_host
