"""The background thread of a session: event loop, node, network and bulk plane of a client."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import uvloop

from pw.client.connection.wires import StreamWires, ThreadWires
from pw.client.display.live import About, Count, patiently
from pw.client.session.leases import Leases
from pw.client.session.lines import Lines
from pw.client.session.session import ClientSession
from pw.client.session.thread_messages import Await, AwaitHosts, Close, Get, Put, Tell, TellLaunched
from pw.client.session.uploads import LINE_BYTES
from pw.core.errors import ConnectionFailed, Disconnected, ErrorReport
from pw.core.ids import CONTROLLER
from pw.core.messages import Run, SliceBound
from pw.core.messages.roles import Role
from pw.transport.access.private import beside as private_folder
from pw.transport.access.security import Security
from pw.transport.bulk.plane import BulkPlane
from pw.transport.links.link import incarnation
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node

if TYPE_CHECKING:
    from pw.client.connection.runtime import Runtime

T = TypeVar("T")

LAUNCHES = 64
LAUNCHES_S = 10e-3
"""The session wakes for so many launches, or one so long after it has woken for others, to tell of them."""
TICK_S = 0.1
"""Seconds after which the arrays of released handles are deleted, if no call does it first."""
CALL_S = 30.0
SWITCH_INTERVAL_S = 0.0005
"""The interpreter's switch interval during a session. A call needs the interpreter some four times in turn with
other threads. Beside a thread that computes in Python it takes 31 ms with Python's default of 5 ms, and 3 ms
with this; that thread is 10 % slower while the script waits for each call. Pipelined calls get 17 % faster."""
ABSENT_S = 3.5
"""Seconds that a starting controller is waited for; a network looks once a second, so 4 s."""
HOSTS_S = 90.0
CHILDREN_S = 0.2
"""Seconds between two looks at whether a child has ended while its host is awaited."""


class LoopThread:
    """An event loop in a thread of its own.

    While there is one, the threads of this process switch more often (`SWITCH_INTERVAL_S`).
    """

    living: ClassVar[set[LoopThread]] = set()
    """The threads of this process that have not been stopped."""
    _usual_interval_s: ClassVar[float] = 0.0

    def __init__(self, name: str) -> None:
        if not self.living and sys.getswitchinterval() > SWITCH_INTERVAL_S:
            LoopThread._usual_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.living.add(self)
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return self._thread.ident == threading.get_ident()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop and return what it returns, or raise what it raises."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(CALL_S)

    def stop(self) -> None:
        """End the loop and join the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CALL_S)
        self.living.discard(self)
        if not self.living and self._usual_interval_s:
            if math.isclose(sys.getswitchinterval(), SWITCH_INTERVAL_S):  # no other code has set it
                sys.setswitchinterval(self._usual_interval_s)
            LoopThread._usual_interval_s = 0.0


class Daemon(Protocol):
    """A process that a cluster needs."""

    module: str

    def exit_code(self) -> int | None:
        """None while it runs."""


