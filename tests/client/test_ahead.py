"""How far a client runs ahead of its cluster: in runs, and in bytes that it uploads for them."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.client.connection import run_credits
from pw.client.connection.runtime import Runtime
from pw.client.session.thread_messages import Put
from pw.core.errors import Disconnected
from pw.core.ids import client_id
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.scripted_thread import CREDITS, Scripted
from tests.stages.stage import BOUND_S, held, mesh_on

SIZE = 10_000
FEW = 3
"""Inputs under way that are too many."""
SPEC = ArraySpec((SIZE,), "uint8", Sharding((), ()), Placement(1, (0,)))


class Loop:
    """A thread that does the same again and again until that raises."""

    def __init__(self, step: Callable[[], object], steps: int = 1000) -> None:
        self.error: Future[None] = Future()
        self._step = step
        self._steps = steps
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in range(self._steps):
                self._step()
        except Exception as error:  # noqa: BLE001  (told to the test)
            self.error.set_exception(error)
        else:
            self.error.set_result(None)

    def until_blocked(self) -> None:
        until(lambda: self.error.done() or waits(self._thread), "the loop to be blocked")
        assert not self.error.done(), self.error.exception()


def waits(thread: threading.Thread) -> bool:
    """Whether a thread is in the runtime, and does not go on."""
    assert thread.ident is not None
    frame = sys._current_frames().get(thread.ident)
    files = [call.filename for call in traceback.extract_stack(frame)] if frame else [""]
    return files[-1].endswith("threading.py") and any(
        file.endswith("pw/client/connection/runtime.py") for file in files
    )


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_credits, "AHEAD_BYTES", FEW * SIZE)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = Runtime(Scripted, 1.0, 0)
    yield runtime
    runtime.close()


def session(runtime: Runtime) -> Scripted:
    assert isinstance(runtime.thread, Scripted)
    return runtime.thread


def put(runtime: Runtime, size: int = SIZE, for_run: bool = True) -> int:
    return runtime.upload(np.zeros(size, np.uint8), SPEC, for_run=for_run)


def step(runtime: Runtime) -> None:
    runtime.run(1, [put(runtime)], 1)


def until_runs(runtime: Runtime, count: int) -> None:
    until(lambda: session(runtime).runs == count, f"{count} runs")


def test_large_inputs_wait_for_runs_that_have_had_theirs(runtime: Runtime) -> None:
    loop = Loop(lambda: step(runtime))
    loop.until_blocked()
    assert (session(runtime).puts, session(runtime).runs) == (FEW, FEW)
    expected = FEW
    for back in (0, 1, 2, FEW):
        expected += back
        runtime.grant(back)
        until_runs(runtime, expected)
        loop.until_blocked()
        assert session(runtime).puts == session(runtime).runs == expected
    runtime.close()
    with pytest.raises(Disconnected, match=r"pw\.disconnect"):
        loop.error.result(BOUND_S)


def test_a_session_that_has_died_delays_no_caller(runtime: Runtime) -> None:
    loop = Loop(lambda: step(runtime), 10 * CREDITS)
    loop.until_blocked()
    runtime.grant(1 << 30)
    assert loop.error.result(BOUND_S) is None


def test_small_calls_and_puts_wait_for_credits_alone(runtime: Runtime) -> None:
    for _ in range(FEW):
        step(runtime)
    for _ in range(10):
        put(runtime, for_run=False)
    loops = [Loop(lambda: runtime.run(1, [b""], 1)) for _ in range(2)]
    for loop in loops:
        loop.until_blocked()
    assert session(runtime).runs == CREDITS
    runtime.grant(1)
    until_runs(runtime, CREDITS + 1)
    runtime.close()
    for loop in loops:
        with pytest.raises(Disconnected):
            loop.error.result(BOUND_S)


def test_uploads_of_threads_are_posted_in_the_order_of_their_numbers(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that hears of a later one first may take the earlier one for deleted."""

    later: list[Loop] = []
    lock, is_blocked = runtime.lock, threading.Event()

    class Lock:
        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                is_blocked.set()
                lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def slowly(client: int, serial: int) -> int:
        if not later:
            later.append(Loop(lambda: put(runtime, for_run=False), 1))
            until(lambda: is_blocked.is_set() or later[0].error.done(), "a second upload")
        return client_id(client, serial)

    monkeypatch.setattr(runtime, "lock", Lock())
    monkeypatch.setattr("pw.client.connection.runtime.client_id", slowly)
    put(runtime, for_run=False)
    later[0].error.result(BOUND_S)
    numbers = [note.array for note in session(runtime).notes if isinstance(note, Put)]
    assert len(numbers) == 2
    assert numbers == sorted(numbers)


def test_inputs_never_wait_when_no_run_is_in_flight(runtime: Runtime) -> None:
    for _ in range(4 * FEW):  # as one call with many, or calls that failed once theirs were sent
        put(runtime)
    put(runtime, 100 * SIZE)
    runtime.run(1, [b""], 1)
    loop = Loop(lambda: step(runtime))
    loop.until_blocked()
    assert session(runtime).runs == 1
    runtime.grant(1)
    until_runs(runtime, 1 + FEW)
    runtime.close()


def test_ctrl_c_interrupts_the_wait(runtime: Runtime) -> None:
    main = threading.main_thread()

    def interrupt() -> None:
        until(lambda: waits(main), "the main thread to be blocked")
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(CREDITS):
                step(runtime)
    finally:
        helper.join()
    assert session(runtime).puts == session(runtime).runs == FEW
    runtime.grant(1)
    step(runtime)
    assert session(runtime).puts == session(runtime).runs == FEW + 1


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_training_loop_with_large_batches() -> None:
    steps = 40

    def batch(number: int) -> Any:
        return np.full(SIZE, number, np.float32)

    with InProcessCluster(devices_per_island=1) as cluster:
        train = pw.jit(lambda w, b: (w + b, jnp.sum(b)), mesh=mesh_on(0, 1), donate_argnums=0)
        w, loss = train(batch(0), batch(0))
        loss.block_until_ready()
        losses = []

        def learn() -> None:
            nonlocal w
            w, loss = train(w, batch(len(losses)))
            losses.append(loss)

        with held(cluster):
            loop = Loop(learn, steps)
            until(lambda: losses, "the first step")
            loop.until_blocked()
            assert len(losses) == 1, "its batch is larger than what may be under way"
        loop.error.result(BOUND_S)
        np.testing.assert_array_equal(w, batch(sum(range(steps))))
        assert pw.get(losses) == [SIZE * number for number in range(steps)]
