"""One ZeroMQ socket on an event loop, by its edge-triggered descriptor.

libzmq signals a socket's descriptor when its state changes, and any call on the socket, a send too,
may consume that signal. Three rules follow, and every one of them is a stall if it is left out:

1. When the descriptor fires, receive until there is nothing more. A drain that stops early, to let
   the loop breathe, must ask for another turn by itself.
2. After sends, look at EVENTS again: a send may have swallowed the news that input has come. That
   look costs 3 µs, three times a send, so it is made once for all sends of a loop turn.
3. What could not be sent waits in order, per route, and is tried again whenever anything has
   happened on the socket. A try for one route may swallow the news that another can be written, so
   with several routes waiting a short timer tries them again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq

FRAMES_PER_TURN = 200
RETRY_S = 0.002


class EdgeSocket:
    """Sends and receives whole messages without ever blocking.

    `received(parts)` is called for each message. `unroutable(route)` is called when a ROUTER has no
    peer behind a route. While `paused()` holds, nothing is received, and senders feel it at their
    high-water marks. A DEALER has one route, named b"".
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        received: Callable[[list[bytes]], None],
        unroutable: Callable[[bytes], None],
        paused: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._received = received
        self._unroutable = unroutable
        self._paused = paused
        self._waiting: dict[bytes, deque[bytes]] = {}
        self._look_requested = False
        self._retry: asyncio.TimerHandle | None = None
        self._descriptor: int = socket.FD
        loop.add_reader(self._descriptor, self._ready)
        self._look_soon()

    @property
    def closed(self) -> bool:
        """Whether the socket is gone."""
        return self._socket.closed

    def send(self, route: bytes, frame: bytes) -> bool:
        """Send now, or in order as soon as the route is writable; False if it has to wait."""
        queue = self._waiting.get(route)
        if queue is not None:
            queue.append(frame)
            return False
        self._look_soon()
        try:
            self._put(route, frame)
        except zmq.Again:
            self._waiting[route] = deque((frame,))
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unroutable(route)
        return True

    def is_waiting(self, route: bytes) -> bool:
        """Whether frames for `route` wait until it is writable."""
        return route in self._waiting

    def drop(self, route: bytes) -> None:
        """Forget what waits for `route`."""
        self._waiting.pop(route, None)

    def has_input(self) -> bool:
        """Receive what can be received now; True if something is left."""
        self._ready()
        return not self.closed and bool(self._events() & zmq.POLLIN)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; what was handed to it may still leave within `linger_s`."""
        if not self.closed:
            self._loop.remove_reader(self._descriptor)
            if self._retry is not None:
                self._retry.cancel()
            self._waiting.clear()
            self._socket.close(linger=round(linger_s * 1000))

    def _put(self, route: bytes, frame: bytes) -> None:
        if route:
            self._socket.send(route, zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(frame, zmq.NOBLOCK)

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _look_soon(self) -> None:
        if not self._look_requested:
            self._look_requested = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_requested = False
        if self.closed:
            return
        events = self._events()
        if events & zmq.POLLIN or (self._waiting and events & zmq.POLLOUT):
            self._ready()

    def _ready(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            if self.closed:  # by what was received, or by another callback of this loop turn
                return
            if self._paused():
                self._look_soon()
                break
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._received(parts)
        else:
            self._look_soon()
        if self._waiting and not self.closed:
            self._send_waiting()

    def _send_waiting(self) -> None:
        for route, queue in list(self._waiting.items()):
            try:
                while queue:
                    self._put(route, queue[0])
                    queue.popleft()
                    self._look_soon()
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._waiting.pop(route, None)
                self._unroutable(route)
                continue
            self._waiting.pop(route, None)
        if len(self._waiting) > 1 and self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._ready()
