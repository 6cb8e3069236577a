"""Answers what is asked about values: whether they are ready (`Watch`), and what is in them (`Read`).

A question stands behind no computation but those that make its values:

    looked at -all values are there and ready-> answered
      |   |
      |   +- an array is not ready: a watcher waits for it, then looks again
      +- a value is not there, as its op has not been run: asked; whichever thread makes it looks again

So the loop answers what is ready when it is asked, however long the execute thread is held up. All threads but
the watchers are in a hurry: they read only what numpy can alias, and leave the rest to a watcher.

Donation. The loop may read an array in the moment in which the execute thread gives it away, and then stand in
JAX until that call returns. So both say what they are about to do before they look at what the other does: a
read counts itself in `Value.reads_begun`, and the execute thread sets `Value.given` (see `may_give`). If both
see the other, the array is copied for the donation, and a watcher reads it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from pw.core.errors import ArrayDeleted, ErrorReport, InternalError
from pw.core.sharding import box_slices
from pw.devices.host.backend import Read, Value, Watch
from pw.devices.jax.compile import SUB_BYTE
from pw.devices.jax.layouts import Layouts, local_shards, whole
from pw.devices.jax.threads import Completions, QueueThread
from pw.devices.jax.watcher import Watchers

Report = Callable[[BaseException, str], ErrorReport]
"""Makes an error of what was raised by a computation of this name."""

DONATED = "deleted or donated buffer"
"""What JAX says of a buffer that a computation has taken."""

_FEW_VALUES = 64
"""A thread in a hurry looks at no more of them in one go."""


class Answers:
    """Answers the questions about the values of one host.

    Args:
        host: the name of the host, for errors.
        layouts: where arrays lie.
        completions: the way to the loop, where every `done` is called.
        report: see `Report`.
    """

    def __init__(
        self, host: str, layouts: Layouts, completions: Completions, report: Report
    ) -> None:
        self._layouts = layouts
        self._completions = completions
        self._report = report
        self._watchers = Watchers(completions.fail)
        self._lock = threading.Lock()
        words = "an array was used after it had been donated to a computation; pass a copy there, copy.copy(x)"
        self.deleted = ErrorReport(ArrayDeleted.__name__, words, host)
        """The error of a value whose buffers were given away."""
        words = "a value was used before it was made"
        self.unmade = ErrorReport(InternalError.__name__, words, host)
        """The error of a value that no op has made."""

    @property
    def waiting(self) -> int:
        """Questions that watchers have."""
        return self._watchers.waiting

    def close(self) -> list[QueueThread[Any]]:
        """Ask no watcher any more, and return their threads, to be stopped."""
        return self._watchers.close()

    # --- questions -----------------------------------------------------------------------------------

    def look(self, op: Watch | Read, *, nothing_comes: bool = False) -> None:
        """Answer a question, or see to it that it is looked at again when it makes sense; from any thread.

        `nothing_comes`: all ops that were submitted have been run, so that a value which is not there, and is
        not being built, never will be.
        """
        if nothing_comes and any(not _is_there(v) and v.building is None for v in _values(op)):
            self._completions.post(op.done, self.unmade)
        else:
            self._look(op, is_watcher=False)

    def _look(self, op: Watch | Read, is_watcher: bool = True) -> None:
        if isinstance(op, Read):
            self._look_at_read(op, is_watcher)
        elif len(op.values) > _FEW_VALUES and not is_watcher:
            self._watchers.wait(Watch, 0, _READY, partial(self._look, op))
        else:
            self._look_at_watch(op)

    def _look_at_watch(self, op: Watch) -> None:
        values = op.values
        while values:
            heirs: dict[Value, None] = {}
            for at, value in enumerate(values):
                if self._is_late(value):
                    if at or values is not op.values:
                        op = Watch((*heirs, *values[at:]), op.done, op.hurried)
                    return self._come_back(value, op)
                error = self.settled(value)
                if error is self.deleted:
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
        if self._is_late(op.value):
            self._come_back(op.value, op)
        elif is_watcher or self._is_quick(op):
            self._answer(op)
        else:
            # Not in the place of its array, where another question may wait for a computation.
            self._watchers.wait(Read, 0, _READY, partial(self._look, op))

    def _is_late(self, value: Value) -> bool:
        """Whether there is something to wait for."""
        array = value.payload
        return not _is_there(value) or (array is not None and _is_coming(array))

    def _come_back(self, late: Value, op: Watch | Read) -> None:
        """Look at `op` again when the late value is there, or ready."""
        array = late.payload
        if array is not None:
            place = frozenset(array.sharding.addressable_devices)
            self._watchers.wait(place, late.order, array, partial(self._look, op))
            return
        with self._lock:
            if late.asked is None:
                late.asked = deque()
            late.asked.append(op)
        if _is_there(late):  # since it was looked at: its maker may have seen no question
            self.tell(late)

    def tell(self, value: Value) -> None:
        """Look at the questions that were asked about a value, now that it is there.

        Each is taken out once, whichever threads come here at the same time.
        """
        while value.asked and _is_there(value):
            try:
                op = value.asked.popleft()
            except IndexError:
                return
            self._look(op, is_watcher=False)

    # --- answers -------------------------------------------------------------------------------------

    def _is_quick(self, op: Read) -> bool:
        """Whether a thread in a hurry may read this ready value."""
        array = op.value.payload
        if array is None:
            return True  # it has failed
        return not op.value.given and in_host_memory(array) and op.spec.dtype not in SUB_BYTE

    def _answer(self, op: Read) -> None:
        answer: list[np.ndarray[Any, Any]] | ErrorReport | None = self.settled(op.value)
        if answer is None:
            try:
                answer = self._views(op)
            except Exception as error:  # noqa: BLE001 - the asker is to know
                answer = self._report(error, "")
        with self._lock:
            op.value.reads_ended += 1  # a view is a copy, or JAX sees it and does not donate
        self._completions.post(op.done, answer)

    def settled(self, value: Value) -> ErrorReport | None:
        """Wait for a value that is there to be ready, and return what went wrong with it."""
        array = value.payload
        if array is None:
            return value.error or self.unmade
        try:
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001 - a computation may fail with anything
            if is_donated(array, error):
                return self.deleted
            value.alone = value.joint
            value.error, value.payload = self._report(error, value.maker), None
            return value.error
        return None

    def _views(self, op: Read) -> list[np.ndarray[Any, Any]]:
        layout = self._layouts(op.spec.sharding, op.devices)
        shards = local_shards(op.value.payload)
        shape = op.spec.sharding.shard_shape(op.spec.shape)
        if not in_host_memory(op.value.payload):
            for position in {position for position, _ in op.boxes}:
                shards[layout.local[position]].copy_to_host_async()
        seen: dict[int, np.ndarray[Any, Any]] = {}
        views = []
        for position, box in op.boxes:
            if position not in seen:
                seen[position] = np.asarray(shards[layout.local[position]])
            # An array without dimensions, indexed, would be a scalar.
            views.append(seen[position] if whole(box, shape) else seen[position][box_slices(box)])
        return views


class _Ready:
    """In the place of an array, for what is a watcher's but waits for none."""

    def block_until_ready(self) -> None:
        """Return."""


