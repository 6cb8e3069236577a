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
from weakref import WeakSet

import numpy as np

from pw.client.connection.calls import Calls
from pw.client.connection.handovers import Handovers
from pw.client.connection.island_events import IslandReaders
from pw.client.connection.programs import MANY_ARGUMENTS, Programs, check_arguments, check_size
from pw.client.connection.questions import Questions
from pw.client.connection.released import Released
from pw.client.connection.results import Results
from pw.client.connection.run_credits import RunCredits
from pw.client.connection.script import process_name
from pw.client.connection.session_thread import SessionThread
from pw.client.connection.views import Views
from pw.client.connection.waiting import Waiting
from pw.client.display.advice import CALLS, LARGE_BYTES, Habits
from pw.client.display.live import About, patiently
from pw.client.display.tables import html, link_to
from pw.client.display.worker_output import WorkerOutput, is_wanted
from pw.client.session.session import with_advice
from pw.client.session.thread_messages import Allocate, Close, Forget, Listen, Open, Put, Tell
from pw.client.session.uploads import KEEP_BYTES
from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.coordinates import times
from pw.core.errors import (
    AccessRefused,
    ConnectionFailed,
    Disconnected,
    Error,
    ErrorReport,
    InsufficientDevices,
)
from pw.core.ids import NAME_CHARACTERS, arrays_in, client_id
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress
from pw.core.waits import RECONNECT_S

