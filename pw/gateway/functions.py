"""Host callbacks: functions of the user's script that computations call (`jax.pure_callback` and others).

JAX cannot send a Python function. So the script's process keeps its functions under numbers, and
gives JAX a number to send in the place of each (`install`). When a computation calls one, its host asks the
gateway, and the gateway the script's process, over a unix socket in their private folder:

    gateway -> script   (call, function, operands), or (0, function, ()) to forget a function,
                        or (0, 0, (), line) to show the line of a long wait, or none
    script -> gateway   (call, results, error)

Each is a msgpack array after its length. The script's process runs each call in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows its dtypes by name then
import msgspec
import numpy as np

from pw.client.connection.calls import Calls
from pw.client.session.thread_messages import Called
from pw.client.show.live import Screen, screen_here
from pw.core.sharding import dtype_of


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Call(msgspec.Struct, frozen=True, array_like=True):
    call: int
    function: int
    operands: tuple[_Array, ...]
    line: str = ""


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    call: int
    results: tuple[_Array, ...]
    error: str


_LENGTH = struct.Struct(">Q")
_decode_call = msgspec.msgpack.Decoder(_Call).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


def _packed(arrays: Sequence[Any]) -> tuple[_Array, ...]:
    values = [np.asarray(array) for array in arrays]
    return tuple(_Array(value.dtype.name, value.shape, value.tobytes()) for value in values)


def _unpacked(arrays: Sequence[_Array]) -> list[np.ndarray[Any, Any]]:
    return [
        np.frombuffer(array.data, dtype_of(array.dtype)).reshape(array.shape) for array in arrays
    ]


# --- in the script's process ---------------------------------------------------------------------------


class Functions:
    """The functions of this process that computations may call.

    Args:
        path: where the gateway connects.
    """

    def __init__(self, path: str) -> None:
        self._known: dict[int, Callable[..., Any]] = {}
        self._numbers = itertools.count(1)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(1)
        threading.Thread(target=self._accept, name="pw-functions", daemon=True).start()

    def add(self, function: Callable[..., Any]) -> int:
        """Return the number of a function, which is known until the gateway has it forgotten."""
        number = next(self._numbers)
        self._known[number] = function
        return number

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="pw-functions", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        lock = threading.Lock()
        screen = _Screen()
        with (
            contextlib.suppress(OSError),  # the gateway has ended
            connection,
            connection.makefile("rb") as stream,
        ):
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                (size,) = _LENGTH.unpack(head)
                call = _decode_call(stream.read(size))
                if not call.call:
                    self._known.pop(call.function, None)
                    screen.show(call.line)
                    continue
                screen.show("")  # the function may print
                thread = threading.Thread(
                    target=self._run, args=(call, connection, lock), name="pw-callback", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # Python starts no threads any more when a script ends
                    self._run(call, connection, lock)

    def _run(self, call: _Call, connection: socket.socket, lock: threading.Lock) -> None:
        try:
            function = self._known.get(call.function)
            if function is None:
                raise LookupError("the function was deleted together with its compiled program")
            answer = _Answer(call.call, _packed(function(*_unpacked(call.operands))), "")
        except BaseException:  # noqa: BLE001 - the user's function may raise anything
            answer = _Answer(call.call, (), traceback.format_exc())
        data = msgspec.msgpack.encode(answer)
        try:
            with lock:
                connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            pass  # the gateway has ended, and the computation with it

    def install(self, is_ours: Callable[[Any], bool]) -> None:
        """Let JAX send numbers in the place of functions, when it compiles for a backend that `is_ours`."""
        import jax
        from jax._src import callback as callbacks

        nothing = jax.core.ShapedArray((), np.dtype(np.float32))

        emit = callbacks.emit_python_callback
        to_shape = callbacks._aval_to_xla_shape

        def emit_by_number(
            ctx: Any,
            callback: Any,
            token: Any,
            operands: Any,
            operand_avals: Any,
            result_avals: Any,
            **options: Any,
        ) -> Any:
            module = ctx.module_context
            made = emit(ctx, callback, token, operands, operand_avals, result_avals, **options)
            backend = module.get_backend()
            if not is_ours(backend):
                return made
            called = module.host_callbacks[-1]

            def function(*arrays: Any) -> Any:
                return called(None, *arrays)[1:] if token else called(*arrays)

            # JAX sends a description of the operands; the channel of the only one is the function's number.
            number = self.add(function)
            module.host_callbacks[-1] = backend.make_python_callback_from_host_send_and_recv(
                function, [to_shape(nothing)], [], [number], [], lambda function: b""
            )
            return made

        callbacks.emit_python_callback = emit_by_number


class _Screen:
    """This process's terminal or notebook, with the line of a wait."""

    def __init__(self) -> None:
        self._screen: Screen | None = None
        self._is_shown = False

    def show(self, line: str) -> None:
        """Show a line, or none if it is empty."""
        if not line and not self._is_shown:
            return
        try:
            self._screen = self._screen or screen_here()
            if self._screen is not None:
                self._screen.show(line) if line else self._screen.clear()
        except (OSError, ValueError):  # the screen is gone
            pass
        self._is_shown = bool(line)


