"""The server of the gateway: clients' connections, and the streams of their host buffers.

Each `IfrtSession` stream is one client with names of its own. It gets a session of the runtime from
`connect`, and when the stream ends, all that the client has is released.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from pw.client.connection.runtime import Runtime
from pw.core.errors import Error, TransferFailed
from pw.gateway.arrays.devices import Devices
from pw.gateway.clients.requests import GatewayClient
from pw.gateway.functions import Script
from pw.gateway.protocol import protos, rpc, statuses
from pw.gateway.protocol.http2 import Http2Connection, Http2Stream
from pw.gateway.protocol.replies import varint
from pw.gateway.trimming import Trimming
from pw.transport.access.unix import is_foreign

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
"""JAX's client copies the bytes of each message twice: small ones stay in its caches."""
PROTOCOLS = (16, 25)
"""The versions of the protocol that the gateway has been tried with."""
BUFFER_BYTES = 64 << 30
"""The largest host buffer."""

Connect = Callable[[], Awaitable[tuple[Runtime, Devices, Callable[[], object]]]]
"""Function that is called for each client; returns its session, its devices, and what ends the session."""

_SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"
_PROXY = "xla.ifrt.proxy."
_STORE = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"


def _refuses(transport: Any) -> bool:
    """Whether another user of this machine has connected: JAX shows no credentials, the kernel knows."""
    with closing(transport.get_extra_info("socket").dup()) as end:
        refused = is_foreign(end)
    if refused:
        logger.warning("another user of this machine has connected, and is refused")
    return refused


class Server:
    """Serves clients.

    Args:
        connect: gives each client a session.
        files: the folder in which the client, on this machine, leaves large host buffers; None for none.
        script: runs the functions that clients' computations call; None for none.
    """

    def __init__(
        self, connect: Connect, files: Path | None = None, script: Script | None = None
    ) -> None:
        self._connect = connect
        self._files = files
        self._script = script
        self.clients: dict[int, GatewayClient] = {}
        self._next = 1
        self.trimming = Trimming()
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None
        self._requests = {
            name: protos.message(f"{_PROXY}Grpc{name}Request")
            for name in (
                "GetVersion",
                "HostBufferLookup",
                "HostBufferDelete",
                "HostBufferReadFromDisk",
            )
        }
        self.store_metadata = protos.message(_PROXY + "GrpcHostBufferStoreMetadata")
        self._unary = {
            "GetVersion": self._version,
            "HostBufferDelete": self._delete,
            "HostBufferReadFromDisk": self._read_file,
            "HostBufferLookup": self._lookup,
        }

    async def start(self, address: str | tuple[str, int]) -> int:
        """Listen at the path of a unix socket, or at a host and a port; returns the port.

        Raises:
            OSError: it cannot.
        """
        loop = asyncio.get_running_loop()
        if isinstance(address, str):
            self._server = await loop.create_unix_server(self.new_connection, address)
            return 0
        self._server = await loop.create_server(self.new_connection, *address)
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        for client in list(self.clients.values()):
            client.close()

    def new_connection(self) -> Http2Connection:
        """Return the protocol of a client that connects."""
        connection = Http2Connection(self._open, self._connections.discard, _refuses)
        self._connections.add(connection)
        return connection

    def _open(self, stream: Http2Stream, headers: list[tuple[bytes, bytes]]) -> None:
        fields = dict(headers)
        name = fields.get(b":path", b"").decode(errors="replace").removeprefix(_SERVICE)
        if name == "IfrtSession":
            _Session(self, stream, fields)
        elif name == "HostBufferStore":
            _Store(self, stream, fields)
        elif name in self._unary:
            request, handle = self._requests[name], self._unary[name]
            rpc.Unary(stream, fields, lambda call, data: _handled(call, request, data, handle))
        else:
            rpc.Unary(stream, fields, lambda call, data: None).end(
                rpc.UNIMPLEMENTED, f"the gateway of pw has no method {name}"
            )

    # --- sessions ------------------------------------------------------------------------------------

    async def begin(self) -> tuple[GatewayClient, Callable[[], object]]:
        """Begin a session for a client; returns the client, and what ends the session."""
        runtime, devices, end = await self._connect()
        number = self._next
        self._next += 1
        client = self.clients[number] = GatewayClient(runtime, devices, number, self._script)
        return client, end

    def _version(self, call: rpc.Unary, request: Any) -> None:
        least, most = request.min_version, request.max_version
        if least.protocol_version > PROTOCOLS[1] or most.protocol_version < PROTOCOLS[0]:
            call.end(
                rpc.FAILED_PRECONDITION,
                f"the client speaks the versions {least.protocol_version} to {most.protocol_version} of JAX's "
                f"remote protocol, and this gateway of pw {PROTOCOLS[0]} to {PROTOCOLS[1]}; install the "
                "same version of jaxlib in both places",
            )
            return
        answer = protos.message(_PROXY + "GrpcGetVersionResponse")()
        answer.version.CopyFrom(most)
        answer.version.protocol_version = min(most.protocol_version, PROTOCOLS[1])
        call.answer(answer.SerializeToString())

    # --- host buffers --------------------------------------------------------------------------------

    def client(self, number: int) -> GatewayClient | None:
        """Return a client by the number of its session."""
        return self.clients.get(number)

    def _lookup(self, call: rpc.Unary, request: Any) -> None:
        client = self.client(request.session_id)
        if client is None:
            call.end(rpc.NOT_FOUND, "there is no such session")
            return

        is_late = not client.buffers.are_here([request.handle])

        def send(here: asyncio.Future[Any]) -> None:
            if (error := here.exception()) is not None:
                call.end(*statuses.status_of(error))
                return
            content = memoryview(here.result())
            for at in range(0, len(content), CHUNK_BYTES):
                chunk = content[at : at + CHUNK_BYTES]
                call.send_large(_head(len(chunk)), chunk)
            if not len(content):
                call.send(b"")
            call.end()
            if is_late and not client.buffers.are_awaited:
                call.hurry()

        client.buffers.when_here(request.handle, send)

    def _delete(self, call: rpc.Unary, request: Any) -> None:
        if (client := self.client(request.session_id)) is not None:
            client.buffers.drop(request.handle)
        call.answer(b"")

    def _read_file(self, call: rpc.Unary, request: Any) -> None:
        metadata = request.metadata
        client = self.client(metadata.session_id)
        if self._files is None or client is None:
            call.end(rpc.UNIMPLEMENTED, "this gateway shares no folder with clients")
            return
        path = self._files / f"lt_{metadata.handle}"
        try:
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), metadata.buffer_size, prot=mmap.PROT_READ)
            path.unlink()  # the memory stays until nothing refers to it
        except (OSError, ValueError) as error:
            client.buffers.fail(metadata.handle, error)
            call.end(rpc.NOT_FOUND, f"the host buffer {path.name} cannot be read: {error}")
            return
        client.buffers.put(metadata.handle, data)
        call.answer(b"")


