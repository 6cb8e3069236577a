"""Threads that wait handle the answers of hosts themselves, and a signal may interrupt them at any time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pw
from pw.client.connection import current
from pw.client.connection.line_loop import LineLoop
from pw.client.connection.waiting import Waiting
from pw.client.session.thread_messages import reject, resolve
from tests.stages.daemons import BOUND_S, until

CALLS = 600
"""More than the runs that a client may have in flight, so that no credit may be lost."""


class Interrupt(BaseException):
    """What the handler of a signal raises here."""


def interrupt(*_: object) -> None:
    raise Interrupt


@pytest.fixture(scope="module", params=["cluster", "embedded"])
def add_one(request: pytest.FixtureRequest) -> Iterator[Callable[[int], int]]:
    """A call that waits for its result, on a cluster of other processes or with the controller in this one."""
    pw.disconnect()
    with pw.LocalCluster() if request.param == "cluster" else contextlib.nullcontext():
        add = pw.jit(lambda x: x + 1)
        add(np.int32(0)).block_until_ready()  # the cluster is there
        yield lambda value: int(np.asarray(add(np.int32(value))))
    pw.disconnect()


def leased_launches() -> int:
    """How many launches this client has sent under leases."""
    return pw.stats()["client"].get("leased_launches", 0)


def until_leased(call: Callable[[], object]) -> None:
    """Call until calls are launched under a lease."""

    def is_leased() -> bool:
        before = leased_launches()  # this ends a lease
        for _ in range(50):
            call()
        return leased_launches() > before

    until(is_leased, "a launch under a lease")
    for _ in range(50):
        call()


def interrupted(act: Callable[[], object], at: int) -> bool:
    """Interrupt `act` at its call or return with this number; return whether it has so many."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if event in ("call", "return"):
            seen += 1
            if seen == at:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        act()
    except (Interrupt, RuntimeError):  # that of `threading.Condition.wait`
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("act", [Waiting.done, lambda waiting: waiting.settles(0.001)])
def test_an_interrupt_leaves_no_future_locked(act: Callable[[Waiting[int]], object]) -> None:
    for at in itertools.count(1):
        waiting = Waiting[int]()
        was_interrupted = interrupted(lambda waiting=waiting: act(waiting), at)  # type: ignore[misc]
        other = threading.Thread(target=waiting.set_result, args=(5,), daemon=True)
        other.start()
        other.join(BOUND_S)
        assert not other.is_alive(), f"locked after an interrupt at event {at}"
        if not was_interrupted:
            break
    assert at > 2


@pytest.mark.parametrize("settle", [resolve, reject])
def test_a_locked_future_holds_up_no_other(settle: Callable[..., None]) -> None:
    """The handler of a signal comes while its thread has the lock of one future, and waits for another one."""
    locked, other = Waiting[int](), Waiting[int]()

    def session() -> None:
        settle(locked, KeyError())
        settle(other, KeyError())

    thread = threading.Thread(target=session, daemon=True)
    with locked._condition:
        thread.start()
        assert other.settles(BOUND_S)
        assert locked.done(), "only the threads that wait hear of it later"
    assert locked.settles(BOUND_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in `__del__`
def test_interrupts_at_any_time_lose_nothing(add_one: Callable[[int], int]) -> None:
    assert add_one(1) == 2  # compiled
    when, hits = random.Random(3), 0
    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        for value in itertools.count():
            if hits == 60:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, when.uniform(1e-6, 2e-3))
                assert add_one(value) == value + 1
                assert add_one(-value) == 1 - value
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (Interrupt, RuntimeError):
                hits += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert add_one(7) == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in `__del__`
def test_an_exception_at_any_step_of_a_call_loses_nothing(add_one: Callable[[int], int]) -> None:
    """Calls go on with right values, and credits come back."""
    until_leased(lambda: add_one(0))
    for at in itertools.count(1, 2):
        is_over = not interrupted(lambda at=at: add_one(at), at)  # type: ignore[misc]
        for value in range(3):
            assert add_one(value) == value + 1
        if is_over:
            break
    assert at > 50
    for value in range(CALLS):
        assert add_one(value) == value + 1


