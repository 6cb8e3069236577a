"""A model of a call: one connection from the calling thread to each host, and the duties of a runtime.

It says what a call costs when nothing stands between the script's thread and the hosts. The client flattens its
arguments and finds the call by their types, counts credits, makes a handle whose death is a delete, keeps a
journal that goes to a controller 64 runs at once, encodes a launch and sends it, and reads the answer in the
same thread. A host checks epoch, lease, index, owner, memory and arguments, calls the compiled function, keeps
the result, measures the time, answers when the value is there, and tells the scheduler of 64 ends at once.
Launches and answers are frames of ZMTP, as on the links of pw. Nothing spins. Results are the next call's
arguments.

Left out: locks, signals, other actors' work on the host's loop, programs of several computations. A host waits
for its result inside its loop, and answers each call, also calls whose result no thread waits for.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import uvloop

from bench.baselines import steps
from bench.baselines.peer import ROOT, Peer, environment, serve

BATCH = 64
"""Runs, ends and deletes that travel together."""
CREDITS = 128
"""Calls in flight: their answers fit into the buffer of a socket, so a host never waits for the client."""
EPOCH, LEASE, OWNER, PROGRAM = 3, 7, 1, 5
OWNER_SHIFT = 40
"""A number is the client's above this bit, and a serial number below it."""
MEMORY_BYTES = 1 << 30
LONG_FRAME = 2
START_S = 30.0
_long_size = struct.Struct(">Q")


class Launch(msgspec.Struct, array_like=True, tag=1):
    """Call a program; `request` is the number of the answer."""

    epoch: int
    lease: int
    index: int
    run: int
    program: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    request: int


class Delete(msgspec.Struct, array_like=True, tag=2):
    """Arrays whose handles are gone; launches before `after` may read them."""

    after: int
    arrays: tuple[int, ...]


class Answer(msgspec.Struct, array_like=True, tag=3):
    """A value is there, or why not."""

    request: int
    array: int
    error: str | None = None


class Runs(msgspec.Struct, array_like=True, tag=4):
    """What the controller is told: runs with their arguments and results."""

    runs: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]


class Ends(msgspec.Struct, array_like=True, tag=5):
    """What the scheduler is told: runs that have ended, and their device time."""

    runs: tuple[int, ...]
    device_ns: tuple[int, ...]


_encode = msgspec.msgpack.Encoder().encode


def start(hosts: int) -> Peer:
    """The model with `hosts` hosts, ready to measure. Raises GaveUp if it does not start."""
    return Peer("model", "bench.baselines.line", [[str(hosts)]])


# --- frames ------------------------------------------------------------------------------------------


def framed(body: bytes) -> bytes:
    """Return a message of one frame."""
    if len(body) < 256:
        return bytes((0, len(body))) + body
    return bytes((LONG_FRAME,)) + _long_size.pack(len(body)) + body


class Frames:
    """Takes the bytes of a connection apart."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that are complete."""
        data = self._rest + data
        at, end = 0, len(data)
        while end - at >= 2:
            if data[at] & LONG_FRAME:
                if end - at < 9:
                    break
                begin, size = at + 9, _long_size.unpack_from(data, at + 1)[0]
            else:
                begin, size = at + 2, data[at + 1]
            if end - begin < size:
                break
            at = begin + size
            yield data[begin:at]
        self._rest = data[at:]


# --- a host ------------------------------------------------------------------------------------------


class Value:
    """An array on a host."""

    __slots__ = ("array", "error", "last_use", "size_bytes", "waiters")

    def __init__(self, array: Any, size_bytes: int) -> None:
        self.array, self.size_bytes = array, size_bytes
        self.error: str | None = None
        self.last_use = 0
        self.waiters: tuple[int, ...] = ()


