"""One ZMTP connection on an event loop.

There is no thread and no stream object between the loop and the socket. When `send` returns, the
frame is in the kernel, or waits here, in order, until the socket is writable.

A connection that was dialled tries again until a peer has answered its greeting; frames wait until
then. After it has been open, its end is final, because nothing tells which frames have arrived.

    dialling -connected, greetings exchanged-> open
    dialling -cut off, no greeting in time-> dialling, after a pause
    accepted -greetings exchanged-> open
    accepted, open -end of stream, error, bytes that are not ZMTP-> closed
    dialling, accepted -one end refuses the other-> closed
    accepted -the first header of a connection for chunks-> handed over to the bulk plane

With credentials each tcp connection is TLS, and greetings are exchanged only between ends whose
certificates are right (`pw.transport.streams.tls_stream`). Without credentials, and without
`insecure`, a tcp endpoint is dialled only over a unix socket of this machine
(`pw.transport.links.nearby`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Protocol

from pw.core.errors import AccessRefused
from pw.transport.access.security import CLOSED, NEEDS_CREDENTIALS, NOBODY_NEAR, Security
from pw.transport.access.unix import is_trusted
from pw.transport.endpoints import (
    CHUNKS_HEAD_BYTES,
    CHUNKS_MAGIC,
    SocketAddress,
    is_here,
    is_numeric,
    look_up,
)
from pw.transport.links import nearby
from pw.transport.links.acknowledged import unanswered_s
from pw.transport.links.codec import MAX_FRAME_BYTES
from pw.transport.links.interface import LOST, Connection
from pw.transport.links.strangers import HANDSHAKE_S
from pw.transport.links.zmtp import Refusal, Zmtp, ZmtpError
from pw.transport.streams.stream import Stream
from pw.transport.streams.tls_stream import TlsStream

RETRY_S, RETRY_MAX_S = 0.05, 1.0
READ_BYTES, READ_MAX_BYTES = 1 << 16, 1 << 20
_READS_AT_ONCE = 200

TakeChunks = Callable[[Stream, bytes], None]
"""Takes a connection for chunks, and its first header: `BulkPlane.adopt`."""


class Owner(Protocol):
    """The network that made a connection."""

    def received(self, connection: StreamConnection, parts: list[bytes]) -> None:
        """Handle a message."""

    def ended(self, connection: StreamConnection, reason: str) -> None:
        """The connection has been closed by the peer, or the kernel."""

    def refused(self, connection: StreamConnection, reason: str) -> None:
        """The connection has closed, because one end refuses the other."""

    def turn_away(self, connection: StreamConnection) -> None:
        """Forget an accepted connection that is for chunks; it has closed."""

    @property
    def take(self) -> Callable[[Callable[[], object]], None]:
        """Reads what has come, and handles it now or soon."""

    @property
    def take_chunks(self) -> TakeChunks:
        """Takes connections that are for chunks."""


def _words(error: BaseException) -> str:
    """An error of the system without its number."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


