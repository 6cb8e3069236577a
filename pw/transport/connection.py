"""One ZMTP connection on an event loop.

There is no thread and no stream object between the loop and the socket. When `send` returns, the
frame is in the kernel, or waits here, in order, until the socket is writable.

A connection that was dialled tries again until a peer has answered its greeting; frames wait until
then. After it has been open, its end is final, because nothing tells which frames have arrived.

    dialling -connected, greetings exchanged-> open
    dialling -refused, cut off, no greeting in time-> dialling, after a pause
    accepted -greetings exchanged-> open
    accepted, open -end of stream, error, bytes that are not ZMTP-> closed
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import deque
from itertools import islice
from typing import Protocol

from pw.transport import nearby
from pw.transport.codec import MAX_FRAME_BYTES
from pw.transport.endpoints import SocketAddress, is_numeric, look_up
from pw.transport.peers import is_trusted
from pw.transport.zmtp import Refusal, Zmtp, ZmtpError

LOST = "connection lost"
"""The reason when the peer's process has ended."""
HANDSHAKE_S = 5.0
RETRY_S, RETRY_MAX_S = 0.05, 1.0
READ_BYTES, READ_MAX_BYTES = 1 << 16, 1 << 20
_READS_AT_ONCE = 200
_WRITES_AT_ONCE = 64


class Owner(Protocol):
    """The network that made a connection."""

    def received(self, connection: Connection, parts: list[bytes]) -> None:
        """A message has come."""

    def ended(self, connection: Connection, reason: str) -> None:
        """The connection has been closed by the peer, or the kernel."""

    def refused(self, connection: Connection, reason: str) -> None:
        """The connection has closed, because one end does not trust the other."""

    def is_behind(self) -> bool:
        """Whether nothing is received now; senders wait when buffers are full."""