CONNECT_S = 30.0
CLOSE_S = 30.0
"""Seconds that `close` waits: a busy machine may take a while to settle thousands of notes."""
IN_A_CALL = (
    "the handler of a signal calls a function in the midst of another call. Let the handler set a flag, and "
    "look at it between two calls"
)
FORK_S = 1.0
"""Seconds that a fork waits for the lock of a session."""
FRESH = 64
"""Uploads that are remembered at most."""
FRESH_S = 0.05
"""Seconds that a call waits for remembered uploads at most."""
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
        recovery_s: float | None = None,
        worker_output: bool | None = None,
        name: str = "",
    ) -> None:
        self.recovery_s = recovery_s
        """Seconds for which the session waits for lost islands; None for as long as the cluster says."""
        self._output = WorkerOutput() if is_wanted(worker_output) else None
        self.lock = threading.RLock()
        """Held by a call while it takes numbers and posts messages."""
        self._serial = 0
        self._run_credits = RunCredits(self.lock)
        self.grant = self._run_credits.grant
        self._fresh: dict[int, ArraySpec] = {}
        """The newest uploads that no run has read."""
        self._is_calling = False
        """True while a run has a number and is not posted."""
        self.programs = Programs()
        self.release_program = self.programs.release
        self.view = Views(self.register_program, self.run, self.release_program).view
        self.handovers = Handovers(self.lock, self._ids, self._tell)
        self.read_only: dict[int, tuple[str, int]] = {}
        """Arrays that lookups have returned, with their name and version: they are read-only."""
        self.noted_in: tuple[dict[int, float], ...] = ()
        """Dictionaries, each of which gets when a run is sent, in seconds of this process's clock
        (`pw.profile`)."""
        self._habits = Habits()
        self._released = Released(self.delete)
        self.release = self._released.add
        self._closing: Error | None = None  # why no calls can be made any more
        self._ended: ErrorReport | None = None
        self._is_closed = False
        self.alive = True
        """True while calls can be made."""
        self.forked = False
        """True if this is the copy of a session in a forked process."""
        _runtimes.add(self)
        self.calls = Calls(self._post)
        self.island_readers = IslandReaders(self._post)
        self.thread = start(self)
        """Thread in which the session's actors live."""
        self.ask = Questions(self._post, self.thread.address)
        self._results = Results(
            self.check_alive,
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
        opening = Open(
            name, share, priority, keep_bytes, attached, reconnect_s, show, recovery_s=recovery_s
        )
        self.thread.post(opening)
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
        self._first_id = client_id(answer.client, 0)
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
    def ended(self) -> Error | None:
        """The error that ended the session, unless it was closed; a new exception each time."""
        return None if self._ended is None else self._ended.exception()

    def check_alive(self) -> None:
        """Raise Disconnected, or the error that ended the session, unless calls can still be made."""
        if self.alive:
            return
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
            self.alive = False
            if self._closing is None:
                self._closing = error or Disconnected(CLOSED)
            self._run_credits.close()
            self._released.close()
            self.thread.post(Close(self._closing, closed))
        self.island_readers.end(None)
        with contextlib.suppress(TimeoutError):
            failed = {one.run: one.error for one in closed.result(CLOSE_S)}
            for run, name in self._run_credits.with_effects(failed).items():
                words = str(failed[run].exception()).splitlines()[0]
                print(f"the call of {name!r} failed: {words}", file=sys.stderr)
        self.thread.look()  # there may be output
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
                self.alive = False
                self._run_credits.close()
                self._released.close()
        self.island_readers.end(self.ended)

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
        answers = self.ask.stats(self._patience_s)
        return {node: one.counters for node, one in answers.items()} | {
            "client": self.thread.counters()
        }

    def _id(self) -> int:
        return self._ids(1)[0]

    def _ids(self, count: int) -> Sequence[int]:
        with self.lock:
            # A signal handler can run between two calls, but not between these lines.
            serial = self._serial
            self._serial = serial + count
        first = client_id(self.client, serial + 1)
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
        """Bind virtual devices (see `AllocateSlice`). Raises InsufficientDevices, PythonRefused, QuotaExceeded.

        The controller bounds the wait for devices that are not there yet; not the wait until the clients of the
        same tenant have given back devices.
        """
        where = f" of island {island}" if island else ""
        bound: Future[msg.SliceBound] = self.ask.waiting(f"{devices} devices{where}")
        request = msg.AllocateSlice(self._id(), devices, kind, island, topology, **how)
        self._post(Allocate(request, bound))
        try:
            return bound.result()
        except KeyboardInterrupt:  # nothing will have the slice
            self.release_slice(request.slice)
            raise
        except InsufficientDevices as error:
            if self.address is not None or any((kind, island, *how.values())):
                raise
            if topology is not None:
                raise InsufficientDevices(
                    f"{error}. It is the cluster that pw starts beside a script: its CPU devices lie in such a "
                    f"grid with JAX_PLATFORMS=cpu PW_EMBEDDED_TOPOLOGY={times(topology)}"
                ) from None
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

    def coords(self, slice: int) -> Sequence[tuple[int, ...]]:
        """Return the coordinates of the devices of a slice, as `devices`."""
        bound = self.thread.bound(slice)
        return () if bound is None else bound.coords

    def is_lost(self, slice: int) -> bool:
        """Whether a slice has no devices now: its island was lost, or it was given back."""
        return self.thread.is_lost(slice)

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
        python = {each.placement.slice for each in program.computations if each.traits.runs_on_host}
        with self.lock:
            self.check_alive()
            new = self.programs.unsent(artifacts)
            self.thread.post(Tell(msg.RegisterProgram(number, body, new)))
            if self._output is not None and python:
                self.thread.post(Listen(tuple(python)))
                self._results.show_output = self._show_output
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
        if self._fresh:
            self._await_fresh(program, args)
        while (ids := self.try_run(program, args, results)) is None:
            self._wait_until(credits.has_credit, f"one of {credits.granted} calls in flight to end")
        return ids

    def _show_output(self) -> None:
        """Show what hosts have sent over lines before a result that has come another way."""
        self.thread.look()
        if self._output is not None:
            self._output.flush()

    def _await_fresh(self, program: int, args: Sequence[int | bytes]) -> None:
        """Wait shortly for uploads that a run reads, if it can be launched from here once they are there.

        Who launches from here waits for results, so this wait is part of that one. The session's own thread
        (of a gateway) would keep the values from arriving.
        """
        if self.thread.is_here():
            return
        until_s, leases = time.monotonic() + FRESH_S, self.thread.leases
        with self.lock:
            fresh = {
                array: self._fresh.pop(array) for array in arrays_in(args) if array in self._fresh
            }
            unknown = leases.unknown(program, args)
        for array in unknown:
            left_s = until_s - time.monotonic()
            if array in fresh and left_s > 0:
                losses, ready = leases.losses, self._results.ask((array, fresh[array]))
                with contextlib.suppress(TimeoutError, Error):
                    ready.result(left_s)
                    with self.lock:
                        leases.arrived(array, losses)

    def try_run(self, program: int, args: Sequence[int | bytes], results: int) -> list[int] | None:
        """Do as `run`, but return None instead of waiting; `when_credit` tells when to try again."""
        if not self.alive:
            self.check_alive()
        if len(args) > MANY_ARGUMENTS and self.thread.has_frames:
            check_arguments(args)
        self._released.make_room()
        with self.lock:
            if not self.alive:
                self.check_alive()
            if not self._run_credits.has_credit():
                return None
            if self._is_calling:
                raise Error(IN_A_CALL)
            self._is_calling = True
            try:
                name, has_effects = self.programs.called(program)
                first = self._first_id + self._serial + 1
                self._serial += results + 1
                run = first + results
                ids = list(range(first, run))
                wanted = None
                if program in self._results.awaited:
                    wanted = self._results.ask_ahead(program, ids)
                self._run_credits.started(run, results, program, name, has_effects)
                self.thread.call(run, program, tuple(args), tuple(ids), wanted)
            finally:
                self._is_calling = False
            for sent_s in self.noted_in:
                sent_s[run] = time.monotonic()
        return ids

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
            self.check_alive()
            self.thread.put(Put(array, spec, value, keep))
            self._fresh[array] = spec
            if len(self._fresh) > FRESH:
                del self._fresh[next(iter(self._fresh))]
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

    def publish(
        self,
        name: str,
        offers: Sequence[Sequence[tuple[int, ArraySpec]]],
        tree: bytes,
        keep_s: float,
        to: tuple[str, ...],
    ) -> Future[msg.Published]:
        """Publish arrays under a name, those of each slice together.

        Args:
            name: the name.
            offers: arrays of each slice.
            tree: description of the tree.
            keep_s: seconds for which the name outlasts the session.
            to: other tenants that may read.
        """
        with self.lock:  # so that what is posted first has the smaller numbers
            messages = self.handovers.offers(offers)
            return self.ask.publish(name, messages, tree, keep_s, to)

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


_runtimes: WeakSet[Runtime] = WeakSet()


_locked: list[Runtime] = []
"""While this process forks: the sessions whose lock no other thread may have, or the child would not get it."""


def _fork_begins() -> None:
    _locked.extend(one for one in list(_runtimes) if one.lock.acquire(timeout=FORK_S))


def _fork_ends() -> None:
    while _locked:
        _locked.pop().lock.release()


def _forked() -> None:
    _fork_ends()
    for runtime in list(_runtimes):
        runtime.alive, runtime.forked = False, True
        if hasattr(runtime, "thread"):  # else it is being made
            runtime.thread.forked()


os.register_at_fork(before=_fork_begins, after_in_parent=_fork_ends, after_in_child=_forked)
