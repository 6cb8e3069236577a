"""The connected runtime: what the API's objects stand on.

A runtime is one session with a cluster. Its actors live on an event loop in a background thread; the
methods here are called by the user's threads, give names to what they create, post a note, and return.
Nothing here waits for a reply but `allocate_slice`, `status` and `stats`, and, when the client is too far
ahead, `run` and uploads for runs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from pw.client.connection.fetching import Fetching
from pw.client.connection.waiting import Waiting
from pw.client.session.notes import (
    Allocate,
    Ask,
    Await,
    Close,
    Forget,
    Get,
    Listen,
    Look,
    Open,
    Put,
    Tell,
)
from pw.client.session.uploads import KEEP_BYTES
from pw.client.show.live import About, patiently
from pw.client.show.worker_output import WorkerOutput, is_wanted
from pw.core.compact import Compact
from pw.core.errors import ArgumentError, ConnectionFailed, Disconnected, Error, ErrorReport
from pw.core.ids import client_id
from pw.core.messages import (
    INLINE_BYTES,
    AllocateSlice,
    Artifact,
    Attached,
    Cancel,
    CancelRuns,
    Checkpoint,
    CreateArray,
    Described,
    DrainHost,
    Explain,
    Explanation,
    FileSource,
    GetStats,
    GetStatus,
    RegisterProgram,
    ReleaseProgram,
    ReleaseSlice,
    Run,
    SaveArrays,
    SliceBound,
    Status,
)
from pw.core.program import Program
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.transport import codec

T = TypeVar("T")

CALLS_NAMED = 1024
"""Runs whose names are remembered: more than may be in flight."""
PARTS_COUNTED = 256
"""A wait for more arrays than this does not count how many of them are ready."""
CONNECT_S = 30.0
CLOSE_S = 30.0
"""A session settles all that was asked of it before it ends: a busy machine may need a while for thousands."""
RECONNECT_S = 60.0
EXPLAIN_S = 10.0
HURRIED_S = 1.5
"""How long an explanation may take that nobody has asked for."""
RELEASES_KEPT = 64
RELEASED_BYTES = 16 << 20
"""Handles that may have died, and the size of their arrays, before those are deleted without waiting for the
next tick: hosts had better use warm pages again than take fresh ones."""
AHEAD_BYTES = 1 << 30
"""Bytes of host values that calls have uploaded for runs in flight before a call that has another waits: in a
loop that waits for nothing, the inputs of every step ahead lie on the hosts. It leaves room for some large
batches, so that the next is sent while one is computed on."""


MANY_ARGUMENTS = codec.MAX_FRAME_BYTES // 2 // INLINE_BYTES
"""So many small host values always travel with a run."""


class SliceHandle:
    """A slice as the cluster bound it."""

    __slots__ = ("island", "kind", "platform", "size", "slice")

    def __init__(self, bound: SliceBound) -> None:
        self.slice = bound.slice
        self.island = bound.island
        self.platform = bound.platform
        self.kind = bound.kind
        self.size = len(bound.devices)


class SessionThread(Protocol):
    """The background thread in which a session's actors live."""

    address: str | None
    endpoint: str | None
    """Where other processes reach the controller; None if they cannot."""
    has_frames: bool
    """What is sent leaves this process, and no frame may be too large."""

    def post(self, note: object) -> None:
        """Deliver a note to the session; from any thread."""

    def wait_for_hosts(self) -> None:
        """Wait for the hosts that were started with the session. Raises ConnectionFailed."""

    def counters(self) -> dict[str, int]:
        """This process's counters."""

    def close(self) -> None:
        """Say goodbye, end the thread, and release whatever was started for it."""


CLOSED = "pw.disconnect() was called, or its LocalCluster was closed"