class Connection:
    """Sends and receives whole messages without ever blocking.

    Args:
        loop: the event loop to live on.
        owner: gets messages, and the end.
        end: the address to dial, or the socket of an accepted connection.
        send_buffer_bytes: the size of the kernel's buffer; 0 for its choice.
        secret: of the cluster; None without one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        owner: Owner,
        end: SocketAddress | socket.socket,
        send_buffer_bytes: int = 0,
        secret: bytes | None = None,
    ) -> None:
        self.closed = False
        self.heard_s = loop.time()
        """When bytes came that were not one whole message; of those, the owner knows."""
        self._loop = loop
        self._owner = owner
        self._send_buffer_bytes = send_buffer_bytes
        self._secret = secret
        self._socket: socket.socket | None = None
        self._zmtp = Zmtp(b"DEALER", 0)
        self._open = False
        self._early: list[bytes] = []
        self._waiting: deque[bytes | memoryview] = deque()
        self._undelivered = False
        self._retry_s = RETRY_S
        self._timer: asyncio.TimerHandle | None = None
        self._where: SocketAddress | None = None
        self._tries_nearby = True
        if isinstance(end, SocketAddress):
            self._where = end
            self._dial()
        else:
            self._set_timer()
            self._begin(end, b"ROUTER")

    @property
    def is_waiting(self) -> bool:
        """Whether frames wait until the socket is writable."""
        return bool(self._waiting)

    def send(self, frame: bytes) -> bool:
        """Send now, or in order when the socket is writable; False if it is not."""
        if not self._open:
            self._early.append(frame)
            return True
        data = self._zmtp.message(frame)
        if self._waiting:
            self._waiting.append(data)
            return False
        return self._write(data)

    def receive(self) -> bool:
        """Receive all that has come; True if there may be more."""
        return all(self._read() for _ in range(_READS_AT_ONCE))

    def withdraw(self) -> list[bytes]:
        """Close a connection that is not open yet, and return its unsent frames.

        Returns an empty list, and changes nothing, if it is open.
        """
        if self._open:
            return []
        unsent, self._early = self._early, []
        self.close()
        return unsent

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; blocks up to `linger_s` to send the waiting frames."""
        if self.closed:
            return
        self.closed = True
        if self._socket is not None and self._open and linger_s > 0:
            with contextlib.suppress(OSError):
                self._socket.settimeout(linger_s)
                self._socket.sendall(b"".join(self._waiting))
        self._waiting.clear()
        self._hang_up()

    # --- connecting ----------------------------------------------------------------------------

    def _dial(self) -> None:
        assert self._where is not None
        if is_numeric(self._where):
            self._connect(self._where)
        else:
            asking = self._loop.run_in_executor(None, look_up, self._where)
            asking.add_done_callback(self._looked_up)

    def _looked_up(self, answer: asyncio.Future[SocketAddress]) -> None:
        error = answer.exception()
        if self.closed:
            return
        if error is None:
            self._connect(answer.result())
        else:
            self._end(str(error))

    def _connect(self, where: SocketAddress) -> None:
        self._set_timer()
        near = nearby.dial(where) if self._tries_nearby else None
        if near is not None:
            # If this fails, the next attempt uses tcp.
            self._tries_nearby = False
            self._begin(near, b"DEALER")
            return
        try:
            self._socket = socket.socket(where.family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            code = self._socket.connect_ex(where.address)
        except OSError as error:
            self._end(str(error))
            return
        if code == errno.EINPROGRESS:
            self._loop.add_writer(self._socket, self._connected)
        else:
            self._connected(code)

    def _connected(self, code: int | None = None) -> None:
        assert self._socket is not None
        if code is None:
            self._loop.remove_writer(self._socket)
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(errno.errorcode[code])
        elif not is_trusted(self._socket):
            self._end("another user's process listens there")
        else:
            self._begin(self._socket, b"DEALER")

    def _begin(self, connected: socket.socket, kind: bytes) -> None:
        self._socket = connected
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._send_buffer_bytes:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        self._zmtp = Zmtp(kind, MAX_FRAME_BYTES, self._secret)
        self._loop.add_reader(connected, self._read)
        self._say()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(HANDSHAKE_S, self._end, "no answer to the greeting")

    def _opened(self) -> None:
        self._open = True
        if self._timer is not None:
            self._timer.cancel()
        early, self._early = self._early, []
        for frame in early:
            self.send(frame)

    # --- writing -------------------------------------------------------------------------------

    def _write(self, data: bytes) -> bool:
        if self._socket is None:
            return True
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:  # the peer is gone; its last messages are read before the end
            return True
        if sent == len(data):
            return True
        self._waiting.appendleft(memoryview(data)[sent:])
        self._loop.add_writer(self._socket, self._write_waiting)
        return False

    def _write_waiting(self) -> None:
        assert self._socket is not None
        waiting = self._waiting
        try:
            while waiting:
                sent = self._socket.sendmsg(list(islice(waiting, _WRITES_AT_ONCE)))
                while sent:
                    if sent < len(waiting[0]):
                        waiting[0] = memoryview(waiting[0])[sent:]
                        break
                    sent -= len(waiting.popleft())
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._socket, self._write_waiting)
            return
        except OSError:
            waiting.clear()
        self._loop.remove_writer(self._socket)

    def _say(self) -> None:
        """Send the bytes of the protocol itself."""
        data = b"".join(self._zmtp.output)
        self._zmtp.output.clear()
        if self._open and self._waiting:
            self._waiting.append(data)
        else:
            self._write(data)

    # --- reading -------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read once and deliver; False if nothing came, or the owner is behind."""
        if self._socket is None or self._undelivered or self._owner.is_behind():
            return False
        size = min(max(READ_BYTES, self._zmtp.missing_bytes), READ_MAX_BYTES)
        try:
            data = self._socket.recv(size)
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        except OSError as error:
            self._end(f"{LOST}: {error.strerror}")
            return False
        if not data:
            self._end(LOST)
            return False
        body = self._zmtp.whole(data)
        if body is not None:
            self._owner.received(self, [body])
            return True
        self.heard_s = self._loop.time()
        self._zmtp.feed(data)
        self._deliver()
        return True

    def _deliver(self) -> None:
        self._undelivered = False
        zmtp, owner = self._zmtp, self._owner
        try:
            while not self.closed:
                if owner.is_behind():
                    self._undelivered = True
                    self._loop.call_soon(self._deliver)
                    break
                parts = zmtp.next_message()
                if parts is None:
                    break
                owner.received(self, parts)
        except Refusal as error:
            self._hang_up()
            self.closed = True
            self._waiting.clear()
            owner.refused(self, str(error))
        except ZmtpError as error:
            self._end(f"not ZMTP: {error}")
        if self.closed or self._socket is None:
            return
        if zmtp.output:
            self._say()
        if zmtp.open and not self._open:
            self._opened()

    # --- the end -------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        self._hang_up()
        if self._where is not None and not self._open:
            self._timer = self._loop.call_later(self._retry_s, self._dial)
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        else:
            self.closed = True
            self._waiting.clear()
            self._owner.ended(self, reason)

    def _hang_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