@dataclass(eq=False)
class SessionOnNode:
    """A session's actors on a node, over any network (see `SessionThread`)."""

    _thread: LoopThread
    node: Node
    _bulk: BulkPlane
    _runtime: Runtime
    address: str | None
    _teardown: Callable[[], None]
    make_wires: Callable[[Lines], ThreadWires]
    """Begins the network of the client's lines."""
    has_frames: bool = True
    certificate: str = ""
    _closed: bool = False
    _expected: tuple[int, Sequence[Daemon]] = (0, ())

    def __post_init__(self) -> None:
        self.endpoint = self.address
        node, runtime = self.node, self._runtime
        self._on_crash, node.on_crash = node.on_crash, self._crashed
        self._session = node.add(
            "session",
            lambda env: ClientSession(
                env,
                self._bulk,
                runtime.grant,
                runtime.session_ended,
                runtime.calls.arrived,
                partial(node.post_threadsafe, "session"),
                runtime.island_readers.changed,
            ),
        )
        self._leases, self._lines = self._session.leases, self._session.lines
        self._leases.lock = runtime.lock
        self._wires = self.make_wires(self._lines)
        self._work = self._wires.work
        self.drive, self.wake = self._wires.wait, self._wires.wake
        self.look, self.watch = self._wires.look, self._wires.watch
        self._launches = 0
        self._told_s = 0.0
        self._tick()

    @property
    def dashboard(self) -> str:
        """The link of the page that shows the cluster; empty if this session has not started one."""
        return ""

    def expect_hosts(self, count: int, children: Sequence[Daemon]) -> None:
        """The session is ready when `count` hosts are, unless one of `children` ends first."""
        self._expected = (count, children)

    def wait_for_hosts(self) -> None:
        """Wait for the expected hosts. Raises ConnectionFailed if they do not come."""
        count, children = self._expected
        if not count:
            return
        ready: Future[None] = Future()
        self.post(AwaitHosts(count, ready))

        def settles(timeout_s: float | None) -> bool:
            deadline_s = time.monotonic() + (HOSTS_S if timeout_s is None else timeout_s)
            while True:
                rest_s = deadline_s - time.monotonic()
                if wait([ready], max(0.0, min(rest_s, CHILDREN_S))).done or rest_s <= 0:
                    return ready.done()
                _check_running(children)

        def progress() -> Count:
            return Count(len(self._session.hosts.names), count)

        ask = self._runtime.ask
        about = partial(About, "the hosts of the cluster", ask.ask_why, progress=progress)
        patiently(settles, about, HOSTS_S)
        if not ready.done():
            raise ConnectionFailed(
                f"the cluster's {count} hosts were not ready within {HOSTS_S:.0f} s. "
                + ask.in_the_way()
            )
        ready.result()

    def bound(self, slice: int) -> SliceBound | None:
        """Return how a slice is bound, or was last; None if it was given back."""
        # There is no journal beside the controller, where a host that is lost ends the session.
        session = self._session
        return session.link.journal.bound.get(slice) or session.hosts.slices.get(slice)

    def is_lost(self, slice: int) -> bool:
        """Whether a slice has no devices now: its island was lost, or it was given back."""
        return slice not in self._session.hosts.slices

    def trouble(self) -> str:
        """What is in the way of a link to the controller; empty if that is not known."""
        return self._thread.call(lambda: self.node.network.trouble_of(CONTROLLER))

    def _tick(self) -> None:
        if not self._closed:
            self._runtime.tick()
            if self._launches:
                self._launches = 0
                self.node.post("session", TellLaunched())
            self._wires.tick()
            self.node.look()
            self.node.loop.call_later(TICK_S, self._tick)

    def _crashed(self, actor: str, error: BaseException) -> None:
        """End the session if it has crashed: it has lost a message, and a thread could wait for ever."""
        self._on_crash(actor, error)
        if actor == "session":
            self.post(Close(ErrorReport.of(error).exception(), Future()))

    def post(self, note: object) -> None:
        """Deliver a note to the session; from any thread with the session's lock."""
        self._leases.posting(note)
        self._post(note)

    def _post(self, note: object) -> None:
        node = self.node
        node.post_here("session", note)
        if self._thread.is_current():
            node.collect()
            node.request_turn()
        else:
            node.wake()

    def call(
        self,
        run: int,
        program: int,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
        wanted: Await | Get | None,
    ) -> None:
        """Have a program run, and ask for a result if one is `wanted`; from any thread with the lock."""
        leases, work = self._leases, self._work
        if program in leases.programs and not work.is_at_work:
            work.is_at_work = True
            launched = leases.launch(run, program, args, results, wanted)
            work.is_at_work = False
            if launched:
                self._launches += 1
                now_s = time.monotonic()
                is_late = self._launches >= LAUNCHES or now_s > self._told_s + LAUNCHES_S
                if is_late or leases.is_short:
                    self._launches, self._told_s, leases.is_short = 0, now_s, False
                    self._post(TellLaunched())
                return
        message = Run(run, program, args, results)
        leases.ordinary(message)
        self._post(Tell(message))
        if wanted is not None:
            self.ask(wanted)

    def put(self, note: Put) -> None:
        """Upload a value; from any thread with the lock."""
        work = self._work
        if note.value.nbytes <= LINE_BYTES and not self._closed and not work.is_at_work:
            work.is_at_work = True
            self._session.put(note, self.post)
            work.is_at_work = False
            self._launches += bool(note.bound)  # to be told of
        else:
            self.post(note)

    @property
    def leases(self) -> Leases:
        """What this client may launch itself."""
        return self._leases

    def ask(self, note: Await | Get) -> None:
        """Ask hosts for what an array is, or whether it is ready; from any thread with the lock."""
        work = self._work
        if not self._closed and not work.is_at_work:
            work.is_at_work = True
            is_asked = self._lines.ask(note)
            work.is_at_work = False
            if is_asked:
                return
        self._post(note)

    def is_here(self) -> bool:
        """Whether the caller is the thread of the session."""
        return self._thread.is_current()

    def hurry(self) -> None:
        """Handle what was posted at once; on the session's own thread."""
        self.node.turn_now()

    def forked(self) -> None:
        """This is the copy in a forked process: nothing comes here."""
        self._wires.forked()

    def counters(self) -> dict[str, int]:
        """This process's counters. Raises Disconnected if the session ends."""
        self._check_open()
        try:
            return self._thread.call(self._counters)  # the bulk plane belongs to the loop
        except (RuntimeError, TimeoutError):
            self._check_open()  # the session may have ended, and its loop
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise Disconnected("the pw session was closed")

    def _counters(self) -> dict[str, int]:
        self._check_open()
        moved = {f"bulk_{name}": value for name, value in self._bulk.counters().items()}
        return dict(self.node.counters) | moved

    def close(self) -> None:
        """Say goodbye, end the thread, and release all that was started for it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.call(self._close_on_loop)
        finally:
            self._teardown()

    def _close_on_loop(self) -> None:
        self._wires.close()
        self.node.close()
        self._bulk.close()


def _check_running(children: Sequence[Daemon]) -> None:
    for child in children:
        if child.exit_code() is not None:
            raise ConnectionFailed(
                f"{child.module} ended with exit code {child.exit_code()} before its island was ready; its "
                "error is above"
            )


def remote(
    address: str,
    beside: LoopThread | None = None,
    security: Security | None = None,
    absent_s: float = ABSENT_S,
) -> Callable[[Runtime], SessionOnNode]:
    """Return a function that starts a session with the controller at `address`.

    Args:
        address: the controller's.
        beside: the thread that it lives in; None for one of its own.
        security: how it uses tcp; by default what the environment says.
        absent_s: seconds that a controller which is just starting is waited for.

    Raises (when called with a runtime):
        ConnectionFailed: it is no address such as `tcp://127.0.0.1:7777`.
        Error: the credentials cannot be used.
    """

    def start(runtime: Runtime) -> SessionOnNode:
        if not address.startswith(("tcp://", "ipc://")):
            raise ConnectionFailed(
                f"{address!r} is not the address of a controller; it looks like tcp://host:port"
                + f"; did you mean tcp://{address}?" * (":" in address and "://" not in address)
            )
        folder = private_folder(address)
        credentials, insecure = security or Security.of(address, role=Role.CLIENT)
        if credentials is not None and (words := credentials.end_in_words):
            words = (
                f"the certificate in {words}; ask for a new one, then run `pw join` with its file"
            )
            warnings.warn(words, stacklevel=2)
        thread = beside or LoopThread("pw-session")
        stop = thread.stop if beside is None else lambda: None  # other sessions use the thread

        def make() -> SessionOnNode:
            name = f"client-{os.getpid()}-{secrets.token_hex(4)}"
            network = StreamNetwork(
                thread.loop,
                name,
                incarnation(),
                absent_s=absent_s,
                credentials=credentials,
                insecure=insecure,
            )
            node = Node(name, thread.loop, network)
            network.introduce(CONTROLLER, address)
            bulk = BulkPlane(
                thread.loop, folder=folder, credentials=credentials, insecure=insecure, endpoint=""
            )
            certificate = "" if credentials is None else credentials.own.user
            return SessionOnNode(
                thread,
                node,
                bulk,
                runtime,
                address,
                stop,
                certificate=certificate,
                make_wires=lambda lines: StreamWires(
                    thread.loop, runtime.lock, lines, node.counters, credentials, insecure
                ),
            )

        try:
            return thread.call(make)
        except BaseException:
            stop()
            raise

    return start