class Host:
    """Takes the launches of one lease."""

    def __init__(self, connection: socket.socket, sink: socket.socket) -> None:
        import jax

        x = jax.device_put(np.float32(0))
        compiled = jax.jit(steps.local).lower(x).compile()
        self._plans = {PROGRAM: (compiled, 1, (x.nbytes,))}
        self._values = {number_of(0): Value(x, x.nbytes)}
        self._connection, self._sink = connection, sink
        self._taken, self._used_bytes = 0, x.nbytes
        self._ended: list[int] = []
        self._device_ns: list[int] = []
        self._frames = Frames()
        self._decode = msgspec.msgpack.Decoder(Launch | Delete).decode

    def received(self) -> bool:
        """Handle what has come; return False at the end of the connection."""
        data = self._connection.recv(1 << 18)
        for body in self._frames.of(data):
            message = self._decode(body)
            if isinstance(message, Launch):
                self._launch(message)
            else:
                self._delete(message)
        return bool(data)

    def _launch(self, launch: Launch) -> None:
        if (launch.epoch, launch.lease, launch.index) != (EPOCH, LEASE, self._taken):
            raise ValueError(f"stale: {launch}")
        compiled, count, sizes = self._plans[launch.program]
        if len(launch.arguments) != count:
            raise ValueError(f"{count} arguments are needed: {launch}")
        self._taken += 1
        arrays, error = [], None
        for number in launch.arguments:
            if number >> OWNER_SHIFT != OWNER:
                raise ValueError(f"another client's array: {launch}")
            value = self._values[number]
            error = error or value.error
            value.last_use = launch.index
            arrays.append(value.array)
        if self._used_bytes + sum(sizes) > MEMORY_BYTES:
            raise ValueError(f"no memory: {launch}")
        began_ns = time.perf_counter_ns()
        made = [compiled(*arrays)]
        for number, array, size_bytes in zip(launch.results, made, sizes, strict=True):
            self._values[number] = Value(array, size_bytes)
            self._used_bytes += size_bytes
        for array in made:
            array.block_until_ready()
        answer = Answer(launch.request, launch.results[0], error)
        self._connection.sendall(framed(_encode(answer)))
        self._ended.append(launch.run)
        self._device_ns.append(time.perf_counter_ns() - began_ns)
        if len(self._ended) == BATCH:
            self._sink.send(_encode(Ends(tuple(self._ended), tuple(self._device_ns))))
            self._ended.clear()
            self._device_ns.clear()

    def _delete(self, message: Delete) -> None:
        for number in message.arrays:
            value = self._values.pop(number, None)
            if value is not None:
                self._used_bytes -= value.size_bytes


