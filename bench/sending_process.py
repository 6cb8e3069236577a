"""The sender of `bench.transfer` and `bench.secure_bulk`: over the bulk plane or a bare socket.

    python -m bench.sending_process FD BYTES [CREDENTIALS]

FD is a unix socket. With credentials there is a channel `tls`. Each request on the socket is a
length and a msgpack array that begins with a verb:

    ["push", channel, size_bytes, landing]    push into a landing; the bytes are the answer
    ["tcp", host, port]                       connect a bare tcp socket
    ["send", size_bytes]                      send so many bytes over it

It sleeps in its event loop between requests, and ends when the socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from typing import Any

import msgspec
import numpy as np
import uvloop

from pw.core.landing import Landing
from pw.transport.access.credentials import Credentials
from pw.transport.bulk.plane import BulkPlane

CHANNELS = ("shared", "tcp")
LENGTH = struct.Struct("<I")


def request(*parts: object) -> bytes:
    """A request in the form in which it is sent."""
    body = msgspec.msgpack.encode(parts)
    return LENGTH.pack(len(body)) + body


async def serve(control: socket.socket, largest_bytes: int, path: str) -> None:
    """Serve requests from `control` until it is closed."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(sock=control)
    planes = {channel: BulkPlane(loop, channel=channel, insecure=True) for channel in CHANNELS}
    if path:
        planes["tls"] = BulkPlane(loop, channel="tcp", credentials=Credentials.read(path))
    source = np.random.default_rng(0).integers(0, 256, largest_bytes, dtype=np.uint8)
    bare = socket.socket()
    try:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                what, *rest = msgspec.msgpack.decode(await reader.readexactly(length))
                if what == "push":
                    _push(planes, source, *rest)
                elif what == "tcp":
                    bare.connect(tuple(rest))
                    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                else:
                    bare.sendall(source[: rest[0]].data)
    finally:
        for plane in planes.values():
            plane.close()
        bare.close()
        writer.close()


def _push(planes: dict[str, BulkPlane], source: Any, channel: str, size: int, where: Any) -> None:
    landing = msgspec.convert(where, Landing)
    planes[channel].push(landing, [(0, source[:size])], _must_succeed)


def _must_succeed(error: Exception | None) -> None:
    if error is not None:
        raise error


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        control, size_bytes, *path = sys.argv[1:]
        runner.run(serve(socket.socket(fileno=int(control)), int(size_bytes), "".join(path)))