# --- in the gateway's process --------------------------------------------------------------------------


class Caller:
    """Calls functions of the script for the hosts; lives on the gateway's loop.

    Args:
        path: where the script listens; empty if it does not.
        calls: the session's, which says what hosts call.
    """

    def __init__(self, path: str, calls: Calls) -> None:
        self._path = path
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._functions: dict[bytes, tuple[int, ...]] = {}
        self._open: dict[int, Called] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self._is_closed = False
        self._working: set[asyncio.Task[None]] = set()
        calls.handler = self._called

    def know(self, artifact: bytes, numbers: tuple[int, ...]) -> None:
        """Take the numbers of the functions of an artifact, given by its SHA-256."""
        self._functions[artifact] = numbers

    def forget(self, artifact: bytes) -> None:
        """No executable of this artifact is left, and no run of one."""
        for number in self._functions.pop(artifact, ()):
            self._start(self._write(_Call(0, number, ())))

    def tell(self, line: str) -> None:
        """Have the script show the line of a wait, or none if it is empty."""
        self._start(self._told(line))

    async def _told(self, line: str) -> None:
        with contextlib.suppress(OSError):
            await self._write(_Call(0, 0, (), line))

    def _called(self, call: Called) -> None:
        self._loop.call_soon_threadsafe(self._begin, call)

    def _begin(self, call: Called) -> None:
        self._start(self._send(call))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:
            work.close()
            return
        task = self._loop.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _send(self, call: Called) -> None:
        numbers = self._functions.get(call.artifact, ())
        if call.index >= len(numbers):
            self._calls.fail(call, "the executable was deleted while it ran")
            return
        number = next(self._numbers)
        self._open[number] = call
        try:
            await self._write(_Call(number, numbers[call.index], _packed(call.operands)))
        except OSError as error:
            self._open.pop(number, None)
            self._calls.fail(call, f"the script's process cannot be reached: {error}")

    async def _write(self, call: _Call) -> None:
        data = msgspec.msgpack.encode(call)
        async with self._sending:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._reading = self._loop.create_task(self._read(reader))
            self._writer.write(_LENGTH.pack(len(data)) + data)
            await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                answer = _decode_answer(await reader.readexactly(size))
                call = self._open.pop(answer.call, None)
                if call is not None and answer.error:
                    self._calls.fail(call, answer.error)
                elif call is not None:
                    self._calls.answer(call, _unpacked(answer.results))
        except (asyncio.IncompleteReadError, OSError):
            for call in self._open.values():
                self._calls.fail(call, "the script's process has ended")
            self._open.clear()
            self._writer = None

    def close(self) -> None:
        """Call nothing any more."""
        self._is_closed = True
        self._calls.handler = None
        for task in (*self._working, self._reading):
            if task is not None:
                task.cancel()
        if self._writer is not None:
            self._writer.close()
