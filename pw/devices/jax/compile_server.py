"""The processes that parse, vet and compile what clients have sent: a server, and its children.

The server has imported everything and does nothing but fork, so that a child is there after some
50 ms, also when the one before it has crashed. A host forks its server from itself before it starts
any thread; otherwise the server is a program of its own.

    host -> server   _FORK number, with a link and a pipe    fork a child
                     _KILL number                            kill it
    server -> pipe   its process number; later how it ended
    host -> child    Begin, then an `Order` for each task
    child -> host    Answer for each task

The server ends when its host does, and its children end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable

import jax
import msgspec
from jax._src.lax import linalg

from pw.core.errors import CompileError, ErrorReport
from pw.devices.jax import making
from pw.devices.jax.group import POOL_VARIABLES

_FORK, _KILL = b"F", b"K"
_NUMBER = struct.Struct("<cq")
STATUS = struct.Struct("<i")
"""In the pipe: the number of the process; then its exit status, as of `os.waitpid`."""
_LENGTH = struct.Struct("<Q")
_SLACK_BYTES = 2 << 30
"""The host ends a child that uses too much memory; this bound of the system comes after it."""
_PR_SET_PDEATHSIG = 1


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host tells a child how to begin."""

    devices: int
    """Devices to make."""
    pool: str
    """How many threads XLA has in the host: code is divided for so many."""
    memory_bytes: int


class Task(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host has a child work on an artifact."""

    order: making.Order
    only_examine: bool


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a child has found: an executable for `making.load`, if one was wanted, or an error."""

    data: bytes = b""
    error: ErrorReport | None = None


encode = msgspec.msgpack.Encoder().encode
_decode_frame: Callable[[bytes], Begin | Task] = msgspec.msgpack.Decoder(Begin | Task).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def send(link: socket.socket, frame: Begin | Task | Answer) -> None:
    """Send a frame. Raises OSError if the other side has ended."""
    data = encode(frame)
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


class Incoming:
    """Takes the bytes of frames as they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Add bytes; return a frame if it is whole."""
        self._data += data
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        frame = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return frame


def ask_fork(server: socket.socket, number: int, link: int, pipe: int) -> None:
    """Have the server fork a child with these two descriptors. Raises OSError."""
    socket.send_fds(server, [_NUMBER.pack(_FORK, number)], [link, pipe])


def ask_kill(server: socket.socket, number: int) -> None:
    """Have the server kill a child, if it still runs. Raises OSError."""
    server.send(_NUMBER.pack(_KILL, number))


def fork_server() -> socket.socket:
    """Fork a server from this process, which has no other threads yet; return the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            _keep_open([theirs.fileno()])
            serve(theirs)
        os._exit(0)
    theirs.close()
    return ours


def serve(host: socket.socket) -> None:
    """Fork and kill children until the host ends."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: dict[int, tuple[int, int]] = {}  # number -> process, pipe

    while True:
        ready = select.select([host.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(running)
        if host.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(host, _NUMBER.size, 2)
        if not message:
            return
        what, number = _NUMBER.unpack(message)
        if what == _KILL:
            if number in running:
                os.kill(running[number][0], signal.SIGKILL)
            continue
        link, pipe = descriptors
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with contextlib.suppress(EOFError, OSError):
                _keep_open([link])
                work(socket.socket(fileno=link))
            os._exit(0)
        os.close(link)
        running[number] = (process, pipe)
        with contextlib.suppress(OSError):
            os.write(pipe, STATUS.pack(process))


def _reap(running: dict[int, tuple[int, int]]) -> None:
    for number, (process, pipe) in list(running.items()):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            del running[number]
            with contextlib.suppress(OSError):
                os.write(pipe, STATUS.pack(status))
            os.close(pipe)


def work(host: socket.socket) -> None:
    """Do what the host asks for, until it ends. Raises EOFError or OSError then."""
    _die_with_parent()
    incoming = Incoming()
    begin = _received(host, incoming)
    assert isinstance(begin, Begin)
    _bound(begin.memory_bytes)
    for variable in POOL_VARIABLES:
        os.environ[variable] = begin.pool
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", begin.devices)
    # JAX would import scipy whenever it lowers an export; nothing runs here.
    linalg.initialize_lapack = lambda: None
    while True:
        task = _received(host, incoming)
        assert isinstance(task, Task)
        send(host, _done(task))


def _done(task: Task) -> Answer:
    try:
        if task.only_examine:
            making.examine(task.order)
            return Answer()
        physical = jax.devices()[: len(task.order.devices)]
        return Answer(making.saved(*making.make(task.order, physical)))
    except Exception as error:  # noqa: BLE001 - the error is the answer
        return Answer(error=ErrorReport.of(error, kind=CompileError))


def _received(host: socket.socket, incoming: Incoming) -> Begin | Task:
    data = b""
    while (frame := incoming.feed(data)) is None:
        data = host.recv(1 << 20)
        if not data:
            raise EOFError
    return _decode_frame(frame)


def _bound(memory_bytes: int) -> None:
    """Bound what this process may take; have the system end it before the host if memory is short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bound = memory_bytes + _SLACK_BYTES
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or bound < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_open(kept: Iterable[int]) -> None:
    """Close all descriptors except the standard streams and these, also those of the supervisor."""
    last = 2
    for descriptor in sorted(kept):
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    """Serve the host at the other end of the descriptor that is given as an argument."""
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
