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

With credentials each tcp connection is TLS, and greetings are exchanged only between ends whose
certificates are right. The dialler of TLS 1.3 believes the handshake to be over before the listener
has seen its certificate: a refusal comes in the place of the listener's greeting. Without
credentials, and without `insecure`, a tcp endpoint is dialled only over a unix socket of this
machine (`pw.transport.links.nearby`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from pw.core.errors import AccessRefused, Error
from pw.core.messages.roles import role_of
from pw.transport.access.credentials import Credentials, Identity, explain
from pw.transport.access.security import CLOSED, NEEDS_CREDENTIALS, NO_TLS, NOBODY_NEAR, Security
from pw.transport.access.tls import NotTls, TlsEnd, TlsError, plain_alert
from pw.transport.access.unix import is_trusted
from pw.transport.endpoints import CHUNKS_PREAMBLE, SocketAddress, is_here, is_numeric, look_up
from pw.transport.links import nearby
from pw.transport.links.codec import MAX_FRAME_BYTES
from pw.transport.links.interface import LOST
from pw.transport.links.wire import TlsWire, Wire
from pw.transport.links.zmtp import Refusal, Zmtp, ZmtpError

HANDSHAKE_S = 5.0
RETRY_S, RETRY_MAX_S = 0.05, 1.0
READ_BYTES, READ_MAX_BYTES = 1 << 16, 1 << 20
_READS_AT_ONCE = 200


class Owner(Protocol):
    """The network that made a connection."""

    def received(self, connection: StreamConnection, parts: list[bytes]) -> None:
        """A message has come."""

    def ended(self, connection: StreamConnection, reason: str) -> None:
        """The connection has been closed by the peer, or the kernel."""

    def refused(self, connection: StreamConnection, reason: str) -> None:
        """The connection has closed, because one end refuses the other."""

    def turn_away(self, connection: StreamConnection) -> None:
        """Forget an accepted connection that is for chunks; it has closed."""

    @property
    def take_chunks(self) -> Callable[[socket.socket], None]:
        """Takes the socket of a connection that is for chunks: `BulkPlane.adopt`."""


def _words(error: BaseException) -> str:
    """An error of the system without its number."""
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


class StreamConnection:
    """Sends and receives whole messages without ever blocking.

    Args:
        loop: the event loop to live on.
        owner: gets messages, and the end.
        end: the address to dial, or the socket of an accepted connection.
        send_buffer_bytes: the size of the kernel's buffer; 0 for its choice.
        security: how tcp is used; by default not at all.
        node: the node that is dialled, whose name the peer's certificate must allow; empty for any.
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
    ) -> None:
        self.closed = False
        self.identity: Identity | None = None
        """What the peer's certificate says, also of one that was refused; None without TLS."""
        self.peer = "local"
        """The address of a tcp peer, as host:port."""
        self.heard_s = loop.time()
        """When bytes came that were not one whole message; of those, the owner knows."""
        self.trouble = ""
        """Why the last try to dial has failed, and what the user can do; empty if none has."""
        self.finds_no_peer = False
        """No process that this one could talk to has listened at the address, at any try."""
        self._loop = loop
        self._owner = owner
        self._send_buffer_bytes = send_buffer_bytes
        self._security = security
        self._node = node
        self._wire: Wire | None = None
        self._dialled: socket.socket | None = None
        self._zmtp = Zmtp(b"DEALER", 0)
        self._open = False
        self._early: list[bytes] = []
        self.held = False
        """Nothing is received until `resume`."""
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
            end.setblocking(False)
            with contextlib.suppress(OSError):  # it is gone, which the first read says
                self._name_peer(end)
            self._dialled = end
            loop.add_reader(end, self._peek, end)

    @property
    def is_open(self) -> bool:
        """Whether the peer has shown its certificate, if it needs one, and has greeted."""
        return self._open

    @property
    def is_local(self) -> bool:
        """Whether the peer is a process on this machine, of this user or of root."""
        return self._wire is not None and self._wire.socket.family == socket.AF_UNIX

    @property
    def is_waiting(self) -> bool:
        """Whether frames wait until the socket is writable."""
        return self._wire is not None and self._wire.is_blocked

    @property
    def waiting_bytes(self) -> int:
        """The bytes of frames that wait, because the peer reads more slowly than this process sends."""
        return 0 if self._wire is None else self._wire.waiting_bytes

    def send(self, frame: bytes) -> bool:
        """Send now, or in order when the socket is writable; False if it is not."""
        if not self._open:
            self._early.append(frame)
            return True
        wire = self._wire
        return wire is None or wire.send(self._zmtp.message(frame))

    def receive(self) -> bool:
        """Receive all that has come; True if there may be more."""
        return all(self._read() for _ in range(_READS_AT_ONCE))

    def hold(self) -> None:
        """Receive nothing until `resume`; the sender has to wait when the buffers are full."""
        if self._wire is not None and not self.held:
            self.held = True
            self._loop.remove_reader(self._wire.socket)

    def resume(self) -> None:
        """Receive again after `hold`."""
        self._loop.call_soon(self._resumed)

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
        self._hang_up(linger_s if self._open else 0.0)

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

    def _peek(self, accepted: socket.socket) -> None:
        """Find out by the first byte whether a link begins, or a connection for chunks."""
        try:
            first = accepted.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        self._loop.remove_reader(accepted)
        self._dialled = None
        if first != CHUNKS_PREAMBLE[:1]:
            self._begin(accepted, b"ROUTER")
            return
        self.closed = True
        self._hang_up()
        self._owner.turn_away(self)
        self._owner.take_chunks(accepted)

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
            self._wire = Wire(self._loop, connected)
            self._loop.add_reader(connected, self._read)
            self._say()
            return
        listens = self._where is None
        tls = TlsEnd(credentials.accept() if listens else credentials.connect(), listens)
        self._wire = wire = TlsWire(self._loop, connected, tls)
        self._loop.add_reader(connected, self._shake, wire, credentials)

    def _shake(self, wire: TlsWire, credentials: Credentials) -> None:
        """Receive a part of the handshake of TLS; at its end, begin that of ZMTP."""
        listens = self._where is None
        try:
            if not wire.shake():
                return
            role = role_of(self._node) if self._node else None
            self.identity = credentials.identify(wire.tls.certificate, role)
            if self._node and not self.identity.may_be(self._node):
                words = f"its certificate is that of {self.identity}, not of {self._node}"
                raise AccessRefused(words)
            early = wire.tls.feed(b"")
        except (BlockingIOError, InterruptedError):
            return
        except NotTls:
            if listens:
                with contextlib.suppress(OSError):
                    wire.socket.send(plain_alert())
            self._refused(NO_TLS)
        except ssl.SSLError as error:
            self._refused(explain(error))
        except (TlsError, OSError) as error:
            self._end(str(error))
        except Error as error:
            self.identity = credentials.shown(wire.tls.certificate)
            if listens:
                self._zmtp.refuse(str(error))
                self._say()
            self._refused(str(error))
        else:
            self._loop.add_reader(wire.socket, self._read)
            self._say()
            if early:
                self._take(early)

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(HANDSHAKE_S, self._end, "no answer to the greeting")

    def _opened(self) -> None:
        self._open = True
        if self._timer is not None:
            self._timer.cancel()
        early, self._early = self._early, []
        for frame in early:
            self.send(frame)

    def _say(self) -> None:
        """Send the bytes of ZMTP itself."""
        data = b"".join(self._zmtp.output)
        self._zmtp.output.clear()
        if self._wire is not None:
            self._wire.send(data)

    # --- reading -------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read once and deliver; False if nothing came, or nothing is received now."""
        if self._wire is None or self.held:
            return False
        size = min(max(READ_BYTES, self._zmtp.missing_bytes), READ_MAX_BYTES)
        try:
            data = self._wire.receive(size)
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        except ssl.SSLError as error:
            if self._open:
                self._end(f"{LOST}: {error.reason}")
            else:  # the listener refuses the certificate of this end
                self._refused(explain(error))
            return False
        except OSError as error:
            self._end(f"{LOST}: {error.strerror}")
            return False
        if data is None:  # a part of a record of TLS
            self.heard_s = self._loop.time()
            return True
        if not data:
            self._end(LOST)
            return False
        body = self._zmtp.whole(data)
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
        if self.closed or self._wire is None:
            return
        if zmtp.output:
            self._say()
        if zmtp.open and not self._open:
            self._opened()

    def _resumed(self) -> None:
        if self._wire is None or not self.held:
            return
        self.held = False
        self._deliver()  # what has come is taken before more is read
        if self._wire is not None and not self.held:
            self._loop.add_reader(self._wire.socket, self._read)

    # --- the end -------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """Dial again, or close for good if the connection has been open or was accepted."""
        self._hang_up()
        if self._where is not None and not self._open:
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
        if self._wire is not None:
            self._wire.close(linger_s)
            self._wire = None
