"""The gRPC server of the gateway: connections of clients, and the streams of their host buffers.

Each connection is one client with names of its own. It uses the session that `serve` was given for
it, and when it ends, all that it has is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from pw.client.connection.runtime import Runtime
from pw.core.errors import TransferFailed
from pw.gateway import protos
from pw.gateway.devices import Devices
from pw.gateway.requests import Client

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
PROTOCOLS = (16, 25)
"""The versions of the protocol that the gateway has been tried with."""

Connect = Callable[[], Awaitable[tuple[Runtime, Devices, Callable[[], object]]]]
"""Called for each client; returns its session, its devices, and what to call when it leaves."""

_PROXY = "xla.ifrt.proxy."
_SESSION = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
_STORE = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"


class Server:
    """Serves clients.

    Args:
        connect: gives each client a session.
        files: the folder in which clients on this machine leave large host buffers; None for none.
    """

    def __init__(self, connect: Connect, files: Path | None = None) -> None:
        self._connect = connect
        self._files = files
        self._clients: dict[int, Client] = {}
        self._next = 1
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((self._service(),))

    def _service(self) -> Any:
        message = protos.message
        request, response = message(_PROXY + "IfrtRequest"), message(_PROXY + "IfrtResponse")
        as_bytes = bytes
        handlers = {
            "GetVersion": grpc.unary_unary_rpc_method_handler(
                self._version,
                message(_PROXY + "GrpcGetVersionRequest").FromString,
                message(_PROXY + "GrpcGetVersionResponse").SerializeToString,
            ),
            "IfrtSession": grpc.stream_stream_rpc_method_handler(
                self._session, request.FromString, response.SerializeToString
            ),
            "HostBufferStore": grpc.stream_unary_rpc_method_handler(self._store, None, as_bytes),
            "HostBufferLookup": grpc.unary_stream_rpc_method_handler(
                self._lookup, message(_PROXY + "GrpcHostBufferLookupRequest").FromString, as_bytes
            ),
            "HostBufferDelete": grpc.unary_unary_rpc_method_handler(
                self._delete, message(_PROXY + "GrpcHostBufferDeleteRequest").FromString, as_bytes
            ),
            "HostBufferReadFromDisk": grpc.unary_unary_rpc_method_handler(
                self._read_file,
                message(_PROXY + "GrpcHostBufferReadFromDiskRequest").FromString,
                as_bytes,
            ),
        }
        return grpc.method_handlers_generic_handler(_PROXY + "GrpcIfrtService", handlers)

    async def start(self, address: str) -> int:
        """Listen at `host:port` or `unix:path`; returns the port (0 can be asked for)."""
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return int(port)

    async def stop(self) -> None:
        """End all connections."""
        await self._server.stop(0)
        for client in list(self._clients.values()):
            client.close()
        self._clients.clear()

    # --- the protocol --------------------------------------------------------------------------------

    async def _version(self, request: Any, context: Any) -> Any:
        least, most = request.min_version, request.max_version
        if least.protocol_version > PROTOCOLS[1] or most.protocol_version < PROTOCOLS[0]:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client speaks the versions {least.protocol_version} to {most.protocol_version} of JAX's "
                f"remote protocol, and this gateway of pw {PROTOCOLS[0]} to {PROTOCOLS[1]}; install the same "
                "version of jaxlib in both places",
            )
        answer = protos.message(_PROXY + "GrpcGetVersionResponse")()
        answer.version.CopyFrom(most)
        answer.version.protocol_version = min(most.protocol_version, PROTOCOLS[1])
        return answer

    async def _session(self, requests: AsyncIterator[Any], context: Any) -> None:
        runtime, devices, leave = await self._connect()
        number = self._next
        self._next += 1
        client = self._clients[number] = Client(runtime, devices, number)

        async def read() -> None:
            try:
                async for request in requests:
                    await client.handle(request)
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("a client's stream of requests has failed client=%d", number)
            finally:
                client.replies.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (reply := await client.replies.get()) is not None:
                await context.write(reply)
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            self._clients.pop(number, None)
            client.close()
            leave()

    def _client(self, number: int) -> Client | None:
        return self._clients.get(number)

    async def _store(self, chunks: AsyncIterator[bytes], context: Any) -> bytes:
        said = dict(context.invocation_metadata())[_STORE]
        metadata = protos.message(_PROXY + "GrpcHostBufferStoreMetadata").FromString(said)
        client = self._client(metadata.session_id)
        if client is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such session")
            raise AssertionError
        handle, size = metadata.handle, metadata.buffer_size
        data: Any = np.empty(size, np.uint8)
        whole, at = memoryview(data), 0
        try:
            async for chunk in chunks:
                part = _content(chunk)
                if at + len(part) > size:
                    raise TransferFailed(f"a host buffer has more than the {size} bytes announced")
                whole[at : at + len(part)] = part
                at += len(part)
            if at != size:
                raise TransferFailed(f"a host buffer ended after {at} of {size} bytes")
        except BaseException as error:
            reason = (
                error if isinstance(error, Exception) else TransferFailed("the client has left")
            )
            client.buffers.fail(handle, reason)
            if not isinstance(error, TransferFailed):
                raise
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        client.buffers.put(handle, data)
        return b""

    async def _lookup(self, request: Any, context: Any) -> None:
        client = self._client(request.session_id)
        if client is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such session")
            raise AssertionError
        try:
            data = await client.buffers.get(request.handle)
        except Exception as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
            raise AssertionError from error
        whole = memoryview(data)
        if not len(whole):
            await context.write(b"")
        for at in range(0, len(whole), CHUNK_BYTES):
            chunk = whole[at : at + CHUNK_BYTES]
            await context.write(b"".join((_header(len(chunk)), chunk)))

    async def _delete(self, request: Any, context: Any) -> bytes:
        if (client := self._client(request.session_id)) is not None:
            client.buffers.drop(request.handle)
        return b""

    async def _read_file(self, request: Any, context: Any) -> bytes:
        metadata = request.metadata
        client = self._client(metadata.session_id)
        if self._files is None or client is None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "this gateway shares no folder with clients"
            )
            raise AssertionError
        path = self._files / f"{metadata.session_id}_{metadata.handle}"
        try:
            data = await asyncio.to_thread(np.fromfile, path, np.uint8)
        except OSError as error:
            client.buffers.fail(metadata.handle, error)
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            raise AssertionError from error
        client.buffers.put(metadata.handle, data)
        return b""


def _content(chunk: bytes) -> memoryview:
    """Return the bytes of a `GrpcHostBufferStoreRequest`, without a copy."""
    whole = memoryview(chunk)
    if not len(whole):
        return whole
    if whole[0] != 0x0A:
        raise TransferFailed("a host buffer's chunk is no message of the protocol")
    size = shift = 0
    at = 1
    while True:
        byte = whole[at]
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if at + size != len(whole):
        raise TransferFailed("a host buffer's chunk is no message of the protocol")
    return whole[at:]


def _header(size: int) -> bytes:
    """Return what comes before the bytes of a `GrpcHostBufferLookupResponse`."""
    header = bytearray(b"\x0a")
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return bytes(header)