class _Session(rpc.RpcCall):
    """The stream of one client's requests and their replies."""

    def __init__(self, server: Server, stream: Http2Stream, headers: dict[bytes, bytes]) -> None:
        super().__init__(stream, headers)
        self._server = server
        self._client: GatewayClient | None = None
        self._early: list[bytes] = []
        self._request = protos.message(_PROXY + "IfrtRequest")
        self._end: Callable[[], object] = lambda: None
        self._beginning = asyncio.get_running_loop().create_task(self._begin())

    async def _begin(self) -> None:
        try:
            client, self._end = await self._server.begin()
        except Error as error:
            self.end(rpc.UNAVAILABLE, str(error))
            return
        except Exception:
            logger.exception("a session could not begin")
            self.end(rpc.INTERNAL, "the gateway could not begin a session; its log says why")
            return
        self._client = client
        client.order.reply = lambda reply, is_awaited: self.send(reply, is_awaited=is_awaited)
        client.order.hurry = self.hurry
        if self.is_over:
            self._leave()
            return
        for data in self._early:
            self.message(data)
        self._early.clear()

    def message(self, data: bytes) -> None:
        """Handle a request."""
        if self._client is None:
            if not self.is_over:
                self._early.append(data)
            return
        try:
            request = self._request.FromString(data)
        except Exception as error:  # noqa: BLE001 - protobuf has its own errors in each version
            self.end(rpc.INVALID_ARGUMENT, f"a request cannot be read: {error}")
            return
        self._client.order.feed(request)

    def ended(self) -> None:
        """The client leaves, when what it has called before is handled."""
        client = self._client
        if client is None:
            self.end()
        else:
            client.order.leave(self.end)

    def end(self, code: int = rpc.OK, words: str = "", *, is_awaited: bool = True) -> None:
        """End the stream with a status, and release all that the client has."""
        super().end(code, words, is_awaited=is_awaited)
        self._leave()

    def lost(self) -> None:
        """The client is gone."""
        super().lost()
        self._leave()

    def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._server.clients.pop(client.number, None)
            client.close()
            self._end()


