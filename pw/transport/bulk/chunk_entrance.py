"""Takes the connections that others dial for chunks, until it is known what each is for.

    stranger -preamble, handshake, RECEIVE-> the sender's: a client waits for pushes there
    stranger -preamble, handshake, any other header-> the receiver's
    stranger -anything else, `STRANGER_S`, too many strangers-> closed

The number of strangers is bounded, in all and for each address: beyond a bound the oldest is
dropped, so that idle ones keep no good one out. A node's listener hands over connections that it
has accepted (`adopt`); a plane without a node listens at a socket of its own.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pw.core.errors import AccessRefused, Error
from pw.transport.access.unix import is_trusted
from pw.transport.bulk.chunk_dial import ChunkDialler
from pw.transport.bulk.chunk_stream import Stream
from pw.transport.bulk.chunks import HEADER, MAGIC, RECEIVE, plane_of, prepare
from pw.transport.bulk.pieces import Unwatch, Watch
from pw.transport.endpoints import CHUNKS_PREAMBLE, listen, reachable_endpoint, unlisten
from pw.transport.links.admission import Access
from pw.transport.links.entrance import crowded_out

STRANGER_S = 5.0


@dataclass(slots=True, eq=False)
class _Stranger:
    socket: socket.socket
    host: str
    peer: str
    since_s: float
    preamble: bytes = b""
    stream: Stream | None = None
    head: memoryview = field(default_factory=lambda: memoryview(bytearray(HEADER.size)))
    missing: memoryview = field(default_factory=lambda: memoryview(b""))


class ChunkEntrance:
    """Admits connections to the ends of a plane; on the bulk thread.

    Args:
        watch, unwatch: those of the bulk thread.
        dialler: knows how the process uses tcp.
        sends: takes the stream of a plane that receives over it; False if another process is that plane.
        receives: takes the stream of a sender, and its first header.
        reject: counts a stranger that is refused.
    """

    def __init__(
        self,
        watch: Watch,
        unwatch: Unwatch,
        dialler: ChunkDialler,
        sends: Callable[[str, Stream], bool],
        receives: Callable[[Stream, bytes], None],
        reject: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._dialler = dialler
        self._sends = sends
        self._receives = receives
        self._reject = reject
        self._access = Access("bulk", dialler.security.credentials)
        self._strangers: dict[int, _Stranger] = {}
        self._listener: socket.socket | None = None
        self._listening = False

    @property
    def owed(self) -> bool:
        """Whether it waits for a descriptor, or for a stranger."""
        return bool(self._strangers) or self._listening is (self._listener is None)

    def listen(self, endpoint: str) -> str:
        """Listen, before the thread starts; where senders reach this process.

        Raises:
            ConnectionFailed: the endpoint cannot be listened on.
        """
        self._listener = listen(endpoint)
        self._listening = True
        self._watch(self._listener.fileno(), self.ready, False)
        return reachable_endpoint(self._listener, None)

    def adopt(self, connection: socket.socket) -> None:
        """Take a connection that a node's listener has accepted."""
        try:
            peer = "local"
            if connection.family != socket.AF_UNIX:
                host, port = connection.getpeername()[:2]
                peer = f"{host}:{port}"
            prepare(connection)
        except OSError:  # the sender is gone
            connection.close()
            return
        if not is_trusted(connection):
            self._reject()
            connection.close()
            return
        host = peer.rpartition(":")[0]
        self._make_room(host)
        stranger = _Stranger(connection, host, peer, time.monotonic())
        self._strangers[connection.fileno()] = stranger
        self._watch(connection.fileno(), self.ready, False)

    def ready(self, descriptor: int, readable: bool, writable: bool) -> None:
        stranger = self._strangers.get(descriptor)
        if stranger is None:
            self._accept()
            return
        try:
            if self._take(stranger):
                self._introduce(stranger)
        except BlockingIOError:
            stream = stranger.stream
            if stream is not None and writable != stream.has_unsent:
                self._watch(descriptor, self.ready, stream.has_unsent)
        except Error as error:
            self._refuse(stranger, str(error))
        except OSError:
            self._drop(stranger)

    def expire(self) -> None:
        """Drop old strangers; listen again after a lack of descriptors."""
        if self._listener is not None and not self._listening:
            self._listening = True
            self._watch(self._listener.fileno(), self.ready, False)
        until_s = time.monotonic() - STRANGER_S
        for stranger in list(self._strangers.values()):
            if stranger.since_s < until_s:
                self._refuse(stranger, f"it has not introduced itself within {STRANGER_S:g} s")

    def close(self) -> None:
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        if self._listener is not None:
            unlisten(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._reject()
            self._listening = False
            self._unwatch(self._listener.fileno())
            return
        self.adopt(connection)

    def _take(self, stranger: _Stranger) -> bool:
        """Receive what has come; whether the first header is whole.

        Raises:
            Error: the stranger is refused.
            OSError: it is gone; BlockingIOError if bytes are missing.
        """
        while stranger.stream is None:
            data = stranger.socket.recv(len(CHUNKS_PREAMBLE) - len(stranger.preamble))
            stranger.preamble += data
            if not data or not CHUNKS_PREAMBLE.startswith(stranger.preamble):
                raise AccessRefused("it does not speak this protocol") if data else ConnectionError
            if stranger.preamble == CHUNKS_PREAMBLE:
                stranger.stream = self._dialler.accepted(stranger.socket)
                stranger.missing = stranger.head
        stream = stranger.stream
        if not stream.is_open and not stream.shake():
            raise BlockingIOError
        while stranger.missing:
            count = stream.receive_into(stranger.missing)
            if not count:
                raise ConnectionResetError
            stranger.missing = stranger.missing[count:]
        return True

    def _introduce(self, stranger: _Stranger) -> None:
        """Hand a stranger's stream to the end that it is for."""
        stream = stranger.stream
        assert stream is not None
        head = bytes(stranger.head)
        magic, kind, high, low, _ = HEADER.unpack(head)
        if magic != MAGIC:
            raise AccessRefused("it does not speak this protocol")
        del self._strangers[stranger.socket.fileno()]
        if kind != RECEIVE:
            self._receives(stream, head)
        elif not self._sends(plane_of(high, low), stream):
            self._strangers[stranger.socket.fileno()] = stranger
            raise AccessRefused("it says that it is the receiver that another process is")

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        identity = stranger.stream.identity if stranger.stream is not None else None
        self._access.refused(stranger.peer, identity, reason)
        self._reject()
        self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        descriptor = stranger.socket.fileno()
        if self._strangers.pop(descriptor, None) is not None:
            self._unwatch(descriptor)
            with contextlib.suppress(OSError):
                (stranger.stream or stranger.socket).close()

    def _make_room(self, host: str) -> None:
        """Drop the oldest stranger if there are too many."""
        oldest = crowded_out({one: one.host for one in self._strangers.values()}, host)
        if oldest is not None:
            self._reject()
            self._drop(oldest)
