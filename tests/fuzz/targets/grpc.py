"""HTTP/2 and gRPC of the gateway, and the messages of JAX's remote protocol."""

from __future__ import annotations

import asyncio
import base64
import functools
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError

from pw.core.errors import Disconnected
from pw.gateway.protocol import frames, protos, rpc, shardings
from pw.gateway.protocol.statuses import StatusError
from pw.gateway.server import Server
from tests.fuzz.target import Run, Target

_PROXY = "xla.ifrt.proxy."
_METHODS = ("GetVersion", "IfrtSession", "HostBufferStore", "HostBufferLookup", "HostBufferDelete")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream)
    return head + payload


def _call(stream: int, method: str, message: bytes, more: int = 0) -> bytes:
    stored = protos.message(_PROXY + "GrpcHostBufferStoreMetadata")(session_id=1, handle=2)
    headers = [
        (b":method", b"POST"),
        (b":path", f"/xla.ifrt.proxy.GrpcIfrtService/{method}".encode()),
        (b"content-type", b"application/grpc"),
        (
            b"ifrt-proxy-grpc-host-buffer-store-metadata-bin",
            base64.b64encode(stored.SerializeToString()),
        ),
    ]
    block = rpc.header_block(headers)
    half = len(block) // 2
    body = struct.pack(">BI", 0, len(message)) + message
    if more:
        opening = _frame(frames.HEADERS, 0, stream, block[:half]) + _frame(
            frames.CONTINUATION, frames.END_HEADERS, stream, block[half:]
        )
    else:
        opening = _frame(frames.HEADERS, frames.END_HEADERS, stream, block)
    return opening + _frame(frames.DATA, frames.END_STREAM, stream, body)


def http2_seeds() -> list[bytes]:
    """Return what clients send on a connection."""
    version = protos.message(_PROXY + "GrpcGetVersionRequest")()
    version.min_version.protocol_version = 16
    version.max_version.protocol_version = 20
    request = protos.message(_PROXY + "IfrtRequest")()
    request.request_metadata.op_id = 1
    request.init_request.SetInParent()
    settings = _frame(frames.SETTINGS, 0, 0, struct.pack(">HIHI", 4, 1 << 20, 5, 1 << 15))
    opening = frames.PREFACE + settings + _frame(frames.SETTINGS, frames.ACK, 0, b"")
    bodies = {"GetVersion": version.SerializeToString(), "IfrtSession": request.SerializeToString()}
    calls = [
        _call(1 + 2 * at, name, bodies.get(name, b"\x08\x01"), at % 2)
        for at, name in enumerate(_METHODS)
    ]
    others = [
        _frame(frames.PING, 0, 0, bytes(8)),
        _frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1000)),
        _frame(frames.PRIORITY, 0, 1, bytes(5)),
        _frame(frames.RST_STREAM, 0, 1, bytes(4)),
        _frame(frames.DATA, frames.PADDED, 1, b"\x02abc\0\0"),
        _frame(frames.GOAWAY, 0, 0, bytes(8)),
    ]
    return [
        opening,
        *[opening + call for call in calls],
        opening + b"".join(calls) + b"".join(others),
        *[opening + calls[1] + other for other in others],
    ]