def test_a_handler_may_wait_for_a_result(add_one: Callable[[int], int]) -> None:
    """Also while its thread waits for another one, which comes meanwhile or later."""
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(add_one(len(heard))))
    try:
        for value in range(20):
            add_one(0)
            count = len(heard)
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            waiting = _waiting()
            while len(heard) == count:
                with contextlib.suppress(TimeoutError):
                    waiting.result(0.2)
            assert add_one(value) == value + 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard == [k + 1 for k in range(20)]


def _waiting() -> Waiting[Any]:
    """A wait of this session that nothing settles."""
    results: Any = current.runtime().wait.__self__  # type: ignore[attr-defined]
    waiting: Waiting[Any] = results.make_future(((1, None),))
    return waiting


def test_a_handler_may_call_in_the_midst_of_calls(add_one: Callable[[int], int]) -> None:
    """It is told where it may not, and nothing is lost."""
    heard: list[int | None] = []

    def call(*_: object) -> None:
        try:
            heard.append(add_one(1))
        except pw.Error as error:
            heard.append(None if "handler of a signal" in str(error) else 0)

    when, before = random.Random(4), signal.signal(signal.SIGALRM, call)
    try:
        while heard.count(2) < 20:
            count = len(heard)
            signal.setitimer(signal.ITIMER_REAL, when.uniform(1e-4, 2e-3))
            while len(heard) == count:
                assert add_one(5) == 6
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(heard) <= {2, None}


def test_calls_that_wait_are_launched_from_here(add_one: Callable[[int], int]) -> None:
    until_leased(lambda: add_one(0))


def test_threads_that_wait_take_turns(add_one: Callable[[int], int]) -> None:
    wrong: list[tuple[int, int]] = []

    def call(first: int) -> None:
        for value in range(first, first + 100):
            if (found := add_one(value)) != value + 1:
                wrong.append((value, found))

    until_leased(lambda: add_one(0))
    threads = [threading.Thread(target=call, args=(1000 * k,)) for k in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert wrong == []


def test_what_another_thread_has_handled_ends_a_wait(
    add_one: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's loop takes the answer that a thread polls for: the thread is told."""
    until_leased(lambda: add_one(0))
    monkeypatch.setattr(LineLoop, "ignore", lambda self: None)  # so both watch the sockets
    for value in range(300):
        assert add_one(value) == value + 1


@pytest.mark.parametrize("how", ["polled", "called back"])
def test_an_answer_comes_though_no_thread_waits(add_one: Callable[[int], int], how: str) -> None:
    add = pw.jit(lambda x: x + 1)

    def made() -> Any:
        return add(np.int32(1))

    until_leased(lambda: made().block_until_ready())
    for _ in range(20):
        array = made()
        if how == "polled":
            until(array.is_ready, "a result")
        else:
            came: Future[None] = Future()
            array.start_wait().add_done_callback(lambda _, came=came: came.set_result(None))
            came.result(BOUND_S)
        array.block_until_ready()


class _Polling:
    """Answers for which a thread polls, until it is told."""

    def __init__(self) -> None:
        self.polls, self.told = threading.Event(), threading.Event()

    def drive(self, future: Waiting[Any], timeout_s: float) -> None:
        self.polls.set()
        assert self.told.wait(BOUND_S)

    def wake(self) -> None:
        self.told.set()

    look = watch = lambda self: None


def test_what_the_session_settles_ends_a_wait_for_answers() -> None:
    answers = _Polling()
    waits = Waiting[int](answers=answers)
    session = threading.Thread(
        target=lambda: answers.polls.wait(BOUND_S) and waits.set_result(5), daemon=True
    )
    session.start()
    assert waits.result(2 * BOUND_S) == 5


def test_a_thread_that_polls_lines_is_told_of_a_result() -> None:
    loop = asyncio.new_event_loop()  # the session's, which has nothing to do
    lines = LineLoop(loop, threading.RLock(), lambda: None, lambda: False)
    future = Waiting[int]()
    thread = threading.Thread(target=lines.wait, args=(future, 10 * BOUND_S), daemon=True)
    thread.start()
    until(lambda: lines.is_polled, "a thread that polls")
    future.set_result(5)
    lines.wake()
    thread.join(BOUND_S)
    assert not thread.is_alive()
    lines.close()
    loop.close()