class _Store(rpc.RpcCall):
    """The stream of one host buffer."""

    def __init__(self, server: Server, stream: Http2Stream, headers: dict[bytes, bytes]) -> None:
        super().__init__(stream, headers)
        self._client: GatewayClient | None = None
        self._trimming = server.trimming
        self._at = 0
        self._left = 0
        """Bytes of the message that have not come yet."""
        try:
            request = server.store_metadata.FromString(self.metadata(_STORE))
        except Exception as error:  # noqa: BLE001 - missing, or no message
            self.end(rpc.INVALID_ARGUMENT, f"a host buffer without metadata: {error}")
            return
        self._handle, self._expected = request.handle, request.buffer_size
        self._client = server.client(request.session_id)
        if self._client is None:
            self.end(rpc.NOT_FOUND, "there is no such session")
        elif not 0 <= self._expected <= BUFFER_BYTES:
            self._fail(f"a host buffer of {self._expected} bytes")
        else:
            try:
                self._data: Any = np.empty(self._expected, np.uint8)
            except MemoryError:
                self._fail(f"the gateway has no memory for a host buffer of {self._expected} bytes")
                return
            array: Any = self._data
            self._view = memoryview(array)
            self._client.buffers.begin(self._handle)

    def _fail(self, words: str, code: int = rpc.RESOURCE_EXHAUSTED) -> None:
        if self._client is not None:
            self._client.buffers.fail(self._handle, TransferFailed(words))
        self.end(code, words)

    def received(self, data: memoryview) -> None:
        """Copy bytes to their place as they come: messages may be large."""
        while len(data) and not self.is_over:
            if self._left:
                part = data[: self._left]
                if self._at + len(part) > self._expected:
                    self._fail(
                        f"a host buffer has more than the {self._expected} bytes announced",
                        rpc.DATA_LOSS,
                    )
                    return
                self._view[self._at : self._at + len(part)] = part
                self._at += len(part)
                self._left -= len(part)
                data = data[len(part) :]
                continue
            # The head of a short message is complete, and seven bytes long.
            is_short = not self._buffer and len(data) >= 7 and data[4] == data[6] + 2
            count = 7 if is_short else 1
            self._buffer += data[:count]
            data = data[count:]
            self._parse_head()

    def _parse_head(self) -> None:
        """Read the prefix of a message, and the field that holds its bytes."""
        head = self._buffer
        if len(head) < 5:
            return
        size = int.from_bytes(head[1:5], "big")
        if size == 0:
            head.clear()
            return
        if len(head) < 7 or head[-1] & 0x80:
            if len(head) > 16:
                self._fail("a host buffer's chunk cannot be read", rpc.INVALID_ARGUMENT)
            return
        length = 0
        for shift, byte in enumerate(head[6:]):
            length |= (byte & 0x7F) << 7 * shift
        if head[0] or head[5] != 0x0A or length + len(head) - 5 != size:
            self._fail("a host buffer's chunk cannot be read", rpc.INVALID_ARGUMENT)
            return
        self._left = length
        head.clear()

    def ended(self) -> None:
        """All bytes are here, or some are missing."""
        if self.is_over or self._client is None:
            return
        if self._at != self._expected or self._left:
            self._fail(
                f"a host buffer ended after {self._at} of {self._expected} bytes", rpc.DATA_LOSS
            )
            return
        self._client.buffers.put(self._handle, self._data)
        self._trimming.received(self._expected)
        self.send(b"", is_awaited=False)
        self.end(is_awaited=False)

    def lost(self) -> None:
        """The client is gone."""
        if not self.is_over and self._client is not None:
            words = "the client left in the middle of a host buffer"
            self._client.buffers.fail(self._handle, TransferFailed(words))
        super().lost()


def _handled(
    call: rpc.Unary, request: Any, data: bytes, handle: Callable[[rpc.Unary, Any], None]
) -> None:
    try:
        read = request.FromString(data)
    except Exception as error:  # noqa: BLE001 - protobuf has its own errors in each version
        call.end(rpc.INVALID_ARGUMENT, f"a request cannot be read: {error}")
        return
    handle(call, read)


def _head(size: int) -> bytes:
    """Return what comes before the bytes of a `GrpcHostBufferLookupResponse`."""
    return b"\x0a" + varint(size)