class StreamConnection(Connection):
    """Sends and receives whole messages without ever blocking.

    Args:
        loop: the event loop to live on.
        owner: gets messages, and the end.
        end: the address to dial, or the socket of an accepted connection.
        send_buffer_bytes: the size of the kernel's buffer; 0 for its choice.
        security: how tcp is used; by default not at all.
        node: the node that is dialled, whose name the peer's certificate must allow; empty for any.
        handshake_s: seconds that the peer may take to say who it is.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        owner: Owner,
        end: SocketAddress | socket.socket,
        send_buffer_bytes: int = 0,
        *,
        security: Security = CLOSED,
        node: str = "",
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        super().__init__()
        self.handshake_s = handshake_s
        self.heard_s = loop.time()
        self._loop = loop
        self._owner = owner
        self._send_buffer_bytes = send_buffer_bytes
        self._security = security
        self._node = node
        self.stream: Stream | None = None
        """The bytes of the connection; None until a socket is connected, and after the end."""
        self._dialled: socket.socket | None = None
        self._zmtp = Zmtp(b"DEALER", 0)
        self._early: list[bytes] = []
        self._head = bytearray()
        """First bytes of a process that has dialled, until they show what begins."""
        self._retry_s = RETRY_S
        self._timer: asyncio.TimerHandle | None = None
        self._where: SocketAddress | None = None
        self._tries_nearby = security.credentials is None
        self._has_met = False
        if isinstance(end, SocketAddress):
            self._where = end
            self._dial()
        else:
            self._set_timer()
            self._begin(end, b"ROUTER")

    @property
    def is_local(self) -> bool:
        """Whether the peer is a process on this machine, of this user or of root."""
        return self.stream is not None and self.stream.socket.family == socket.AF_UNIX

    @property
    def number(self) -> int:
        """The descriptor of the socket; -1 without one that `read` may read."""
        return self.stream.socket.fileno() if self.is_open and self.stream is not None else -1

    @property
    def waiting_bytes(self) -> int:
        """The bytes of frames that wait, because the peer reads more slowly than this process sends."""
        return 0 if self.stream is None else self.stream.waiting_bytes

    @property
    def unanswered_s(self) -> float:
        """Return the seconds without an acknowledgement (see `Connection.unanswered_s`)."""
        return 0.0 if self.stream is None else unanswered_s(self.stream.socket)

    def send(self, frame: bytes) -> bool:
        """Send now, or in order when the socket is writable; False if it is not."""
        if not self.is_open:
            self._early.append(frame)
            return True
        stream = self.stream
        if stream is None or stream.send(self._zmtp.message(frame)):
            return True
        self._await_room(stream)
        return False

    def _await_room(self, stream: Stream) -> None:
        if not self.is_waiting:
            self.is_waiting = True
            self._loop.add_writer(stream.socket, self._writable, stream)

    def _writable(self, stream: Stream) -> None:
        try:
            stream.flush()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(stream.socket, self._writable, stream)
            return
        except OSError:
            stream.drop()
        self.is_waiting = False
        self._loop.remove_writer(stream.socket)

    def receive(self) -> bool:
        """Receive all that has come; True if there may be more."""
        return all(self.read() for _ in range(_READS_AT_ONCE))

    def hold(self) -> None:
        """Receive nothing until `resume`; the sender has to wait when the buffers are full."""
        if self.stream is not None and not self.held:
            self.held = True
            self._loop.remove_reader(self.stream.socket)

    def resume(self) -> None:
        """Receive again after `hold`."""
        self._loop.call_soon(self._resumed)

    def withdraw(self) -> list[bytes]:
        """Close a connection that is not open yet, and return its unsent frames.

        Returns an empty list, and changes nothing, if it is open.
        """
        if self.is_open:
            return []
        unsent, self._early = self._early, []
        self.close()
        return unsent

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; blocks up to `linger_s` to send the waiting frames."""
        if self.closed:
            return
        self.closed = True
        self._hang_up(linger_s if self.is_open else 0.0)

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
            self._end(f"the name of its host cannot be looked up ({_words(error)})")

    def _connect(self, where: SocketAddress) -> None:
        self._set_timer()
        near = nearby.dial(where) if self._tries_nearby else None
        if near is not None:
            # If this fails, the next attempt uses tcp.
            self._tries_nearby = not self._security.insecure
            self._begin(near, b"DEALER")
            return
        if where.family != socket.AF_UNIX and not self._security.takes_tcp and not is_here(where):
            reason = f"it is on another machine, and {NEEDS_CREDENTIALS}"
            self._loop.call_soon(self._refused, reason)
            return
        try:
            self._dialled = socket.socket(where.family, socket.SOCK_STREAM)
            self._dialled.setblocking(False)
            code = self._dialled.connect_ex(where.address)
        except OSError as error:
            self._end(_words(error))
            return
        if code == errno.EINPROGRESS:
            self._loop.add_writer(self._dialled, self._connected)
        else:
            self._connected(code)

    def _connected(self, code: int | None = None) -> None:
        dialled = self._dialled
        assert dialled is not None
        if code is None:
            self._loop.remove_writer(dialled)
            code = dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code in (errno.ECONNREFUSED, errno.ENOENT):
            self._end_alone(f"nothing listens there ({os.strerror(code)})")
        elif code:
            self._end(os.strerror(code))
        elif dialled.family != socket.AF_UNIX and not self._security.takes_tcp:
            self._end_alone(NOBODY_NEAR)  # that is all that the connection was for
        elif not is_trusted(dialled):
            self._end("another user's process listens there")
        else:
            self._dialled = None
            self._begin(dialled, b"DEALER")

    def _name_peer(self, connected: socket.socket) -> None:
        if connected.family != socket.AF_UNIX:
            self.peer = "{}:{}".format(*connected.getpeername())

    def _begin(self, connected: socket.socket, kind: bytes) -> None:
        self._has_met, self.finds_no_peer = True, False
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it is gone, which the first read says
                self._name_peer(connected)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._send_buffer_bytes:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        self._zmtp = Zmtp(kind, MAX_FRAME_BYTES)
        credentials = None if connected.family == socket.AF_UNIX else self._security.credentials
        if credentials is None:
            self.stream = stream = Stream(connected)
        else:
            dialled = self._where is not None
            self.stream = stream = TlsStream(
                connected, credentials, dialled=dialled, node=self._node
            )
        self._loop.add_reader(connected, self._shake, stream)
        if self._where is not None:
            self._shake(stream)

    def _shake(self, stream: Stream) -> None:
        """Receive a part of the handshake of TLS; at its end, begin that of ZMTP."""
        try:
            is_over = stream.shake()
        except AccessRefused as error:
            self.identity = stream.identity
            self._refused(str(error))
            return
        except OSError as error:
            self._end(_words(error))
            return
        if stream.has_unsent:
            self._await_room(stream)
        if not is_over:
            return
        self.identity = stream.identity
        if self._where is None:
            self._loop.add_reader(stream.socket, self._meet, stream)
            self._meet(stream)
        else:
            self._greet(stream, b"")

    def _meet(self, stream: Stream) -> None:
        """Receive the first bytes of a dialler: a greeting of ZMTP, or a header of chunks."""
        head = bytearray(CHUNKS_HEAD_BYTES - len(self._head))
        try:
            count = stream.receive_into(memoryview(head))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self._end(LOST)
            return
        self._head += head[:count]
        magic = bytes(self._head[: len(CHUNKS_MAGIC)])
        if not CHUNKS_MAGIC.startswith(magic):
            self._greet(stream, bytes(self._head))
        elif len(self._head) == CHUNKS_HEAD_BYTES:
            self._loop.remove_reader(stream.socket)
            self.stream, self.closed = None, True
            self._hang_up()
            self._owner.turn_away(self)
            self._owner.take_chunks(stream, bytes(self._head))

    def _greet(self, stream: Stream, first: bytes) -> None:
        """Begin the handshake of ZMTP, of which bytes may have come."""
        self._loop.add_reader(stream.socket, self._owner.take, self.read)
        self._say()
        if early := first + stream.held():
            self._take(early)

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(
            self.handshake_s, self._end, "no answer to the greeting"
        )

    def _opened(self) -> None:
        self.is_open = True
        if self._timer is not None:
            self._timer.cancel()
        early, self._early = self._early, []
        for frame in early:
            self.send(frame)

    def _say(self) -> None:
        """Send the bytes of ZMTP itself."""
        data = b"".join(self._zmtp.output)
        self._zmtp.output.clear()
        if self.stream is not None and not self.stream.send(data):
            self._await_room(self.stream)

    # --- reading -------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read once and deliver; False if nothing came, or nothing is received now."""
        if self.stream is None or self.held:
            return False
        size = min(max(READ_BYTES, self._zmtp.missing_bytes), READ_MAX_BYTES)
        try:
            data = self.stream.receive(size)
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        except OSError as error:
            self._end(f"{LOST}: {_words(error)}")
            return False
        if data is None:  # a part of a record of TLS
            self.heard_s = self._loop.time()
            return True
        if not data:
            self._end(LOST)
            return False
        body = self._zmtp.single(data)
        if body is None:
            self._take(data)
        else:
            self._owner.received(self, [body])
        return True

    def _take(self, data: bytes) -> None:
        self.heard_s = self._loop.time()
        self._zmtp.feed(data)
        self._deliver()

    def _deliver(self) -> None:
        zmtp, owner = self._zmtp, self._owner
        try:
            while not self.closed and not self.held:
                parts = zmtp.next_message()
                if parts is None:
                    break
                owner.received(self, parts)
        except Refusal as error:
            self._refused(str(error))
        except ZmtpError as error:
            self._end(f"not ZMTP: {error}")
        if self.closed or self.stream is None:
            return
        if zmtp.output:
            self._say()
        if zmtp.open and not self.is_open:
            self._opened()

    def _resumed(self) -> None:
        if self.stream is None or not self.held:
            return
        self.held = False
        self._deliver()  # what has come is taken before more is read
        if self.stream is not None and not self.held:
            self._loop.add_reader(self.stream.socket, self._owner.take, self.read)

    # --- the end -------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """Dial again, or close for good if the connection has been open or was accepted."""
        self._hang_up()
        if self._where is not None and not self.is_open:
            self.trouble = reason
            self._timer = self._loop.call_later(self._retry_s, self._dial)
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        else:
            self.closed = True
            self._owner.ended(self, reason)

    def _end_alone(self, reason: str) -> None:
        """Dial again: there is no peer to talk to."""
        self.finds_no_peer = not self._has_met
        self._end(reason)

    def _refused(self, reason: str) -> None:
        """Close for good: one end refuses the other."""
        if self.closed:
            return
        self._hang_up()
        self.closed = True
        self._owner.refused(self, reason)

    def _hang_up(self, linger_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._dialled is not None:
            self._loop.remove_reader(self._dialled)
            self._loop.remove_writer(self._dialled)
            self._dialled.close()
            self._dialled = None
        if self.stream is not None:
            self._loop.remove_reader(self.stream.socket)
            self._loop.remove_writer(self.stream.socket)
            self.is_waiting = False
            self.stream.close(linger_s)
            self.stream = None
