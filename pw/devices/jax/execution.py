"""The order in which a host runs ops: the execute thread, and the loop in its place.

Ops run one after the other in the order of `submit`, so hosts that submit alike enqueue alike, and
their collectives pair up. While the execute thread has nothing to do, the loop may run quick
computations itself (`pw.devices.jax.quick`): it holds the lock meanwhile, so the execute thread
gets nothing, and the order stays. Views of values that are made take no time either.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pw.devices.host.backend import Execute, Op, RunFunction, View, Watch
from pw.devices.jax.quick import LONG_S, Quick
from pw.devices.jax.threads import QueueThread
from pw.devices.jax.values import is_made

_FEW_OPS = 8
"""The loop runs at most so many ops in one go."""


class Execution:
    """Runs ops in order."""

    def __init__(
        self,
        handlers: Mapping[type, Callable[[Any], None]],
        enqueue: Callable[[Execute], None],
        quick: Quick,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.handlers = handlers
        self.enqueue = enqueue
        """Runs a computation for whose results nothing waits."""
        self.doing: Op | None = None
        """The op that runs now."""
        self._quick = quick
        self._failed = failed
        self._closed = False
        self._submitting = threading.Lock()
        self._submitted = 0
        """Batches given to the execute thread; under the lock."""
        self._ended = 0
        """Batches that the execute thread has run; only that thread writes it."""
        self.thread: QueueThread[deque[Op]] = QueueThread("pw-execute", self._run_batch, failed)

    @property
    def is_idle(self) -> bool:
        """Whether the execute thread has nothing to do."""
        return self._submitted == self._ended

    def submit(self, ops: deque[Op], *, urgent: bool = False) -> None:
        """Run `ops` after all ops before; on the loop, as far as they take no time.

        `urgent`: the loop has nothing to submit before it knows a result of them.
        """
        with self._submitting:
            if self._submitted == self._ended and not self._closed and self._pays_here(ops, urgent):
                self._run_here(ops)
            if ops:
                self._submitted += 1
                self.thread.put(ops)

    def run_now(self, op: Execute) -> bool:
        """Run a computation on the loop, if it takes no time and nothing is before it."""
        quick = self._quick
        with self._submitting:
            if (
                self._submitted != self._ended
                or self._closed
                or not quick.may_run(op)
                or not quick.comes_alone(time.monotonic())
            ):
                return False
            if not jax.enable_x64.value:
                self._run_here(deque((op,)))
                return True
            began_s = time.monotonic()
            self.doing = op
            try:
                self.enqueue(op)
            except Exception as error:  # noqa: BLE001 - the loop lives on
                self._failed(error)
            self.doing = None
            if (took_s := time.monotonic() - began_s) > LONG_S:
                quick.took(op.key, took_s)
            return True

    def append(self, function: Callable[[], None]) -> None:
        """Run `function` on the execute thread after all ops before; from any thread."""
        with self._submitting:
            self._submitted += 1
            self.thread.put(deque([RunFunction(function)]))

    def close(self) -> None:
        """Run no more ops."""
        self._closed = True

    def _pays_here(self, ops: Sequence[Op], urgent: bool) -> bool:
        """Whether the loop runs `ops` in less time than a change of threads takes.

        With many ops at once, or one soon after the other, the execute thread stays awake and works
        at the same time as the loop.
        """
        if len(ops) > _FEW_OPS or not self._takes_no_time(ops[0]):
            return False
        return urgent or isinstance(ops[0], Watch) or self._quick.comes_alone(time.monotonic())

    def _takes_no_time(self, op: Op) -> bool:
        if isinstance(op, Execute):
            return self._quick.may_run(op)
        if isinstance(op, View):
            return all(is_made(source.value) for source in op.sources)
        return isinstance(op, Watch)

    def _run_here(self, ops: deque[Op]) -> None:
        """Run and remove the first ops that take no time, one at least; none of them submits anything."""
        if not jax.enable_x64.value:  # an embedded host
            with jax.enable_x64(True):
                return self._run_here(ops)
        goes_on = True
        while goes_on:
            op = ops.popleft()
            began_s = time.monotonic()
            self._run(deque((op,)))
            if isinstance(op, Execute):
                self._quick.took(op.key, time.monotonic() - began_s)
            goes_on = bool(ops) and self._takes_no_time(ops[0])
        return None

    def _run_batch(self, ops: deque[Op]) -> None:
        self._run(ops)
        self._ended += 1

    def _run(self, ops: deque[Op]) -> None:
        """Run `ops`. A delay between two collectives costs ten times itself: their threads fall
        asleep."""
        handlers = self.handlers
        while ops and not self._closed:
            # Removed from the batch, so that its arguments can be freed while later ops run.
            self.doing = op = ops.popleft()
            try:
                handlers[type(op)](op)
            except Exception as error:  # noqa: BLE001 - the thread lives on
                self._failed(error)
        self.doing = None