class _Transport:
    """Takes what a connection writes."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.is_closed = False
        self.written = 0

    def get_extra_info(self, name: str) -> Any:
        return self._end

    def writelines(self, parts: list[Any]) -> None:
        self.written += sum(map(len, parts))

    def close(self) -> None:
        self.is_closed = True

    abort = close


@contextmanager
def _served() -> Iterator[Run]:
    ends = socket.socketpair()
    failed: list[object] = []

    async def connect() -> Any:
        raise Disconnected("there is no cluster")

    async def take(server: Server, data: bytes) -> None:
        transport = _Transport(ends[0])
        connection = server.new_connection()
        connection.connection_made(transport)
        step = 1 + (len(data) * 7 + sum(data[-8:])) % 997
        for at in range(0, len(data), step):
            if transport.is_closed:
                break
            connection.data_received(data[at : at + step])
        await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert transport.written <= 1000 + 50 * len(data), "it says more than it hears"

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: failed.append(context))
    server = Server(connect)

    def run(data: bytes) -> None:
        loop.run_until_complete(take(server, data))
        assert not failed, failed.pop()

    try:
        yield run
    finally:
        loop.close()
        for end in ends:
            end.close()


_MESSAGES = (
    "xla.CompileOptionsProto",
    "xla.OpSharding",
    _PROXY + "IfrtRequest",
    _PROXY + "GrpcHostBufferStoreMetadata",
    _PROXY + "GrpcGetVersionRequest",
)


def _filled(message: Any, depth: int = 0) -> Any:
    """Set every field of a message, to some depth."""
    for field in message.DESCRIPTOR.fields:
        value: Any = {1: 1.5, 2: 1.5, 8: True, 9: "text", 12: b"bytes", 14: None}.get(field.type, 7)
        into = getattr(message, field.name)
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry or depth > 1:
                continue
            if field.is_repeated:
                _filled(into.add(), depth + 1)
            else:
                into.SetInParent()
                _filled(into, depth + 1)
        elif field.type == 14:
            number = field.enum_type.values[-1].number
            into.append(number) if field.is_repeated else setattr(message, field.name, number)
        elif field.is_repeated:
            into.append(value)
        else:
            setattr(message, field.name, value)
    return message


def _messages() -> list[bytes]:
    found = []
    for name in _MESSAGES:
        found.append(_filled(protos.message(name)()).SerializeToString())
    request = protos.message(_PROXY + "IfrtRequest")
    for field in request.DESCRIPTOR.fields:
        if field.message_type is not None:
            one = request()
            getattr(one, field.name).SetInParent()
            _filled(getattr(one, field.name), -1)
            found.append(one.SerializeToString())
    return found


@functools.cache
def _parsers() -> list[Callable[[bytes], Any]]:
    return [protos.message(name).FromString for name in _MESSAGES]


def _parse(data: bytes) -> None:
    parsed, refused = 0, DecodeError()
    for parse in _parsers():
        try:
            parse(data)
            parsed += 1
        except DecodeError as error:
            refused = error
    if not parsed:
        raise refused


def _sharding_seeds() -> list[bytes]:
    made = []
    for kind, filled in (
        ("SingleDeviceSharding", {"device_id": 1}),
        ("ConcreteEvenSharding", {"is_fully_replicated": True}),
        ("ConcreteSharding", {}),
        ("OpaqueSharding", {}),
    ):
        said = protos.message(f"xla.ifrt.{kind}Proto")(**filled)
        if hasattr(said, "devices"):
            said.devices.device_ids.extend((0, 1))
        if kind == "ConcreteEvenSharding":
            said.shape.dims.extend((4, 4))
            said.shard_shape.dims.extend((2, 4))
        made.append((kind, said))
    for op in (
        {"type": 0},
        {"type": 3, "tile_assignment_dimensions": [2, 1], "tile_assignment_devices": [0, 1]},
    ):
        said = protos.message("xla.ifrt.HloShardingProto")()
        said.devices.device_ids.extend((0, 1))
        said.xla_op_sharding.CopyFrom(protos.message("xla.OpSharding")(**op))
        made.append(("HloSharding", said))
    found = []
    for kind, said in made:
        proto = protos.message("xla.ifrt.ShardingProto")()
        proto.serialized_sharding.type_name = "xla::ifrt::" + kind
        proto.serialized_sharding.data = said.SerializeToString()
        found.append(proto.SerializeToString())
    return found


def _read_sharding(data: bytes) -> None:
    shardings.read(protos.message("xla.ifrt.ShardingProto").FromString(data), (4, 4))


TARGETS = [
    Target("http2", http2_seeds, opened=_served, weight=1),
    Target("protos", _messages, _parse, allowed=(DecodeError,), weight=15),
    Target(
        "shardings", _sharding_seeds, _read_sharding, allowed=(DecodeError, StatusError), weight=4
    ),
]
