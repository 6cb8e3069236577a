"""Threads that wait do the session's work themselves, and a signal may interrupt them at any time."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import select
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
from pw.client.connection import current, driving, signals
from pw.client.connection.waiting import Waiting
from pw.client.session.thread_messages import Await, reject, resolve
from pw.transport.links.node import Node
from tests.stages.daemons import BOUND_S, until


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


@pytest.fixture
def borrows(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads that have done a session's work."""
    names: set[str] = set()
    turn_of = Node.turn_of

    def noted(node: Node, act: Callable[[], object]) -> None:
        names.add(threading.current_thread().name)
        turn_of(node, act)

    monkeypatch.setattr(Node, "turn_of", noted)
    return names


def in_poll(thread: threading.Thread) -> bool:
    """Whether a thread is in `Signals.wait`."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is signals.Signals.wait.__code__


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
        assert not locked.done()
    assert locked.settles(BOUND_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in `__del__`
def test_interrupts_at_any_time_lose_nothing(
    add_one: Callable[[int], int],
) -> None:
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


@pytest.fixture
def usual() -> Iterator[list[int]]:
    """What a handler of SIGUSR1 has heard; the handlers of the tests come back afterwards."""
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_are_called_after_a_turn(usual: list[int]) -> None:
    noting, handler = signals.Signals(), signal.getsignal(signal.SIGUSR1)
    outer: dict[int, Any] = {}
    inner: dict[int, Any] = {}
    noting.begin(outer)
    noting.begin(inner)
    signal.raise_signal(signal.SIGUSR1)
    noting.end(inner)
    assert usual == []
    noting.end(outer)
    assert usual == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_handler_that_sets_handlers_has_the_last_word(usual: list[int]) -> None:
    def last(*_: object) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, interrupt)

    noting, handlers = signals.Signals(), dict[int, Any]()
    signal.signal(signal.SIGUSR2, last)
    noting.begin(handlers)
    signal.raise_signal(signal.SIGUSR2)
    noting.end(handlers)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGUSR1) is interrupt


def test_a_handler_that_raises_while_handlers_come_back_leaves_the_others(
    usual: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another signal comes in the moment in which a handler is to be set."""
    noting, handler, handle = signals.Signals(), signal.getsignal(signal.SIGUSR1), signal.signal
    interrupts = [Interrupt]

    def set_later(number: int, to: Any) -> None:
        if to is handler and interrupts:
            raise interrupts.pop()
        handle(number, to)

    handlers: dict[int, Any] = {}
    noting.begin(handlers)
    monkeypatch.setattr(signals, "set_handler", set_later)
    with pytest.raises(Interrupt):
        noting.end(handlers)
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_signal_ends_the_wait_of_the_main_thread_alone(usual: list[int]) -> None:
    noting, handlers = signals.Signals(), dict[int, Any]()
    end, poll = os.eventfd(0), select.poll()
    poll.register(end, select.POLLIN)
    waits: list[object] = []
    other = threading.Thread(target=lambda: waits.append(noting.wait(poll, BOUND_S)))

    def interrupt_the_wait(main: int) -> None:
        until(lambda: noting.is_waiting, "a main thread that waits")
        signal.pthread_kill(main, signal.SIGUSR1)

    killer = threading.Thread(target=interrupt_the_wait, args=(threading.get_ident(),))
    noting.begin(handlers)
    try:
        other.start()
        until(lambda: in_poll(other), "a thread that waits")
        signal.raise_signal(signal.SIGUSR1)
        killer.start()
        assert noting.wait(select.poll(), BOUND_S) is None
        assert waits == []
    finally:
        noting.end(handlers)
        os.eventfd_write(end, 1)
        other.join()
        killer.join()
        os.close(end)
    assert waits == [[(end, select.POLLIN)]]
    assert usual == [signal.SIGUSR1]


def test_a_handler_may_wait_for_a_result(add_one: Callable[[int], int]) -> None:
    """Its signal ends the wait of the thread that does the loop's work."""
    driver: Any = current.runtime().thread.driver
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(add_one(len(heard))))
    try:
        for _ in range(20):
            add_one(0)  # a thread that waits soon again may borrow the loop
            count, never = len(heard), Future[None]()
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            while len(heard) == count:
                driver.wait(never)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard == [k + 1 for k in range(20)]


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


def test_a_loop_can_be_borrowed_while_asyncio_is_debugged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    loop = driving.BorrowedLoop()
    try:
        assert not loop.get_debug()
    finally:
        loop.close()


def test_calls_that_wait_are_launched_from_here(add_one: Callable[[int], int]) -> None:
    def are_leased() -> bool:
        for _ in range(50):
            add_one(0)
        return any(counters.get("leased_launches") for counters in pw.stats().values())

    until(are_leased, "a launch under a lease")


def test_threads_take_turns_with_the_loop(
    add_one: Callable[[int], int], borrows: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[tuple[int, int]] = []

    def call(first: int) -> None:
        for value in range(first, first + 100):
            if (found := add_one(value)) != value + 1:
                wrong.append((value, found))

    for bound in ("LONGEST_S", "ASKED_S"):  # on a busy machine a loop rests late
        monkeypatch.setattr(driving, bound, 0.1)  # no longer: a loop that is wanted does not rest

    def has_borrowed() -> bool:
        call(0)
        return threading.current_thread().name in borrows

    until(has_borrowed, "a loop that is borrowed")
    threads = [threading.Thread(target=call, args=(1000 * k,)) for k in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert wrong == []


def test_what_the_loop_has_in_hand_is_handled_by_the_borrower(
    add_one: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a callback of the loop posts, just before the loop rests, would else wait until it goes on."""
    thread: Any = current.runtime().thread
    driver, node = thread.driver, thread.node
    by: list[threading.Thread] = []
    settled: Future[None] = Future()
    settled.add_done_callback(lambda _: by.append(threading.current_thread()))
    rest = driver.rest

    def rest_with_work_in_hand() -> None:
        node.post("session", Await((), settled))
        rest()

    add_one(0)
    until(lambda: not driver.is_mine(), "a loop that goes on")
    monkeypatch.setattr(driver, "rest", rest_with_work_in_hand)
    monkeypatch.setattr(driver, "not_before_s", 0.0)
    monkeypatch.setattr(
        driver, "left_s", math.inf
    )  # the wait before this one was short, and just now
    for bound in ("LONGEST_S", "ASKED_S"):
        monkeypatch.setattr(driving, bound, BOUND_S)
    driver.wait(settled)
    assert by == [threading.current_thread()]
