"""Host buffers: the bytes that a client sends before, or fetches after, a request names them.

A buffer may be named before its bytes are here, by a request or by the client's lookup. So each
handle is a future.
"""

from __future__ import annotations

import asyncio
from typing import Any


class HostBuffers:
    """The host buffers of one client by their handles; used on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buffers: dict[int, asyncio.Future[Any]] = {}
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._buffers)

    def _future(self, handle: int) -> asyncio.Future[Any]:
        future = self._buffers.get(handle)
        if future is None:
            future = self._buffers[handle] = self._loop.create_future()
            if self._error is not None:
                future.set_exception(self._error)
                future.exception()  # seen: nobody may ask for it
        return future

    def put(self, handle: int, data: Any) -> None:
        """Settle a buffer with its bytes."""
        future = self._future(handle)
        if not future.done():
            future.set_result(data)

    def fail(self, handle: int, error: BaseException) -> None:
        """Settle a buffer with the reason why its bytes will not come."""
        future = self._future(handle)
        if not future.done():
            future.set_exception(error)
            future.exception()

    async def get(self, handle: int) -> Any:
        """Return the bytes, as soon as they are here."""
        return await self._future(handle)

    async def take(self, handle: int) -> Any:
        """Return the bytes, and forget the buffer."""
        try:
            return await self._future(handle)
        finally:
            self.drop(handle)

    def drop(self, handle: int) -> None:
        """Forget a buffer."""
        self._buffers.pop(handle, None)

    def close(self, error: BaseException) -> None:
        """Fail all buffers whose bytes are not here."""
        self._error = error
        for handle in list(self._buffers):
            self.fail(handle, error)
