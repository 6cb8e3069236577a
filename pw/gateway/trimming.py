"""Gives the memory of large host buffers back to the machine.

The C library keeps freed memory for the next allocation: after a loop that puts arrays without a wait,
hundreds of megabytes, most of which no one uses again.
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_BYTES = 64 << 20
"""Bytes of host buffers that are worth a trim, which takes milliseconds."""
QUIET_S = 1.0
"""Seconds without a new buffer before a trim."""


class Trimming:
    """Trims this process's heap when host buffers have come, and no more come for a while."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """Function of the C library that trims; None where it has none."""
        self._bytes = 0
        self._is_waiting = False

    def received(self, count: int) -> None:
        """Note that a host buffer of `count` bytes has come."""
        self._bytes += count
        if not self._is_waiting and self._bytes >= TRIM_BYTES and self._trim is not None:
            self._is_waiting = True
            self._wait()

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(QUIET_S, self._look, self._bytes)

    def _look(self, before: int) -> None:
        if self._bytes != before:
            self._wait()
            return
        self._is_waiting, self._bytes = False, 0
        assert self._trim is not None
        self._trim(0)  # releases the GIL, and keeps the loop: no request waits now