class Runtime:
    """One session with a cluster, as the API's threads see it."""

    def __init__(
        self,
        start: Callable[[Runtime], SessionThread],
        share: float,
        priority: int,
        connect_s: float = CONNECT_S,
        keep_bytes: int = KEEP_BYTES,
        reconnect_s: float = RECONNECT_S,
        worker_output: bool | None = None,
    ) -> None:
        self._output = WorkerOutput() if is_wanted(worker_output) else None
        self._show_output = (lambda: None) if self._output is None else self._output.flush
        """Has what was written before a result is read be seen before it."""
        self._lock = threading.RLock()
        self._serial = 0
        self._turn = threading.Condition(self._lock)
        """Runs have ended, or there will be no more."""
        self._credits = 0
        """Runs that may be in flight."""
        self._runs = self._runs_over = 0
        self._inputs: deque[tuple[int, int]] = deque()
        """Uploads for runs in flight: the number of runs with that which needs it, and its size."""
        self._inputs_bytes = 0
        self._released: deque[int] = deque()
        self._released_bytes = 0  # about: several threads may change it at once
        self._sent: Counter[bytes] = Counter()
        """Artifacts that the controller has, and how many programs need each: it keeps them no longer."""
        self._needs: dict[int, tuple[bytes, ...]] = {}
        self._unused: deque[int] = deque()
        """Programs that died, of which the controller has not been told."""
        self._saving: set[Future[None]] = set()
        """Checkpoints that are being written to disk."""
        self._closing: Error | None = None
        """Why no calls can be made any more."""
        self._ended: ErrorReport | None = None
        self._is_closed = False
        self._process = _process
        self._thread = start(self)
        self._names: dict[int, str] = {}
        """What programs are called."""
        self._calls: deque[tuple[int, int, str]] = deque(maxlen=CALLS_NAMED)
        """The newest runs: number, results and program."""
        attached: Future[Attached] = Waiting(about=self._about_controller)
        if self._thread.address is None:
            reconnect_s = 0.0  # the controller is in this process
        self._patience_s = CONNECT_S + reconnect_s
        name = f"pid {os.getpid()}"
        show = None if self._output is None else self._output.show
        self._thread.post(Open(name, share, priority, keep_bytes, attached, reconnect_s, show))
        try:
            answer = attached.result(connect_s)
            self._thread.wait_for_hosts()
        except TimeoutError:
            self._thread.close()
            raise ConnectionFailed(
                f"no answer from a controller at {self._thread.address} within {connect_s:.0f} s; "
                "is pw-controller running there?"
            ) from None
        except BaseException:
            self._thread.close()
            raise
        self.client = answer.client
        self.islands = answer.islands
        self._credits = answer.run_credits

    # --- life ----------------------------------------------------------------------------------------

    @property
    def address(self) -> str | None:
        """Address of the controller; None for an embedded cluster."""
        return self._thread.address

    @property
    def endpoint(self) -> str | None:
        """Where other processes reach the controller, also that of an embedded cluster; None if they cannot."""
        return self._thread.endpoint

    @property
    def forked(self) -> bool:
        """Whether this is a forked process's copy of its parent's session."""
        return self._process is not _process

    @property
    def alive(self) -> bool:
        """Whether calls can still be made."""
        return self._closing is None and not self.forked

    @property
    def ended(self) -> Error | None:
        """The error that ended the session, if it was not closed: each time a new one, to be raised."""
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
        """End the session: everything it owns is released on every host. Idempotent.

        Checkpoints on their way to disk get there first, unless there is an error.
        """
        if self.forked:
            return
        if error is None and self._closing is None:
            saving = set(self._saving)
            if saving:
                about = partial(About, "checkpoints to be written before the session ends")
                patiently(lambda timeout_s: not wait_for_all(saving, timeout_s).not_done, about)
        closed: Future[None] = Future()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._closing is None:
                self._closing = error or Disconnected(CLOSED)
            self._turn.notify_all()
            self._thread.post(Close(self._closing, closed))
        with contextlib.suppress(TimeoutError):
            closed.result(CLOSE_S)
        self._thread.close()
        if self._output is not None:
            self._output.close()

    def _post(self, note: object) -> None:
        """Hand a note to the session; what is posted before `close` is settled by it."""
        with self._lock:
            self.check_alive()
            self._thread.post(note)

    def grant(self, count: int) -> None:
        """Called by the session: so many more runs may be sent."""
        with self._lock:
            self._runs_over += count
            self._turn.notify_all()

    def session_ended(self, error: Error) -> None:
        """Called by the session: it is over, unless `close` has said so already."""
        with self._lock:
            if self._closing is None:
                words = f"{error}. This session is over; pw.connect() begins another"
                self._ended = ErrorReport(type(error).__name__, words)
                self._closing = error
                self._turn.notify_all()

    def tick(self) -> None:
        """Called on the session's thread now and then: delete what no handle refers to any more."""
        if self._released:
            self._flush_released()
        if self._unused:
            self._release_programs()

    def _id(self) -> int:
        return self._ids(1)[0]

    def _ids(self, count: int) -> Sequence[int]:
        with self._lock:
            # A signal's handler may come between two calls, not between these lines.
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
    ) -> SliceHandle:
        """Bind virtual devices. Raises InsufficientDevices with what was asked and what exists."""
        what = f"{devices} devices{f' of island {island}' if island else ''}"
        bound: Future[SliceBound] = Waiting(self.in_the_way, partial(self._about, what))
        request = AllocateSlice(self._id(), devices, kind, island, topology)
        self._post(Allocate(request, bound))
        return SliceHandle(bound.result(self._patience_s))

    def release_slice(self, slice: int) -> None:
        """Give a slice back."""
        self._tell(ReleaseSlice(slice))

    # --- programs ------------------------------------------------------------------------------------

    def register_program(self, program: Program, artifacts: Mapping[bytes, bytes]) -> int:
        """Announce a program; hosts compile it while the client goes on. Returns its number.

        Raises ArgumentError for a program that no message can hold.
        """
        body = Compact.of(program)
        if self._thread.has_frames:
            _check_size(body, artifacts)
        number = self._id()
        python = {each.placement.slice for each in program.computations if each.python}
        with self._lock:
            self.check_alive()
            new = [Artifact(d, blob) for d, blob in artifacts.items() if d not in self._sent]
            self._thread.post(Tell(RegisterProgram(number, body, tuple(new))))
            if self._output is not None and python:
                self._thread.post(Listen(tuple(python)))
            self._sent.update(artifacts.keys())
            self._needs[number] = tuple(artifacts)
            self._names[number] = program.name
        return number

    def release_program(self, program: int) -> None:
        """The program will not be run any more; callable from `__del__`, even in the garbage collector.

        The controller hears of it with the next tick, never amid the registration of another program.
        """
        self._unused.append(program)

    def _release_programs(self) -> None:
        with self._lock:
            while self._unused:
                program = self._unused.popleft()
                self._names.pop(program, None)
                for digest in self._needs.pop(program, ()):
                    self._sent[digest] -= 1
                    if not self._sent[digest]:
                        del self._sent[digest]
                self._tell(ReleaseProgram(program))

    def run(self, program: int, args: Sequence[int | bytes], results: int) -> list[int]:
        """Run a program on arrays and small host values; returns the ids of its results at once.

        Blocks only while the client has as many runs in flight as the controller allows. Raises ArgumentError
        if no message can hold the host values.
        """
        self.check_alive()
        if len(args) > MANY_ARGUMENTS and self._thread.has_frames:
            _check_arguments(args)
        self._make_room()
        while True:
            with self._lock:
                self.check_alive()
                if self._has_credit():
                    *made, run = self._ids(results + 1)
                    self._thread.post(Tell(Run(run, program, tuple(args), tuple(made))))
                    self._runs += 1
                    self._calls.append((run, results, self._names.get(program, "")))
                    return made
            what = f"one of {self._credits} calls in flight to end"
            patiently(partial(self._comes, self._has_credit), partial(self._about, what))

    def _has_credit(self) -> bool:
        return self._runs - self._runs_over < self._credits or self._closing is not None

    def _comes(self, what: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait, without holding the lock meanwhile, until something is so; runs that end may make it so."""
        with self._lock:
            return self._turn.wait_for(what, timeout_s)

    # --- arrays --------------------------------------------------------------------------------------

    def upload(
        self,
        value: np.ndarray[Any, Any],
        spec: ArraySpec,
        keep: bool = False,
        for_run: bool = False,
    ) -> int:
        """Send a host value straight to the hosts of `spec`; returns the array's id at once.

        The value is copied first if somebody could still change it. It is kept, in case that hosts
        are lost: `keep` exempts it from the budget for that. An upload `for_run`, which is about to be
        sent, blocks while those for runs in flight are `AHEAD_BYTES` or more.
        """
        self.check_alive()
        self._make_room()
        if for_run:
            self._count_input(value.nbytes)
        if _mutable(value):
            value = value.copy()
        array = self._id()
        self._post(Put(array, spec, value, keep))
        return array

    def _count_input(self, size_bytes: int) -> None:
        """Wait for room, only ever for runs that have been sent, and take it for the next one that is.

        Which runs have ended is not known, only how many: those that were sent first, it is assumed.
        """
        while True:
            with self._lock:
                self.check_alive()
                if self._has_room():
                    self._inputs.append((self._runs + 1, size_bytes))
                    self._inputs_bytes += size_bytes
                    return
            what = f"calls in flight to take the {self._inputs_bytes >> 20} MiB that were sent for them"
            patiently(partial(self._comes, self._has_room), partial(self._about, what))

    def _has_room(self) -> bool:
        while self._inputs and self._inputs[0][0] <= self._runs_over:
            self._inputs_bytes -= self._inputs.popleft()[1]
        is_over = self._runs <= self._runs_over or self._closing is not None
        return self._inputs_bytes < AHEAD_BYTES or is_over

    def fetch(self, array: int, spec: ArraySpec) -> Fetching:
        """The whole value, straight from the hosts that hold it."""
        about = partial(self._about_arrays, ((array, spec),))
        future = Fetching(spec, self.in_the_way, about, self._show_output)
        self._post(Get(array, spec, future))
        return future

    def wait(self, arrays: Sequence[tuple[int, ArraySpec]]) -> Future[None]:
        """A future of the moment when all arrays are ready; it fails with the first one's error."""
        wanted = tuple(arrays)
        about = partial(self._about_arrays, wanted)
        future: Future[None] = Waiting(self.in_the_way, about, self._show_output)
        self._post(Await(wanted, future))
        return future

    def release(self, array: int, size_bytes: int) -> None:
        """The last handle of an array died; callable from `__del__`, even in the garbage collector.

        Nothing comes of it if the session has ended.
        """
        if self._closing is None:
            self._released.append(array)
            self._released_bytes += size_bytes

    def delete(self, arrays: Sequence[int]) -> None:
        """Drop arrays now, in order with the runs that use them."""
        if arrays and self.alive:
            with contextlib.suppress(Error):  # the session is over, and its arrays with it
                self._post(Forget(tuple(arrays)))

    def _make_room(self) -> None:
        if len(self._released) > RELEASES_KEPT or self._released_bytes > RELEASED_BYTES:
            self._flush_released()

    def _flush_released(self) -> None:
        arrays = []
        self._released_bytes = 0
        while self._released:
            try:
                arrays.append(self._released.popleft())
            except IndexError:
                break
        self.delete(arrays)

    # --- giving up -------------------------------------------------------------------------------------

    def cancel(self, arrays: Sequence[int]) -> None:
        """Give up the runs that are to make these arrays."""
        if arrays:
            self._tell(Cancel(tuple(arrays)))

    def cancel_runs(self, client: int, run: int = 0) -> Future[None]:
        """Have a run of any client given up, or all that a client has in flight."""
        future: Future[None] = Future()
        self._post(Ask(lambda request: CancelRuns(request, client, run), future))
        return future

    # --- before hosts go -------------------------------------------------------------------------------

    def checkpoint(self, arrays: Sequence[int]) -> Future[None]:
        """Have arrays copied to host memory, in order with the runs that make and donate them."""
        what = f"a checkpoint of {_counted(len(arrays))}"
        future: Future[None] = Waiting(self.in_the_way, partial(self._about, what))
        numbers = tuple(dict.fromkeys(arrays))
        self._post(Ask(lambda request: Checkpoint(request, numbers), future, numbers))
        return future

    def save(
        self, path: str, overwrite: bool, arrays: Mapping[str, int], tree: bytes
    ) -> Future[None]:
        """Have arrays written to disk by their hosts, in order with the runs that make and donate them."""
        what = f"a checkpoint of {_counted(len(arrays))} at {path}"
        future: Future[None] = Waiting(self.in_the_way, partial(self._about, what))
        names, numbers = tuple(arrays), tuple(arrays.values())
        checkpoint = secrets.token_hex(8)
        self._post(
            Ask(
                lambda request: SaveArrays(
                    request, checkpoint, path, overwrite, numbers, names, tree
                ),
                future,
                numbers,
            )
        )
        self._saving.add(future)
        future.add_done_callback(self._saving.discard)
        return future

    def look(self, path: str, placement: Placement) -> Described:
        """What is on disk at a path, in the eyes of the hosts of this placement."""
        about = partial(self._about, f"what is at {path}")
        answer: Future[Described] = Waiting(self.in_the_way, about)
        spec = ArraySpec((), "bool", Sharding((), ()), placement)
        self._post(Look(path, spec, answer))
        return answer.result()

    def load(self, source: FileSource, spec: ArraySpec) -> int:
        """Have an array read from disk by its hosts; returns its id at once."""
        array = self._id()
        self._post(Tell(CreateArray(array, spec, source=source)))
        return array

    def drain(self, host: str) -> Future[None]:
        """Have a host left by all that runs and lies there; settled when it may be switched off."""
        about = partial(self._about, f"host {host} to be left by all that runs and lies there")
        future: Future[None] = Waiting(self.in_the_way, about)
        self._post(Ask(lambda request: DrainHost(request, host), future))
        return future

    # --- reports -------------------------------------------------------------------------------------

    def status(self, timeout_s: float = CONNECT_S) -> Status:
        """The cluster as the controller sees it. Raises ConnectionFailed if it does not answer in time."""
        answer: Future[Status] = Future()
        self._post(Ask(GetStatus, answer))
        return self._answered(answer, timeout_s)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of every process: the controller, each host, and this client."""
        about = partial(self._about, "the counters of all hosts")
        answer: Future[dict[str, dict[str, int]]] = Waiting(self.in_the_way, about)
        self._post(Ask(GetStats, answer))
        collected = dict(answer.result(self._patience_s))
        collected["client"] = self._thread.counters()
        return collected

    def explain(self, timeout_s: float = EXPLAIN_S) -> Explanation:
        """Why it does not go on, in words and as data. Raises ConnectionFailed if nobody answers in time."""
        return self._answered(self._ask_why(), timeout_s)

    def _answered(self, answer: Future[T], timeout_s: float) -> T:
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            where = f"at {self.address}" if self.address else "in this process"
            raise ConnectionFailed(
                f"the controller {where} has not answered within {timeout_s:g} s; is it running?"
            ) from None

    def in_the_way(self) -> str:
        """Why it does not go on, for somebody who has waited too long already; raises nothing."""
        try:
            return self.explain(HURRIED_S).text
        except Error as error:
            return str(error)

    # --- waits ---------------------------------------------------------------------------------------

    def about_hosts(self, progress: Callable[[], str]) -> About:
        """Describe the wait of this process for the hosts of its cluster."""
        return About("the hosts of the cluster", self._ask_why, progress=progress)

    def _about_controller(self) -> About:
        return About(f"an answer of the controller at {self.address}")

    def _about(self, what: str) -> About:
        return About(what, self._ask_why)

    def _about_arrays(self, arrays: tuple[tuple[int, ArraySpec], ...]) -> About:
        """Describe a wait for these arrays."""
        parts: Sequence[Future[None]] = ()
        if 1 < len(arrays) <= PARTS_COUNTED:
            parts = [self.wait([one]) for one in arrays]
        what = arrays[0][1].short if len(arrays) == 1 else _counted(len(arrays))
        makers = self._makers({array for array, _ in arrays})
        names = ", ".join(map(repr, makers[:3])) + (", ..." if len(makers) > 3 else "")
        return About(f"{what} of {names}" if names else what, self._ask_why, parts)

    def _makers(self, arrays: Set[int]) -> list[str]:
        """The names of the programs that make these, as far as they are among the newest calls."""
        with self._lock:
            calls = list(self._calls)
        found = (
            name
            for run, results, name in calls
            if any(a in arrays for a in range(run - results, run))
        )
        return list(dict.fromkeys(filter(None, found)))

    def _ask_why(self) -> Future[Explanation]:
        answer: Future[Explanation] = Future()
        self._post(Ask(Explain, answer))
        return answer

    def _tell(self, message: object) -> None:
        with contextlib.suppress(Error):  # the session is over
            self._post(Tell(message))


def _check_size(body: Compact[Program], artifacts: Mapping[bytes, bytes]) -> None:
    """Raise ArgumentError for a program that cannot travel: to a host it goes with all its artifacts."""
    program = body.held
    every = tuple(Artifact(digest, artifacts[digest]) for digest in artifacts)
    try:
        codec.encode_message(RegisterProgram(0, body, every))
    except codec.TooManyObjects as error:
        raise ArgumentError(
            f"the program {program.name!r} cannot be sent to the cluster: {error}. It takes "
            f"{len(program.inputs)} arrays and makes {len(program.outputs)}, with {len(program.nodes)} calls: "
            "stack arrays that are alike, or divide the function"
        ) from error
    except codec.MessageTooLarge as error:
        sizes = {artifact.digest: len(artifact.blob) for artifact in every}
        name, size_bytes = max(
            ((one.name, sizes.get(one.artifact, 0)) for one in program.computations),
            key=lambda known: known[1],
            default=("", 0),
        )
        raise ArgumentError(
            f"the program {program.name!r} cannot be sent to the cluster: {error}. Its largest "
            f"computation, {name!r}, takes {size_bytes} bytes; a large value that is part of one belongs in "
            "an argument: place it once with pw.put(x), and pass it"
        ) from error


def _check_arguments(args: Sequence[int | bytes]) -> None:
    """Raise ArgumentError for host values that cannot travel with their run."""
    size_bytes = sum(len(arg) for arg in args if isinstance(arg, bytes))
    limit_bytes = codec.MAX_FRAME_BYTES // 2
    if size_bytes > limit_bytes:
        raise ArgumentError(
            f"a call has {len(args)} arguments, and those that are small host values take {size_bytes} bytes "
            f"together, more than the {limit_bytes} that travel with one call: place them with pw.put first, "
            "or stack them"
        )


def _counted(arrays: int) -> str:
    return f"{arrays} array{'' if arrays == 1 else 's'}"


def _mutable(value: np.ndarray[Any, Any]) -> bool:
    """Whether somebody could still write to the memory of `value`."""
    array: Any = value
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return isinstance(array, (bytearray, memoryview)) and not memoryview(array).readonly


_process = object()
"""Another one in a forked child: asking the system who we are takes longer than a call may."""


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)
