"""A client of the gateway that speaks its protocol byte by byte, and so can break it anywhere."""

from __future__ import annotations

import base64
import contextlib
import itertools
import socket
import struct
from typing import Any, Self
from urllib.parse import unquote

from hpack import Decoder

from pw.gateway.protocol import protos
from pw.gateway.protocol.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)
from pw.gateway.protocol.rpc import header_block

PROXY = "xla.ifrt.proxy."
STORE = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
BOUND_S = 60.0


def framed(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


class Wire:
    """One connection: frames to and from the gateway, at `grpc://host:port`."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("grpc://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), BOUND_S)
        self._socket.sendall(PREFACE)
        self.frame(SETTINGS, 0, 0, b"")
        self.frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30))
        self._decoder = Decoder()
        self._numbers = itertools.count(1, 2)
        self._messages: dict[int, bytearray] = {}
        self._endings: dict[int, dict[str, str]] = {}

    def frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Send one frame."""
        self._socket.sendall(framed(kind, flags, stream, payload))

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(data)

    def open(self, method: str, metadata: dict[str, bytes] | None = None) -> int:
        """Open a stream; returns its number."""
        number = next(self._numbers)
        headers = [
            (b":method", b"POST"),
            (b":path", f"/xla.ifrt.proxy.GrpcIfrtService/{method}".encode()),
            (b"content-type", b"application/grpc"),
        ]
        for name, value in (metadata or {}).items():
            headers.append((name.encode(), base64.b64encode(value)))
        self.frame(HEADERS, END_HEADERS, number, header_block(headers))
        self._messages[number] = bytearray()
        return number

    def message(self, stream: int, data: bytes, last: bool = False) -> None:
        """Send one message of a stream."""
        self.frame(DATA, END_STREAM if last else 0, stream, struct.pack(">BI", 0, len(data)) + data)

    def _read(self) -> None:
        """Take one frame. Raises EOFError."""
        head = self._exactly(9)
        kind, flags = head[3], head[4]
        stream = int.from_bytes(head[5:9], "big")
        payload = self._exactly(int.from_bytes(head[:3], "big"))
        if kind == SETTINGS and not flags & ACK:
            self.frame(SETTINGS, ACK, 0, b"")
        elif kind == DATA:
            self._messages[stream] += payload
        elif kind == HEADERS:
            headers: Any = self._decoder.decode(payload)
            if flags & END_STREAM:
                self._endings[stream] = dict(headers)
        elif kind == RST_STREAM:
            self._endings[stream] = {"grpc-status": "reset"}

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def answer(self, stream: int) -> bytes | None:
        """Return the stream's next message; None if it has ended."""
        buffer = self._messages[stream]
        while True:
            if len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
                message = bytes(buffer[5 : 5 + size])
                del buffer[: 5 + size]
                return message
            if stream in self._endings:
                return None
            self._read()

    def ending(self, stream: int) -> tuple[str, str]:
        """Return the status that a stream ends with, and its words."""
        while stream not in self._endings:
            self._read()
        headers = self._endings[stream]
        return headers["grpc-status"], unquote(headers.get("grpc-message", ""))

    def is_closed(self) -> bool:
        """Wait for the end of the connection; False if the gateway keeps it."""
        try:
            while True:
                self._read()
        except (EOFError, ConnectionError):
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        """End the connection as a killed client does."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Talker(Wire):
    """A client with a session."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._operations = itertools.count(1)
        self._replies: dict[int, Any] = {}
        self.stream = self.open("IfrtSession", {"ifrt-proxy-grpc-ifrt-session-metadata-bin": b""})
        self.session = self.ask("init_request").init_response.session_id

    def request(self, kind: str, **fields: Any) -> Any:
        """Return a request without sending it."""
        request = protos.message(PROXY + "IfrtRequest")()
        request.request_metadata.op_id = next(self._operations)
        body = getattr(request, kind)
        body.SetInParent()
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(body, name).extend(value)
            elif isinstance(value, str | int | bytes):
                setattr(body, name, value)
            else:
                getattr(body, name).CopyFrom(value)
        return request

    def send(self, request: Any) -> int:
        """Send a request; returns the number of its operation."""
        self.message(self.stream, request.SerializeToString())
        return int(request.request_metadata.op_id)

    def reply(self, operation: int) -> Any:
        """Return the reply to an operation; replies come in any order."""
        while operation not in self._replies:
            data = self.answer(self.stream)
            assert data is not None, self.ending(self.stream)
            reply = protos.message(PROXY + "IfrtResponse").FromString(data)
            self._replies[reply.response_metadata.op_id] = reply
        return self._replies.pop(operation)

    def ask(self, kind: str, **fields: Any) -> Any:
        """Send a request, and return the reply."""
        return self.reply(self.send(self.request(kind, **fields)))

    def refusal(self, kind: str, **fields: Any) -> tuple[int, str]:
        """Return the code and the words that a request is refused with."""
        status = self.ask(kind, **fields).response_metadata.status
        return status.code, status.message

    def store(self, handle: int, size: int) -> int:
        """Open the stream of a host buffer; returns the stream's number."""
        said = protos.message(PROXY + "GrpcHostBufferStoreMetadata")(
            session_id=self.session, handle=handle, buffer_size=size
        )
        return self.open("HostBufferStore", {STORE: said.SerializeToString()})

    def chunk(self, stream: int, data: bytes, last: bool = False) -> None:
        """Send bytes of a host buffer."""
        made = protos.message(PROXY + "GrpcHostBufferStoreRequest")(data=data)
        self.message(stream, made.SerializeToString(), last)

    def array_request(self, buffer: int, array: int, size: int, device: int = 0) -> Any:
        """Return the request for an array of float32 on one device, from a host buffer."""
        place = protos.message("xla.ifrt.SingleDeviceShardingProto")(
            device_id=device, memory_kind="device"
        )
        request = self.request(
            "make_array_from_host_buffer_request", host_buffer_handle=buffer, array_handle=array
        )
        body = request.make_array_from_host_buffer_request
        body.dtype.kind = protos.enum("xla.ifrt.DTypeProto.Kind")["KIND_F32"]
        body.shape.dims.append(size)
        body.sharding.serialized_sharding.type_name = "xla::ifrt::SingleDeviceSharding"
        body.sharding.serialized_sharding.data = place.SerializeToString()
        return request
