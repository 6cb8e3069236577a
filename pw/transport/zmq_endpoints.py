"""Making ZeroMQ sockets: every option explicit, every failure in words."""

from __future__ import annotations

import os
import socket as socket_module

import zmq

from pw.core.errors import ConnectionFailed
from pw.transport.codec import MAX_FRAME_BYTES

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_HANDSHAKE_MS = 5000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1000


def make_context() -> Context:
    """A context with room for one socket per peer, as far as the process may have descriptors."""
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def listen(context: Context, endpoint: str, high_water_frames: int) -> Socket:
    """A ROUTER bound to `endpoint`, which reports peers that are gone instead of dropping frames.

    Raises:
        ConnectionFailed: the endpoint is taken, or makes no sense.
    """
    socket = _make(context, zmq.ROUTER, high_water_frames)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConnectionFailed(
            f"cannot listen on {endpoint}: {error.strerror}; "
            "stop what uses it, or choose another endpoint (port 0 picks a free one)"
        ) from error
    return socket


def dial(context: Context, endpoint: str, high_water_frames: int) -> Socket:
    """A DEALER that connects to `endpoint` as soon, and as often, as there is somebody.

    Raises:
        ConnectionFailed: the endpoint makes no sense, or there are too many sockets.
    """
    try:
        socket = _make(context, zmq.DEALER, high_water_frames)
    except zmq.ZMQError as error:
        raise ConnectionFailed(f"cannot dial {endpoint}: {error.strerror}") from error
    # A random identity, never used again: a ROUTER refuses a second peer of the same one, and what
    # libzmq still holds for an identity must not reach whoever comes next.
    socket.setsockopt(zmq.ROUTING_ID, b"pw" + os.urandom(16))
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConnectionFailed(f"cannot dial {endpoint}: {error.strerror}") from error
    return socket


def reachable_endpoint(listener: Socket, advertise: str | None) -> str:
    """What others should dial to reach `listener`; `advertise` stands in for a wildcard address."""
    endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    prefix, _, port = endpoint.rpartition(":")
    if prefix == "tcp://0.0.0.0":
        return f"tcp://{advertise or _own_address()}:{port}"
    return endpoint


def _make(context: Context, kind: int, high_water_frames: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water_frames)
    socket.setsockopt(zmq.RCVHWM, high_water_frames)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.IPV6, 0)
    return socket


def _own_address() -> str:
    """The address of this machine on its default route, or of the loopback where there is none."""
    with socket_module.socket(socket_module.AF_INET, socket_module.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address is reserved for examples
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