_READY = _Ready()


def _values(op: Watch | Read) -> tuple[Value, ...]:
    return op.values if isinstance(op, Watch) else (op.value,)


def may_give(value: Value, heir: Value | None) -> bool:
    """Whether a value's buffers may be donated, to a computation that makes `heir`; on the execute thread.

    If so, a `Watch` follows the heir, and the loop does not read the value any more.
    """
    if value.shared:
        return False
    # Before the look at reads, since the loop does it the other way round; and before the call of the
    # computation, since a watcher may find the array deleted while that call still runs.
    value.given, value.heir = True, heir
    if value.reads_begun == value.reads_ended:
        return True
    value.given, value.heir = False, None
    return False


def is_donated(array: jax.Array, error: Exception) -> bool:
    """Whether waiting for an array failed because a computation has taken it, or is taking it."""
    # JAX looks at the first buffer only, and those on other devices may have been taken before it.
    return array.is_deleted() or DONATED in str(error)


def is_ready(value: Value) -> bool:
    """Whether a value is there, and its array is ready."""
    array = value.payload
    return array is not None and not array.is_deleted() and array.is_ready()


def _is_there(value: Value) -> bool:
    """Whether the op that makes a value has been run, well or badly."""
    return value.payload is not None or value.error is not None


def _is_coming(array: Any) -> bool:
    """Whether an array is neither ready nor deleted; the execute thread may delete it at this moment."""
    try:
        return not array.is_deleted() and not array.is_ready()
    except Exception:  # noqa: BLE001 - it has been deleted
        return False


def in_host_memory(array: jax.Array) -> bool:
    """Whether an array's devices share the host's memory."""
    devices: Any = array.sharding.device_set
    return all(device.platform == "cpu" for device in itertools.islice(devices, 1))
