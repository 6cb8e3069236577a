"""The connected runtime: one session with a cluster, as the API's threads see it.

The session's actors live on an event loop in a background thread. The methods here run in the user's threads:
they name what they create, post a note to the session, and return. Only `allocate_slice`, the questions, and
a client that is too far ahead wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import numpy as np

from pw.client.connection.calls import Calls
from pw.client.connection.handovers import Handovers
from pw.client.connection.programs import MANY_ARGUMENTS, Programs, check_arguments, check_size
from pw.client.connection.questions import Questions
from pw.client.connection.released import Released
from pw.client.connection.results import Results
from pw.client.connection.run_credits import RunCredits
from pw.client.connection.script import process_name
from pw.client.connection.session_thread import SessionThread
from pw.client.connection.views import Views
from pw.client.connection.waiting import Waiting
from pw.client.session.session import with_advice
from pw.client.session.thread_messages import (
    Allocate,
    Close,
    Forget,
    Listen,
    Open,
    Put,
    Tell,
)
from pw.client.session.uploads import KEEP_BYTES
from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import (
    AccessRefused,
    ConnectionFailed,
    Disconnected,
    Error,
    ErrorReport,
    InsufficientDevices,
)
from pw.core.ids import NAME_CHARACTERS, client_id
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress
from pw.display.advice import CALLS, LARGE_BYTES, Habits
from pw.display.live import About, patiently
from pw.display.tables import html, link_to
from pw.display.worker_output import WorkerOutput, is_wanted

CONNECT_S = 30.0
CLOSE_S = 30.0
"""How long `close` waits: a busy machine may take a while to settle thousands of notes."""
RECONNECT_S = 60.0
IN_A_CALL = (
    "the handler of a signal calls a function in the midst of another call. Let the handler set a flag, and "
    "look at it between two calls"
)
CLOSED = "pw.disconnect() was called, or its LocalCluster was closed"


class Runtime:
    """One session with a cluster."""

    def __init__(
        self,
        start: Callable[[Runtime], SessionThread],
        share: float,
        priority: int,
        connect_s: float = CONNECT_S,
        keep_bytes: int = KEEP_BYTES,
        reconnect_s: float = RECONNECT_S,
        worker_output: bool | None = None,
        name: str = "",
    ) -> None:
        self._output = WorkerOutput() if is_wanted(worker_output) else None
        self.lock = threading.RLock()
        """Held by a call while it takes numbers and posts messages."""
        self._serial = 0
        self._run_credits = RunCredits(self.lock)
        self.grant = self._run_credits.grant
        self._is_calling = False
        """A run gets its number, and is not posted yet."""
        self.programs = Programs()
        self.release_program = self.programs.release
        self.view = Views(self.register_program, self.run, self.release_program).view
        self.handovers = Handovers(self.lock, self._ids, self._tell)
        self.noted_in: tuple[dict[int, float], ...] = ()
        """Each of them gets when a run is sent, in seconds of this process's clock (`pw.profile`)."""
        self._habits = Habits()
        self._released = Released(self.delete)
        self.release = self._released.add
        self._closing: Error | None = None  # why no calls can be made any more
        self._ended: ErrorReport | None = None
        self._is_closed = False
        self._process = _process
        self.calls = Calls(self._post)
        self.thread = start(self)
        """Where the session's actors live."""
        self.ask = Questions(self._post, self.thread.address)
        self._results = Results(
            self._post,
            self.thread,
            self.ask,
            self._run_credits,
            self.lock,
            self._habits,
            (lambda: None) if self._output is None else self._output.flush,
        )
        self.wait = self._results.wait
        self.fetch = self._results.fetch
        self.fetch_shards = self._results.fetch_shards
        attached: Future[msg.Attached] = Waiting(
            about=lambda: About(f"an answer of the controller at {self.thread.address}")
        )
        if self.thread.address is None:
            reconnect_s = 0.0  # the controller is in this process
        self._patience_s = CONNECT_S + reconnect_s
        whose = filter(None, (name or process_name(), self.thread.certificate))
        name = ", ".join(whose)[:NAME_CHARACTERS]
        show = None if self._output is None else self._output.show
        self.thread.post(Open(name, share, priority, keep_bytes, attached, reconnect_s, show))
        try:
            answer = attached.result(connect_s)
            self.thread.wait_for_hosts()
        except TimeoutError:
            trouble = self.thread.trouble()
            self.thread.close()
            raise ConnectionFailed(
                f"no answer from a controller at {self.thread.address} within {connect_s:.0f} s"
                f"{trouble and ': '}{with_advice(trouble)}"
            ) from None
        except BaseException:
            self.thread.close()
            raise
        self.client = answer.client
        self.islands = answer.islands
        self._run_credits.granted = answer.run_credits

    # --- life ----------------------------------------------------------------------------------------

    @property
    def address(self) -> str | None:
        """The controller's address; None for an embedded cluster."""
        return self.thread.address

    @property
    def endpoint(self) -> str | None:
        """The controller's address for other processes, also of an embedded cluster; None if there is none."""
        return self.thread.endpoint

    @property
    def dashboard(self) -> str:
        """The link of the page that shows an embedded cluster; empty if there is none."""
        return self.thread.dashboard

    def _repr_html_(self) -> str:
        return html(repr(self), ()) + link_to(self.dashboard)

    @property
    def forked(self) -> bool:
        """Whether this is the copy of a session in a forked process."""
        return self._process is not _process

    @property
    def alive(self) -> bool:
        """Whether calls can still be made."""
        return self._closing is None and not self.forked

    @property
    def ended(self) -> Error | None:
        """The error that ended the session, unless it was closed; a new exception each time."""
        return None if self._ended is None else self._ended.exception()

    def check_alive(self) -> None:
        """Raise Disconnected, or the error that ended the session, unless calls can still be made."""
        if self.forked:
            raise Disconnected(
                "this process was forked from one with a pw session; sessions do not survive a fork. "
                "Call pw.connect() in the child"
            )
        if self._ended is not None:
            raise self._ended.exception()
        if self._closing is not None:
            raise Disconnected(f"the pw session is closed: {self._closing}")

    def close(self, error: Error | None = None) -> None:
        """End the session and release all that it owns on every host. Idempotent.

        Without an error, waits first until hosts have called the Python functions of runs in flight, and have
        written the checkpoints on their way to disk. Prints which calls of such functions failed, if nothing
        has raised that.
        """
        if self.forked:
            return
        if error is None and self._closing is None:
            self._wait_until(self._run_credits.has_no_effects, "Python functions on hosts to end")
            self.ask.wait_until_saved()
        closed: Future[tuple[msg.RunFailed, ...]] = Future()
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._closing is None:
                self._closing = error or Disconnected(CLOSED)
            self._run_credits.close()
            self._released.close()
            self.thread.post(Close(self._closing, closed))
        with contextlib.suppress(TimeoutError):
            failed = {one.run: one.error for one in closed.result(CLOSE_S)}
            for run, name in self._run_credits.with_effects(failed).items():
                words = str(failed[run].exception()).splitlines()[0]
                print(f"the call of {name!r} failed: {words}", file=sys.stderr)
        self.thread.close()
        if self._output is not None:
            self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _post(self, note: object) -> None:
        """Hand a note to the session; `close` settles all notes posted before it."""
        with self.lock:
            self.check_alive()
            self.thread.post(note)

    def _tell(self, message: object) -> None:
        with contextlib.suppress(Error):  # the session has ended
            self._post(Tell(message))

    def session_ended(self, error: Error) -> None:
        """Refuse all further calls with this error, unless `close` came first; called by the session."""
        with self.lock:
            if self._closing is None:
                how = " with other credentials" if isinstance(error, AccessRefused) else ""
                words = f"{error}. This session is over; pw.connect(){how} begins another"
                self._ended = ErrorReport(type(error).__name__, words)
                self._closing = error
                self._run_credits.close()
                self._released.close()

    def tick(self) -> None:
        """Release the arrays and programs without handles; called on the session's thread now and then."""
        self._run_credits.count_ended()
        self._run_credits.unless_locked(self._release)

    def _release(self) -> None:
        self._released.delete()
        for program in self.programs.forget_released():
            self._results.forget(program)
            self._tell(msg.ReleaseProgram(program))

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the counters of every process: the controller, each host, and this client."""
        told = self.ask.stats(self._patience_s)
        return {node: one.counters for node, one in told.items()} | {
            "client": self.thread.counters()
        }

    def _id(self) -> int:
        return self._ids(1)[0]

    def _ids(self, count: int) -> Sequence[int]:
        with self.lock:
            # A signal handler can run between two calls, but not between these lines.
            given = self._serial
            self._serial = given + count
        first = client_id(self.client, given + 1)
        return range(first, first + count)

    # --- slices --------------------------------------------------------------------------------------

    def allocate_slice(
        self,
        devices: int,
        kind: str | None = None,
        island: str | None = None,
        topology: tuple[int, ...] | None = None,
        **how: Any,
    ) -> msg.SliceBound:
        """Bind virtual devices (see `AllocateSlice`). Raises InsufficientDevices, PythonRefused.

        The controller bounds the wait for devices that are not there yet.
        """
        where = f" of island {island}" if island else ""
        bound: Future[msg.SliceBound] = self.ask.waiting(f"{devices} devices{where}")
        request = msg.AllocateSlice(self._id(), devices, kind, island, topology, **how)
        self._post(Allocate(request, bound))
        try:
            return bound.result()
        except InsufficientDevices as error:
            if self.address is not None or any((kind, island, topology, *how.values())):
                raise
            raise InsufficientDevices(
                f"{error}. It is the cluster that pw starts beside a script: as many CPU devices are there "
                f"with JAX_PLATFORMS=cpu PW_EMBEDDED_DEVICES={devices}"
            ) from None

    def island(self, slice: int) -> str:
        """Return the island to which a slice is bound, or was last; empty if it was given back."""
        bound = self.thread.bound(slice)
        return "" if bound is None else bound.island

    def devices(self, slice: int) -> Sequence[DeviceAddress]:
        """Return the devices to which a slice is bound, or was last; none if it was given back."""
        bound = self.thread.bound(slice)
        return () if bound is None else bound.devices

    def release_slice(self, slice: int) -> None:
        """Give a slice back."""
        self._tell(msg.ReleaseSlice(slice))

    # --- programs ------------------------------------------------------------------------------------

    def register_program(self, program: Program, artifacts: Mapping[bytes, bytes]) -> int:
        """Announce a program, which hosts then compile; returns its number at once.

        Raises ArgumentError for a program that no message can hold.
        """
        body = Compact.of(program)
        if self.thread.has_frames:
            check_size(body, artifacts)
        number = self._id()
        python = {each.placement.slice for each in program.computations if each.traits.is_python}
        with self.lock:
            self.check_alive()
            new = self.programs.unsent(artifacts)
            self.thread.post(Tell(msg.RegisterProgram(number, body, new)))
            if self._output is not None and python:
                self.thread.post(Listen(tuple(python)))
            self.programs.add(number, body, artifacts)
        return number

    def run(self, program: int, args: Sequence[int | bytes], results: int) -> list[int]:
        """Run a program on arrays and small host values; returns the ids of its results at once.

        Waits only while the client has as many runs in flight as the controller allows. Raises
        ArgumentError if no message can hold the host values, and Error in a signal's handler that has
        come in the midst of another call.
        """
        credits = self._run_credits
        if credits.sent % CALLS == CALLS - 1:
            self._habits.called()
        while (made := self.try_run(program, args, results)) is None:
            self._wait_until(credits.has_credit, f"one of {credits.granted} calls in flight to end")
        return made

    def try_run(self, program: int, args: Sequence[int | bytes], results: int) -> list[int] | None:
        """Do as `run`, but return None instead of waiting; `when_credit` tells when to try again."""
        self.check_alive()
        if len(args) > MANY_ARGUMENTS and self.thread.has_frames:
            check_arguments(args)
        self._released.make_room()
        with self.lock:
            if self._closing is not None:
                self.check_alive()
            if not self._run_credits.has_credit():
                return None
            if self._is_calling:
                raise Error(IN_A_CALL)
            self._is_calling = True
            try:
                programs = self.programs
                name, has_effects = programs.name(program), programs.has_effects(program)
                *made, run = self._ids(results + 1)
                then = None
                if program in self._results.awaited:
                    then = self._results.ask_ahead(program, made)
                self.thread.put(Tell(msg.Run(run, program, tuple(args), tuple(made)), then))
            finally:
                self._is_calling = False
            self._run_credits.started(run, results, program, name, has_effects)
            for sent_s in self.noted_in:
                sent_s[run] = time.monotonic()
        self.thread.go()
        return made

    def has_credit(self) -> bool:
        """Whether another run may be sent now."""
        return self._run_credits.has_credit()

    def when_credit(self, call: Callable[[], object]) -> None:
        """Call `call` once, from any thread, when another run may be sent or the session has ended."""
        with self.lock:
            self._run_credits.when_credit(call)

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, without the lock, until runs that end have made `condition` true."""

        def holds(timeout_s: float | None) -> bool:
            with self.lock:
                return self._run_credits.changed.wait_for(condition, timeout_s)

        patiently(holds, partial(self.ask.about, what))

    # --- arrays --------------------------------------------------------------------------------------

    def upload(
        self,
        value: np.ndarray[Any, Any],
        spec: ArraySpec,
        keep: bool = False,
        for_run: bool = False,
    ) -> int:
        """Send a host value to the hosts of `spec`; returns the array's id at once.

        A value that the caller could still change is copied first. The session keeps the value in case
        hosts are lost; `keep` exempts it from the budget for that. An upload `for_run`, for the next
        call, waits while the uploads of runs in flight take `AHEAD_BYTES` or more.
        """
        self.check_alive()
        self._released.make_room()
        if for_run:
            self._count_upload(value.nbytes)
        if value.nbytes >= LARGE_BYTES:
            self._habits.uploading(value, spec)
        if _mutable(value):
            value = value.copy()
        with self.lock:  # so that what is posted first has the smaller number
            array = self._id()
            self._post(Put(array, spec, value, keep))
        return array

    def _count_upload(self, size_bytes: int) -> None:
        credits = self._run_credits
        while True:
            with self.lock:
                self.check_alive()
                if credits.has_room():
                    credits.uploaded(size_bytes)
                    return
            sent = f"the {credits.inputs_bytes >> 20} MiB that were sent for them"
            self._wait_until(credits.has_room, f"calls in flight to take {sent}")

    def load(self, source: msg.FileSource, spec: ArraySpec) -> int:
        """Have the hosts of `spec` read an array from disk; returns its id at once."""
        with self.lock:
            array = self._id()
            self._post(Tell(msg.CreateArray(array, spec, source=source)))
        return array

    def delete(self, arrays: Sequence[int]) -> None:
        """Delete arrays now, in order with the runs that use them."""
        if arrays and self.alive:
            with contextlib.suppress(Error):  # the session has ended, and its arrays with it
                self._post(Forget(tuple(arrays)))

    def cancel(self, arrays: Sequence[int]) -> None:
        """Cancel the runs that make these arrays."""
        if arrays:
            self._tell(msg.Cancel(tuple(arrays)))


def _mutable(value: np.ndarray[Any, Any]) -> bool:
    """Whether other code could still write to the memory of `value`."""
    array: Any = value
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return isinstance(array, (bytearray, memoryview)) and not memoryview(array).readonly


_process = object()
"""A forked child gets another one: a call is too short for os.getpid()."""


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)
