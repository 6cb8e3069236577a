"""The line of a long wait of plain JAX: the gateway knows what is waited for, and the script shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pw.client.connection.waiting import Waiting
from pw.client.display.live import QUIET_S, Screen, patiently


class Waits:
    """The waits of one script; one of them has the line.

    Args:
        loop: the gateway's loop, on which it lives.
        tell: sends a line to the script, and the part of the wait that is over, or "" to remove the line. None
            if the script does not listen.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[str, float | None], None] | None = None,
    ) -> None:
        self._loop = loop
        self._screen = None if tell is None else _Script(loop, tell)
        self._thread = ThreadPoolExecutor(1, "pw-waits")

    def begin(self, future: Future[Any]) -> Callable[[], None]:
        """The script waits for a future of the session; call what this returns when that is over."""
        if self._screen is None or not isinstance(future, Waiting) or future.done():
            return lambda: None
        return self._loop.call_later(QUIET_S, self._long, future).cancel

    def _long(self, future: Waiting[Any]) -> None:
        self._thread.submit(_show, future, time.monotonic() - QUIET_S, self._screen)

    def close(self) -> None:
        """Show nothing any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _show(future: Waiting[Any], began_s: float, screen: Screen | None) -> None:
    if future.about is not None and not future.done():
        waited_s = time.monotonic() - began_s
        patiently(future.settles, future.about, waited_s=waited_s, find_screen=lambda: screen)


class _Script:
    """Its terminal, or the notebook's cell."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tell: Callable[[str, float | None], object]
    ) -> None:
        self._loop = loop
        self._tell = tell

    def show(self, line: str, part: float | None = None) -> None:
        self._loop.call_soon_threadsafe(self._tell, line, part)

    def clear(self) -> None:
        self.show("")
