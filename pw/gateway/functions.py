"""Host callbacks: functions of the user's script that computations call (`jax.pure_callback` and others).

JAX cannot send a Python function. So the script's process keeps its functions under numbers, and
gives JAX a number to send in the place of each (`install`). When a computation calls one, its host asks the
gateway, and the gateway the script's process, which started it (`LocalDaemon`):

    gateway -> script   Call     call a function with the arrays that come with this
                        Forget   forget a function
                        Line     show the line of a long wait, or none
    script -> gateway   Answer   the results, which come with this, or an error

The script's process runs each call in a thread of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from pw.client.connection.calls import Calls
from pw.client.display.live import Screen, screen_here
from pw.client.session.thread_messages import Called
from pw.processes.channel import Channel


class CallbackCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The gateway calls a function."""

    call: int
    function: int


class ForgetCallback(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The gateway does not call a function any more."""

    function: int


class ScriptLine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The gateway has a line shown; none if it is empty."""

    line: str
    part: float | None = None
    """Part of the wait that is over, from 0 to 1; None if that is not known."""


class CallbackAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The script answers a call."""

    call: int
    error: str = ""


FromGateway = CallbackCall | ForgetCallback | ScriptLine


# --- in the script's process ---------------------------------------------------------------------------


class Functions:
    """The functions of this process that computations may call, through the channel to the gateway."""

    def __init__(self, gateway: Channel[FromGateway]) -> None:
        self._gateway = gateway
        self._functions: dict[int, Callable[..., Any]] = {}
        self._numbers = itertools.count(1)
        self._screen = _Screen()
        # The end of a wait may come later than that of the script.
        atexit.register(self._screen.show, "")
        threading.Thread(target=self._serve, name="pw-functions", daemon=True).start()

    def add(self, function: Callable[..., Any]) -> int:
        """Return the number of a function, which is known until the gateway has it forgotten."""
        number = next(self._numbers)
        self._functions[number] = function
        return number

    def _serve(self) -> None:
        while True:
            try:
                message, operands, _ = self._gateway.receive()
            except (EOFError, OSError):
                return
            if isinstance(message, ForgetCallback):
                self._functions.pop(message.function, None)
            elif isinstance(message, ScriptLine):
                self._screen.show(message.line, message.part)
            else:
                self._screen.show("")  # the function may print
                thread = threading.Thread(
                    target=self._run, args=(message, operands), name="pw-callback", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # Python starts no threads any more when a script ends
                    self._run(message, operands)

    def _run(self, call: CallbackCall, operands: list[Any]) -> None:
        results: list[Any] = []
        error = ""
        try:
            function = self._functions.get(call.function)
            if function is None:
                raise LookupError("the function was deleted together with its compiled program")
            results = [np.asarray(result) for result in function(*operands)]
        except BaseException:  # noqa: BLE001 - the user's function may raise anything
            error = traceback.format_exc()
        with contextlib.suppress(OSError):  # the gateway has ended, and the computation with it
            self._gateway.send(CallbackAnswer(call.call, error), results)

    def install(self, is_ours: Callable[[Any], bool]) -> None:
        """Let JAX send numbers in the place of functions, when it compiles for a backend that `is_ours`."""
        import jax

        from pw.core.jax_private.compiling import aval_to_xla_shape
        from pw.core.jax_private.hooks import PYTHON_CALLBACK

        nothing = jax.core.ShapedArray((), np.dtype(np.float32))

        emit = PYTHON_CALLBACK.value

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
            results = emit(ctx, callback, token, operands, operand_avals, result_avals, **options)
            backend = module.get_backend()
            if not is_ours(backend):
                return results
            called = module.host_callbacks[-1]

            def function(*arrays: Any) -> Any:
                return called(None, *arrays)[1:] if token else called(*arrays)

            # JAX sends a description of the operands; the channel of the only one is the function's number.
            number = self.add(function)
            module.host_callbacks[-1] = backend.make_python_callback_from_host_send_and_recv(
                function, [aval_to_xla_shape(nothing)], [], [number], [], lambda function: b""
            )
            return results

        PYTHON_CALLBACK.replace(emit_by_number)


class _Screen:
    """This process's terminal or notebook, with the line of a wait."""

    def __init__(self) -> None:
        self._screen: Screen | None = None
        self._is_shown = False

    def show(self, line: str, part: float | None = None) -> None:
        """Show a line, or none if it is empty."""
        if not line and not self._is_shown:
            return
        try:
            self._screen = self._screen or screen_here()
            if self._screen is not None:
                self._screen.show(line, part) if line else self._screen.clear()
        except (OSError, ValueError):  # the screen is gone
            pass
        self._is_shown = bool(line)


# --- in the gateway's process --------------------------------------------------------------------------


class Script:
    """The script's process, as the gateway that it started sees it.

    Args:
        loop: that of the main thread, which alone uses the channel: it may wait for the script, whose JAX
            may wait for other threads of the gateway.
        channel: to the script.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: Channel[CallbackAnswer]) -> None:
        self._loop = loop
        self._channel = channel
        self._open: dict[int, tuple[Calls, Called]] = {}
        self._numbers = itertools.count(1)

    def call(self, calls: Calls, called: Called, function: int) -> None:
        """Call a function, and answer; on any thread."""
        number = next(self._numbers)
        self._open[number] = calls, called
        self.send(CallbackCall(number, function), called.operands)

    def send(self, message: FromGateway, operands: Sequence[Any] = ()) -> None:
        """Send a message; on any thread."""
        self._loop.call_soon_threadsafe(self._send, message, [np.asarray(one) for one in operands])

    def answered(self, answer: CallbackAnswer, results: list[Any]) -> None:
        """Take an answer; on the main thread."""
        calls, called = self._open.pop(answer.call)
        if answer.error:
            calls.fail(called, answer.error)
        else:
            calls.answer(called, results)

    def _send(self, message: FromGateway, operands: list[Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, and so does this process
            self._channel.send(message, operands)


class Caller:
    """Calls functions of the script for the hosts of one client.

    Args:
        script: None if no script has started this gateway.
        calls: the session's, which says what hosts call.
    """

    def __init__(self, script: Script | None, calls: Calls) -> None:
        self._script = script
        self._calls = calls
        self._functions: dict[bytes, tuple[int, ...]] = {}
        calls.handler = self._called

    def know(self, artifact: bytes, numbers: tuple[int, ...]) -> None:
        """Take the numbers of the functions of an artifact, given by its SHA-256."""
        self._functions[artifact] = numbers

    def forget(self, artifact: bytes) -> None:
        """Forget the functions of an artifact without executables and runs."""
        for number in self._functions.pop(artifact, ()):
            if self._script is not None:
                self._script.send(ForgetCallback(number))

    def _called(self, called: Called) -> None:
        numbers = self._functions.get(called.artifact, ())
        if called.index >= len(numbers):
            self._calls.fail(called, "the executable was deleted while it ran")
        elif self._script is None:
            self._calls.fail(called, "the script's process cannot be reached")
        else:
            self._script.call(self._calls, called, numbers[called.index])

    def close(self) -> None:
        """Call nothing any more."""
        self._calls.handler = None
