"""Gives the memory of large host buffers back to the machine.

The C library keeps freed memory for the next allocation: after a loop that puts arrays without a wait,
hundreds of megabytes, most of which no one uses again.
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_BYTES = 64 << 20
"""So many bytes of host buffers are worth a trim, which takes milliseconds."""
QUIET_S = 1.0
"""How long no buffer must have come before one."""


class Trimming:
    """Trims this process's heap when host buffers have come, and no more come for a while."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """None where the C library has no such function."""
        self._bytes = 0
        self._seen_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def received(self, count: int) -> None:
        """Note that a host buffer of `count` bytes has come."""
        self._bytes += count
        if self._timer is None and self._bytes >= TRIM_BYTES and self._trim is not None:
            self._later()

    def _later(self) -> None:
        self._seen_bytes = self._bytes
        self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._look)

    def _look(self) -> None:
        if self._bytes != self._seen_bytes:
            self._later()
            return
        self._timer, self._bytes = None, 0
        assert self._trim is not None
        self._trim(0)  # releases the GIL, and keeps the loop: no request waits now
