"""Copies that several threads make together: the bulk thread, and helpers.

One thread does not use all of a machine's memory bandwidth. Each thread takes the next piece of the next
copy, so no copy delays another for longer than a piece takes, and a helper that gets no processor
delays none.

A helper must not delay launches, whose threads run for some 0.1 ms at a time, many after each other. It
rests after each piece. If it then wakes late, another thread wants its processor, and it backs off for
about as long as a launch takes.

A copy is *over* when no piece is left and no thread is at one. Only then its arrays may be freed, and
its receiver told:

    begin -> queued -the last piece is taken-> all taken -the last thread is done-> over -> settled
               |                                  ^
               +-an error: its pieces are dropped-+
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from pw.core.processors import processors
from pw.transport.bulk.blocks import Array, Bytes, Mapping
from pw.transport.bulk.pieces import Push, cut, place

PIECE_BYTES = 512 << 10
"""Bytes that a thread copies without a pause, in some 0.1 ms."""
PIECES_AT_ONCE = 8
"""Pieces that the bulk thread copies between two looks at its sockets."""
MOST_THREADS = 4
"""Threads that copy at the same time."""
REST_S = 30e-6
"""Seconds for which a helper leaves its processor to other threads after each piece."""
LATE_S = 100e-6
"""Most seconds of a rest; a longer one shows that another thread wants the processor."""
BACK_OFF_S = 1e-3
"""Seconds for which a helper that woke late copies nothing."""
_PR_SET_TIMERSLACK = 29


@dataclass(slots=True, eq=False)
class Target:
    """A receiver's block, mapped here: its bytes, and the transfer that may write there now."""

    mapping: Mapping
    bytes: Bytes
    word: npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Copy:
    """A transfer that is being copied."""

    push: Push
    target: Target
    pieces: deque[tuple[int, Array]] = field(default_factory=deque)
    """Pieces that no thread has taken."""
    threads: int = 0
    """Threads that copy a piece now."""
    error: str = ""
    """Reason why the transfer fails; empty if it does not."""


class Copying:
    """The copies of a bulk thread, which calls all public methods.

    Args:
        wake: called on a helper when a copy is over.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._copies: set[Copy] = set()
        """Copies that are not settled."""
        self._queue: deque[Copy] = deque()
        """Copies that have pieces."""
        self._over: deque[Copy] = deque()
        self._helpers: list[threading.Thread] = []
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """Calls for helpers; False ends one."""

    def begin(self, push: Push, target: Target) -> None:
        """Copy a push into its target, from the next `work` on."""
        copy = Copy(push, target)
        try:
            copy.pieces.extend(cut(push.parts, PIECE_BYTES))
        except Exception as error:  # noqa: BLE001 - an array that cannot be read fails its push only
            copy.error = _unreadable(error)
            copy.pieces.clear()
        is_long = len(copy.pieces) > PIECES_AT_ONCE
        with self._lock:
            self._copies.add(copy)
            (self._queue if copy.pieces else self._over).append(copy)
        if is_long:
            self._call_helpers()

    def work(self) -> bool:
        """Copy some pieces, of each copy in turn; False if there were none."""
        copied = 0
        while copied < PIECES_AT_ONCE and self._step():
            copied += 1
        return copied > 0

    def give_up(self, receiver: str, why: str) -> None:
        """Fail the copies to a receiver."""
        with self._lock:
            for copy in self._copies:
                if copy.push.landing.socket == receiver:
                    was_queued = bool(copy.pieces)
                    self._stop(copy, why)
                    if was_queued and not copy.threads:
                        self._over.append(copy)

    def settled(self) -> Iterator[Copy]:
        """Yield each copy that is over, and forget it."""
        while self._over:
            copy = self._over.popleft()
            with self._lock:
                self._copies.discard(copy)
            yield copy

    def close(self) -> None:
        """End the helpers, each after its piece."""
        for _ in self._helpers:
            self._calls.put(False)
        for helper in self._helpers:
            helper.join()

    def _step(self) -> bool:
        """Copy one piece; False if there was none. On any of the threads."""
        with self._lock:
            if not self._queue:
                return False
            copy = self._queue.popleft()
            piece = copy.pieces.popleft()
            copy.threads += 1
            if copy.pieces:
                self._queue.append(copy)
        error = _copied(copy, piece)
        with self._lock:
            copy.threads -= 1
            if error:
                self._stop(copy, error)
            is_over = not copy.pieces and not copy.threads
            if is_over:
                self._over.append(copy)
        if is_over and threading.current_thread() in self._helpers:
            self._wake()
        return True

    def _stop(self, copy: Copy, why: str) -> None:
        """Drop the pieces that are left; under the lock."""
        copy.error = copy.error or why
        if copy.pieces:
            self._queue.remove(copy)
            copy.pieces.clear()

    def _call_helpers(self) -> None:
        if not self._helpers:
            self._helpers = [
                threading.Thread(target=self._help, name=f"pw-bulk-{number}", daemon=True)
                for number in range(1, min(MOST_THREADS, processors()))
            ]
            for helper in self._helpers:
                helper.start()
        for _ in self._helpers:
            self._calls.put(True)

    def _help(self) -> None:
        """Copy pieces whenever called, as long as no other thread wants the processor."""
        if sys.platform == "linux":
            # By default a thread may sleep for 50 µs longer, which is more than a rest.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        while self._calls.get():
            while self._step():
                began_s = time.monotonic()
                time.sleep(REST_S)
                if time.monotonic() - began_s > LATE_S:
                    time.sleep(BACK_OFF_S)


def _copied(copy: Copy, piece: tuple[int, Array]) -> str:
    """Copy a piece to its place; return an error, or an empty text."""
    if copy.target.word[0] != copy.push.landing.transfer:
        return "the receiver does not want these bytes any more"
    try:
        place(copy.target.bytes, *piece)
    except Exception as error:  # noqa: BLE001 - an array that cannot be read fails its push only
        return _unreadable(error)
    return ""


def _unreadable(error: Exception) -> str:
    return f"an array cannot be read to be sent: {error!r}"
