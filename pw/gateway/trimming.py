"""Gives the memory of large host buffers back to the machine.

The C library keeps freed memory for the next allocation. Between buffers that are freed in another order
than they came it keeps much more than was ever in use at once.
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_BYTES = 128 << 20
"""So many bytes of host buffers come between one trim, which takes milliseconds, and the next."""


class Trimming:
    """Trims this process's heap whenever enough host buffers have come since the last time."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """None where the C library has no such function."""
        self._bytes = 0

    def received(self, count: int) -> None:
        """Note that a host buffer of `count` bytes has come."""
        self._bytes += count
        if self._bytes >= TRIM_BYTES and self._trim is not None:
            self._bytes = 0
            asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
