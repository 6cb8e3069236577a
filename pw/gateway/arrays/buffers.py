"""Host buffers: the bytes that a client sends before, or fetches after, a request names them.

A buffer may be named before its bytes are here, by a request or by the client's lookup. So each
handle is a future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pw.core.errors import TransferFailed


class HostBuffers:
    """The host buffers of one client by their handles; used on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buffers: dict[int, asyncio.Future[Any]] = {}
        self._lookups: dict[int, list[Callable[[asyncio.Future[Any]], None]]] = {}
        """Functions that are called at once when a buffer is settled."""
        self._coming: set[int] = set()
        """Buffers whose bytes the client has begun to send."""
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._buffers)

    def _future(self, handle: int) -> asyncio.Future[Any]:
        future = self._buffers.get(handle)
        if future is None:
            future = self._buffers[handle] = self._loop.create_future()
            if self._error is not None:
                _fail(future, self._error)
        return future

    def begin(self, handle: int) -> None:
        """The client begins to send a buffer; `put` or `fail` follows."""
        self._coming.add(handle)

    def put(self, handle: int, data: Any) -> None:
        """Settle a buffer with its bytes."""
        future = self._future(handle)
        if not future.done():
            future.set_result(data)
            self._tell(handle, future)

    def fail(self, handle: int, error: BaseException) -> None:
        """Settle a buffer with the reason why its bytes will not come."""
        future = self._future(handle)
        if not future.done():
            _fail(future, error)
            self._tell(handle, future)

    def fail_missing(self, handles: Sequence[int]) -> None:
        """Fail those of these buffers that the client, which opens no more streams, has not begun to send."""
        for handle in handles:
            if handle not in self._coming:
                self.fail(
                    handle, TransferFailed("the client left without sending this host buffer")
                )

    def _tell(self, handle: int, future: asyncio.Future[Any]) -> None:
        self._coming.discard(handle)
        for call in self._lookups.pop(handle, ()):
            call(future)

    def are_here(self, handles: Sequence[int]) -> bool:
        """Whether the bytes of all these buffers are here, or will not come."""
        return all(self._future(handle).done() for handle in handles)

    def when_all_here(self, handles: Sequence[int], call: Callable[[], object]) -> None:
        """Call `call` when the bytes of all these buffers are here, or will not come."""
        missing = next((at for at, one in enumerate(handles) if not self._future(one).done()), None)
        if missing is None:
            call()
        else:
            rest = handles[missing + 1 :]
            self.when_here(handles[missing], lambda _: self.when_all_here(rest, call))

    def take(self, handle: int) -> Any:
        """Return the bytes that are here, and forget the buffer. Raises why they will not come."""
        future = self._future(handle)
        del self._buffers[handle]
        return future.result()

    def when_here(self, handle: int, call: Callable[[asyncio.Future[Any]], None]) -> None:
        """Call `call` with the settled future."""
        future = self._future(handle)
        if future.done():
            call(future)
        else:
            self._lookups.setdefault(handle, []).append(call)

    @property
    def are_awaited(self) -> bool:
        """Whether the client waits for a buffer that is not here."""
        return bool(self._lookups)

    def drop(self, handle: int) -> None:
        """Forget a buffer; what waits for it fails."""
        if handle in self._lookups:
            self.fail(handle, TransferFailed("the client has deleted this host buffer"))
        else:
            self._buffers.pop(handle, None)

    def close(self, error: BaseException) -> None:
        """Fail all buffers whose bytes are not here."""
        self._error = error
        for handle in list(self._buffers):
            self.fail(handle, error)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    future.set_exception(error)
    future.exception()  # seen: it is no fault if no request asks for the buffer