async def _serve_client(listener: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    connection, _ = await loop.sock_accept(listener)
    connection.setblocking(False)
    host, gone = Host(connection, sink), loop.create_future()

    def readable() -> None:
        try:
            goes_on = host.received()
        except Exception as error:  # noqa: BLE001 - it ends this process
            loop.remove_reader(connection)
            gone.set_exception(error)
        else:
            if not goes_on:
                loop.remove_reader(connection)
                gone.set_result(None)

    connection.sendall(framed(b"ready"))
    loop.add_reader(connection, readable)
    await gone


def _be_host(path: str, sink_path: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    uvloop.run(_serve_client(listener, _connected(sink_path, socket.SOCK_DGRAM)))


def _be_sink(path: str) -> None:
    """Take what the controller and the scheduler are told."""
    sink = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sink.bind(path)
    decode = msgspec.msgpack.Decoder(Runs | Ends).decode
    while True:
        decode(sink.recv(1 << 18))


def _connected(path: str, kind: socket.SocketKind) -> socket.socket:
    until_s = time.monotonic() + START_S
    while True:
        connection = socket.socket(socket.AF_UNIX, kind)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
        else:
            return connection


# --- the client --------------------------------------------------------------------------------------


def number_of(serial: int) -> int:
    """Return the number of an array of this client."""
    return OWNER << OWNER_SHIFT | serial


class Handle:
    """What a call returns; its array is deleted with it."""

    __slots__ = ("client", "kind", "number")

    def __init__(self, client: Client, number: int, kind: str) -> None:
        self.client, self.number, self.kind = client, number, kind

    def block_until_ready(self) -> None:
        """Wait for all answers."""
        self.client.settle()

    def __del__(self) -> None:
        self.client.dead.append(self.number)


class Client:
    """Launches on all hosts."""

    def __init__(self, paths: list[str], sink_path: str) -> None:
        import jax

        self._flatten = jax.tree_util.tree_flatten
        self._hosts = [_connected(path, socket.SOCK_STREAM) for path in paths]
        self._frames = [Frames() for _ in paths]
        self._sink = _connected(sink_path, socket.SOCK_DGRAM)
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        self._plans: dict[object, int] = {}
        self._journal: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        self._index = 0
        self._credits = CREDITS
        self._unanswered = [0 for _ in paths]
        self.dead: deque[int] = deque()
        for host, frames in zip(self._hosts, self._frames, strict=True):
            assert list(frames.of(host.recv(100))) == [b"ready"]

    def __call__(self, *args: Handle) -> Handle:
        """Call the function that adds one."""
        leaves, tree = self._flatten((args, {}))
        key = tree, tuple([(type(leaf), leaf.kind) for leaf in leaves])
        program = self._plans.get(key)
        if program is None:
            program = self._plans[key] = PROGRAM
        if not self._credits:
            self.settle()
        self._credits -= 1
        index = self._index
        self._index = index + 1
        number = number_of(index + 1)
        arguments, results = tuple([leaf.number for leaf in leaves]), (number,)
        launch = Launch(EPOCH, LEASE, index, index, program, arguments, results, index)
        data = framed(_encode(launch))
        if len(self.dead) >= BATCH:
            arrays = tuple([self.dead.popleft() for _ in range(BATCH)])
            data += framed(_encode(Delete(index + 1, arrays)))
        for at, host in enumerate(self._hosts):
            host.sendall(data)
            self._unanswered[at] += 1
        self._journal.append((index, program, arguments, results))
        if len(self._journal) == BATCH:
            self._sink.send(_encode(Runs(tuple(self._journal))))
            self._journal.clear()
        return Handle(self, number, leaves[0].kind)

    def settle(self) -> None:
        """Take the answers of all hosts to all calls. Raises RuntimeError if a call has failed."""
        for at, (host, frames) in enumerate(zip(self._hosts, self._frames, strict=True)):
            while self._unanswered[at]:
                for body in frames.of(host.recv(1 << 16)):
                    answer = self._decode(body)
                    if answer.error is not None:
                        raise RuntimeError(answer.error)
                    self._unanswered[at] -= 1
        self._credits = CREDITS


def _cases(hosts: int, folder: str) -> Mapping[str, Callable[[int], object]]:
    sink = os.path.join(folder, "sink")
    paths = [os.path.join(folder, f"host-{at}") for at in range(hosts)]
    for arguments in (["sink", sink], *(["host", path, sink] for path in paths)):
        command = [sys.executable, "-m", "bench.baselines.line", *arguments]
        subprocess.Popen(command, env=environment(), cwd=ROOT)
    client = Client(paths, sink)
    first = Handle(client, number_of(0), "float32[]")
    return {
        "blocking": steps.calls(client, first, wait=True),
        "pipelined": steps.calls(client, first),
    }


def main() -> None:
    """The client with HOSTS; `host PATH SINK`, or `sink PATH`."""
    kind, *rest = sys.argv[1:]
    if kind == "host":
        _be_host(*rest)
    elif kind == "sink":
        _be_sink(*rest)
    else:
        with tempfile.TemporaryDirectory(prefix="pw-model-") as folder:
            serve(lambda: _cases(int(kind), folder))


if __name__ == "__main__":
    main()
